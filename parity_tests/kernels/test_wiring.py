"""Log-probability on the kernels saves, overwrites and shows the same as on eager torch."""

import math

import pytest
import torch

from parity_tests.kernels.device import INTERPRETED
from parity_tests.kernels.rows import normal
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.vocab_parallel import vocab_parallel_logprob

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="not run: a rank's tensors are on the CPU")
B, S, V = 2, 3, 6  # V is the width of one shard
TARGET = torch.tensor([[0, 7, -100], [3, 8, 11]])


def on_two_ranks(body):
    return run(body, CaseSpec(scheme="kernels", mesh={"tp": 2})).results


def logits(rank):
    return normal(B, S, V, seed=rank).float().requires_grad_()


def logprob(mesh, z, target=TARGET, backend="triton", **options):
    start = mesh.rank("tp") * V
    owned = dict(vocab_start_index=start, vocab_end_index=start + V, backend=backend)
    return vocab_parallel_logprob(z, target, mesh["tp"], **owned, **options)


def test_gradient_in_place_is_the_gradient_over_the_logits():
    def body(mesh, case):
        z, c = logits(mesh.rank("tp")), torch.arange(1.0, 7.0).view(B, S)
        (apart,) = torch.autograd.grad(logprob(mesh, z), z, c)
        version = z._version
        (over,) = torch.autograd.grad(logprob(mesh, z, inplace_gradient=True), z, c)
        return torch.equal(over, apart), over.data_ptr() == z.data_ptr(), z._version > version

    assert on_two_ranks(body) == ((True,) * 3,) * 2


def test_another_user_of_overwritten_logits_gets_autograds_error():
    def body(mesh, case):
        inner = logits(0) * 1.0
        square = inner.square().sum()
        logprob(mesh, inner, inplace_gradient=True).sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()
        return True

    assert all(on_two_ranks(body))


def test_saves_the_same_tensors_as_eager_torch():
    def body(mesh, case):
        sizes = []
        for backend in ("triton", "eager"):
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x, to=saved: to.append(x.nbytes) or x, lambda x: x):
                logprob(mesh, logits(0), backend=backend, with_entropy=True)
            sizes.append(saved)
        return sizes[0] == sizes[1] and len(sizes[0]) > 0

    assert all(on_two_ranks(body))


@pytest.mark.parametrize(
    "view",
    [lambda z: z[:, :-1], lambda z: z.transpose(0, 1), lambda z: z[:1].expand(3, S, V), lambda z: z[:, :0]],
    ids=["short", "transposed", "expanded", "no token"],
)
def test_strides_and_chunks_change_nothing(view):
    def body(mesh, case):
        z = view(logits(mesh.rank("tp")).detach())
        target = torch.arange(z.shape[:-1].numel()).view(z.shape[:-1]) % (2 * V)
        c = torch.linspace(-1, 1, 5)[0].expand(target.shape)
        results = []
        for x, chunk_size in ((z, None), (z, 1), (z.contiguous(), None)):
            x = x.detach().requires_grad_()
            y = logprob(mesh, x, target, chunk_size=chunk_size)
            results.append((y, *torch.autograd.grad(y, x, c)))
        return [all(torch.equal(x, of_first) for x in of_all) for of_first, *of_all in zip(*results, strict=True)]

    assert on_two_ranks(body) == ([True, True],) * 2


def test_an_unused_entropy_has_no_gradient_on_either():
    def body(mesh, case):
        z = logits(mesh.rank("tp")).detach()
        z[0, 2] = math.nan  # an out-of-vocabulary target
        checks = []
        for backend in ("triton", "eager"):
            x = z.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(
                logprob(mesh, x, backend=backend, with_entropy=True), x, [torch.ones(B, S), (TARGET >= 0).float()]
            )
            checks.append(bool((gradient[0, 2] == 0).all()) and not gradient.isnan().any())
        return checks

    assert on_two_ranks(body) == ([True, True],) * 2


def test_a_row_of_nan_is_nan_on_both():
    def body(mesh, case):
        z = logits(mesh.rank("tp")).detach()
        if mesh.rank("tp"):
            z[0, 0, 5] = math.nan
        z[0, 2, 1] = math.nan  # an out-of-vocabulary target
        z[1, 0, 2] = math.inf
        z[1, 1] = -math.inf
        same = []
        for with_entropy in (False, True):
            results = []
            for backend in ("triton", "eager"):
                x = z.clone().requires_grad_()
                y = logprob(mesh, x, backend=backend, with_entropy=with_entropy)
                outputs = y if with_entropy else (y,)
                (gradient,) = torch.autograd.grad(outputs, x, [torch.ones(B, S)] * len(outputs))
                results.append([*(output.isnan().tolist() for output in outputs), gradient.isnan().tolist()])
            same.append(results[0] == results[1] and any(map(any, results[0][0])))
        return same

    assert on_two_ranks(body) == ([True, True],) * 2
