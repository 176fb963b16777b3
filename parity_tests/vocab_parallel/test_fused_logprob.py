"""The fused forward and backward: saved tensors, memory, versions, dtypes, strides and rejections."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parity_tests.vocab_parallel.rounding import equal_to_rounding
from parity_tests.vocab_parallel.saved import NOTHING_SAVED, saved_beside, saved_in_inference
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.vocab_parallel import vocab_parallel_logprob

B, S, V = 2, 3, 8  # V is the width of one shard
TARGET = torch.tensor([[0, 7, -100], [3, 8, 15]])


def on_two_ranks(body):
    return run(body, CaseSpec(scheme="vocab_parallel", mesh={"tp": 2})).results


def logits(rank, dtype=torch.float32, shape=(B, S, V)):
    rng = np.random.Generator(np.random.Philox(key=[rank, 7]))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype).requires_grad_()


def logprob(mesh, z, target=TARGET, **options):
    start = mesh.rank("tp") * z.shape[-1]
    owned = dict(vocab_start_index=start, vocab_end_index=start + z.shape[-1])
    return vocab_parallel_logprob(z, target, mesh["tp"], **owned, **options)


@pytest.mark.parametrize(("with_entropy", "bytes_per_token"), [(False, 12), (True, 16)])
def test_saves_the_logits_by_reference_and_a_few_bytes_per_token(with_entropy, bytes_per_token):
    def body(mesh, case):
        z = logits(mesh.rank("tp"))
        return saved_beside((z,), lambda: logprob(mesh, z, with_entropy=with_entropy))

    assert on_two_ranks(body) == ((1, bytes_per_token * B * S),) * 2


def test_inference_only_saves_nothing():
    def body(mesh, case):
        return saved_in_inference(lambda: logprob(mesh, logits(0), inference_only=True))

    assert on_two_ranks(body) == (NOTHING_SAVED,) * 2


class Largest(TorchDispatchMode):
    """Records the element count of the largest tensor that an operation computed into memory of its own."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and "empty" not in str(function):  # an allocation is no computation
            inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            if output.untyped_storage().data_ptr() not in inputs:
                self.numel = max(self.numel, output.numel())
        return output


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chunk_bounds_the_working_set(chunk_size, dtype):
    def body(mesh, case):
        z = logits(0, dtype, (2, 64, 32))
        target = torch.zeros(2, 64, dtype=torch.int64)
        with Largest() as largest:
            y = logprob(mesh, z, target, chunk_size=chunk_size, with_entropy=True)
            torch.autograd.grad(y, z, [torch.ones(2, 64)] * 2)
        return largest.numel

    # Two sequences of chunk_size positions, or the bytes sent: four numbers of each token from both ranks.
    assert set(on_two_ranks(body)) == {max(2 * chunk_size * 32, 2 * 4 * 2 * 64)}


def test_an_edit_between_forward_and_backward_is_seen():
    def body(mesh, case):
        z = logits(0)
        inner = z * 1.0
        y = logprob(mesh, inner)
        inner.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return True

    assert all(on_two_ranks(body))


def test_gradient_in_place_is_the_gradient_over_the_logits():
    def body(mesh, case):
        z = logits(mesh.rank("tp"))
        c = torch.arange(1.0, 7.0).view(B, S)
        (apart,) = torch.autograd.grad(logprob(mesh, z), z, c)
        before, version = z.detach().clone(), z._version
        assert not torch.equal(apart, before)
        (over,) = torch.autograd.grad(logprob(mesh, z, inplace_gradient=True), z, c)
        return torch.equal(over, apart), over.data_ptr() == z.data_ptr(), torch.equal(z, over), z._version > version

    assert on_two_ranks(body) == ((True,) * 4,) * 2


def test_another_user_of_overwritten_logits_gets_autograds_error():
    def body(mesh, case):
        z = logits(0)
        inner = z * 1.0
        square = inner.square().sum()
        logprob(mesh, inner, inplace_gradient=True).sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()
        return True

    assert all(on_two_ranks(body))


def test_an_output_may_be_edited_in_place():
    def body(mesh, case):
        z = logits(mesh.rank("tp"))
        y, h = logprob(mesh, z, with_entropy=True)
        (want,) = torch.autograd.grad((2 * y).sum() + (3 * h).sum(), z)
        y, h = logprob(mesh, z, with_entropy=True)
        y.mul_(2.0)
        h.mul_(3.0)
        (got,) = torch.autograd.grad(y.sum() + h.sum(), z)
        return torch.equal(want, got)

    assert all(on_two_ranks(body))


def test_one_of_two_outputs_may_go_unused():
    def body(mesh, case):
        z = logits(mesh.rank("tp"))
        c = torch.arange(1.0, 7.0).view(B, S)
        y, h = logprob(mesh, z, with_entropy=True)
        zero = torch.zeros(B, S)
        pairs = [(y, (c, zero)), (h, (zero, c))]
        return [
            equal_to_rounding(
                torch.autograd.grad(used, z, c, retain_graph=True)[0],
                torch.autograd.grad((y, h), z, cotangents, retain_graph=True)[0],
            )
            for used, cotangents in pairs
        ]

    assert on_two_ranks(body) == ([True, True],) * 2


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_dtypes(dtype, result):
    def body(mesh, case):
        z = logits(0, dtype)
        y, h = logprob(mesh, z, with_entropy=True)
        (y.sum() + h.sum()).backward()
        return (y.dtype, h.dtype, z.grad.dtype) == (result, result, dtype)

    assert all(on_two_ranks(body))


STRIDES = {
    "short": lambda z: z[:, :-1],
    "transposed": lambda z: z.transpose(0, 1),
    "every other row": lambda z: z[:, ::2],
    "every other column": lambda z: z[..., ::2],
    "columns first": lambda z: z.permute(2, 0, 1),
    "one sequence": lambda z: z[1],
    "one token": lambda z: z[1, 1],
    "four dims": lambda z: z.unflatten(1, (1, S)),
    "expanded": lambda z: z[:1].expand(3, S, V),
    "no token": lambda z: z[:, :0],
}


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("strides", STRIDES)
def test_leading_dims_and_strides_change_nothing(strides, chunk_size):
    def body(mesh, case):
        z = STRIDES[strides](logits(mesh.rank("tp")).detach())
        target = torch.arange(z.shape[:-1].numel()).view(z.shape[:-1]) % (2 * z.shape[-1])
        c = torch.linspace(-1, 1, 5)[0].expand(target.shape)
        results = []
        for x in (z, z.contiguous()):
            x = x.detach().requires_grad_()
            y = logprob(mesh, x, target, chunk_size=chunk_size)
            results.append((y, *torch.autograd.grad(y, x, c)))
        return [equal_to_rounding(*pair) for pair in zip(*results, strict=True)]

    assert on_two_ranks(body) == ([True, True],) * 2


@pytest.mark.parametrize("is_constant", [True, False])
def test_a_second_derivative_is_rejected(is_constant):
    """Also where the cotangent is constant, as in a gradient penalty: the gradient depends on the logits too."""

    def body(mesh, case):
        z = logits(0)
        c = torch.ones(B, S).requires_grad_(not is_constant)
        (gradient,) = torch.autograd.grad(logprob(mesh, z), z, c, create_graph=True)
        with pytest.raises(RuntimeError, match="FusedLogprob: its gradient cannot be differentiated again"):
            (z.sum() + gradient.square().sum()).backward()
        return True

    assert all(on_two_ranks(body))


def test_a_nan_row_without_a_target_reaches_no_gradient():
    def body(mesh, case):
        z = logits(mesh.rank("tp"))
        with torch.no_grad():
            z[0, 2] = torch.nan  # its target is -100, whose score is 0
            z[1, 0, 0] = torch.inf  # its target is 3
        y = logprob(mesh, z)
        (gradient,) = torch.autograd.grad(y, z, torch.ones(B, S))
        return y.isnan().tolist(), gradient[0, 2].tolist(), bool(gradient[0, :2].isfinite().all())

    nan_rows = [[False, False, False], [True, False, False]]
    assert on_two_ranks(body) == ((nan_rows, [0.0] * V, True),) * 2


def on_one_rank(z, target, start, end, **options):
    """The score of each target and the gradient of their sum, where one rank has full rows."""

    def body(mesh, case):
        leaf = z.clone().requires_grad_()
        vocab = dict(vocab_start_index=start, vocab_end_index=end)
        outputs = vocab_parallel_logprob(leaf, target, mesh["tp"], **vocab, **options)
        score = outputs[0] if isinstance(outputs, tuple) else outputs
        return score.detach(), torch.autograd.grad(score.sum(), leaf)[0]

    return run(body, CaseSpec(scheme="vocab_parallel", mesh={"tp": 1})).results[0]


def test_ids_are_relative_to_the_start_of_the_range():
    """Ids 5 to 12 of eight columns; 0 and 13 are outside."""
    z, target = logits(0, shape=(4, V)).detach(), torch.tensor([5, 12, 0, 13])
    shifted, from_zero = on_one_rank(z, target, 5, 5 + V), on_one_rank(z, target - 5, 0, V)
    assert all(torch.equal(a, b) for a, b in zip(shifted, from_zero, strict=True))
    assert torch.equal(shifted[0] == 0, torch.tensor([False, False, True, True]))


def test_columns_beyond_the_vocabulary_are_no_ids():
    """Padding of the shard: its columns count in the normaliser, and an id of one is outside the vocabulary."""
    z = torch.linspace(-1.0, 1.0, V).repeat(2, 1)
    score, gradient = on_one_rank(z, torch.tensor([V - 3, V - 2]), 0, V - 2)
    assert equal_to_rounding(score[:1], z.log_softmax(-1)[:1, V - 3])
    assert score[1] == 0.0 and not gradient[1].any()


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"with_entropy": True}], ids=str)
def test_no_column_is_an_id(options):
    """Of an empty range every id is outside the vocabulary, also the one before its start."""
    z = torch.linspace(-1.0, 1.0, 3 * V).view(3, V)
    score, gradient = on_one_rank(z, torch.tensor([3, 4, -100]), 4, 4, **options)
    assert score.tolist() == [0.0] * 3 and not gradient.any()
