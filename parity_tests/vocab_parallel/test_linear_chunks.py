"""Chunks of logits: the number alive at once, sums over chunks, and work that is left out without a gradient."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parity_tests.vocab_parallel.chunk_sizes import calls_of_all
from parity_tests.vocab_parallel.test_linear_logprob import SCHEMES, linear_logprobs
from shardproof import CaseSpec
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl import vocab_parallel as vp
from torch_impl.vocab_parallel.linear_chunks import chunk_positions


def on_ranks(body, tp=2):
    return run(body, CaseSpec(scheme="vocab_parallel", mesh={"cp": 1, "tp": tp})).results


def scores(mesh, hidden, weight, target, chunk_size=None, **options):
    rows = len(weight)
    start = mesh.rank("tp") * rows
    return vp.ChunkedDistributedHiddenStatesToLogprobs.apply(
        hidden, target, weight, start, start + rows, chunk_size, mesh["tp"], **options
    )


def tensors(s, b, v, d, dtype=torch.float32):
    """Hidden states, one rank's weight, and targets in the vocabulary of two ranks."""
    hidden = torch.linspace(-2, 3, s * b * d, dtype=torch.float64).sin().view(s, b, d)
    weight = torch.linspace(-3, 2, v * d, dtype=torch.float64).cos().view(v, d)
    target = (torch.arange(b * s) * 7 % (2 * v)).view(b, s)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


class Alive(TorchDispatchMode):
    """The most elements of tensors with rows of `width` that were ever alive at once, and all shapes made."""

    def __init__(self, width):
        super().__init__()
        self.width, self.most, self.shapes, self._alive = width, 0, set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return out

    def _note(self, tensor):
        self.shapes.add(tuple(tensor.shape))
        if tensor.shape[-1:] == (self.width,):
            self._alive.append(weakref.ref(tensor))
        self._alive = [ref for ref in self._alive if ref() is not None]
        storages = [(ref().untyped_storage(), ref().element_size()) for ref in self._alive]
        sizes = {storage.data_ptr(): storage.nbytes() // size for storage, size in storages}
        self.most = max(self.most, sum(sizes.values()))


def test_one_chunk_of_logits_is_alive_and_no_more():
    """There are four chunks; one is alive in the input dtype, and perhaps a second time in float32."""
    v, s, chunk = 8192, 1024, 256

    def body(mesh, case):
        hidden, weight, target = tensors(s, 1, v, 2)
        with Alive(v) as forward:
            y = scores(mesh, hidden, weight, target, chunk)
        with Alive(v) as backward:
            torch.autograd.grad(y, [hidden, weight], torch.ones_like(y))
        return forward.most, backward.most

    ((forward, backward),) = on_ranks(body, tp=1)
    assert chunk * v <= forward <= 2 * chunk * v
    assert chunk * v <= backward <= 2 * chunk * v


class Products(TorchDispatchMode):
    """The number of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("s", "b", "d", "chunk_size", "products"),
    [(3, 2, 6, None, (1, 2)), (3, 2, 6, 3, (1, 3)), (3, 2, 5, None, (1, 3)), (4, 1, 9, 2, (2, 6))],
    ids=["saved", "a chunk size", "more logits than weights", "two chunks"],
)
def test_logits_that_take_no_more_than_the_weight_are_not_computed_again(s, b, d, chunk_size, products):
    def body(mesh, case):
        hidden, weight, target = tensors(s, b, 7, d)
        with Products() as forward:
            y = scores(mesh, hidden, weight, target, chunk_size)
        with Products() as backward:
            y.sum().backward()
        return forward.count, backward.count

    assert on_ranks(body) == (products, products)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_second_backward_computes_saved_logits_again(frozen):
    """The first backward overwrites the saved logits."""

    def body(mesh, case):
        leaves = list(tensors(3, 2, 7, 8, torch.float64))
        leaves[frozen] = leaves[frozen].detach()
        y = scores(mesh, *[leaves[i] for i in (0, 1, 2)])
        g = torch.linspace(-1, 2, 6, dtype=y.dtype).view(2, 3)
        first, second = (torch.autograd.grad(y, leaves[1 - frozen], g, retain_graph=True)[0] for _ in range(2))
        return torch.equal(first, second), bool(first.abs().sum() > 0)

    assert on_ranks(body) == ((True, True),) * 2


def test_a_frozen_weight_or_frozen_states_make_no_buffer():
    v, s, d = 7, 6, 5

    def body(mesh, case):
        results = []
        for frozen in (0, 1):
            leaves = list(tensors(s, 2, v, d))
            leaves[frozen] = leaves[frozen].detach()
            y = scores(mesh, *leaves, 2)
            with Alive(v) as backward:
                y.sum().backward()
            results.append((backward.shapes, leaves[frozen].grad, leaves[1 - frozen].grad is not None))
        (states_frozen, no_states, has_weight), (weight_frozen, no_weight, has_states) = results
        assert no_states is None and no_weight is None and has_weight and has_states
        return (v, d) in states_frozen, (v, d) in weight_frozen, (s, 2, d) in weight_frozen

    assert on_ranks(body) == ((True, False, True),) * 2


def test_frozen_states_need_no_collective_in_backward():
    def body(mesh, case):
        hidden, weight, target = tensors(6, 2, 7, 5)
        scores(mesh, hidden.detach(), weight, target, 2).sum().backward()

    ranks = run(body, CaseSpec(scheme="vocab_parallel", mesh={"tp": 2}))
    assert [(row.op, row.phase) for row in ranks.ledger.rows] == [("all_gather", "fwd")] * 2


def test_a_sum_of_many_chunks_loses_no_term():
    """The sum has 1,024 terms of 0.5; in bfloat16 it would stop growing at 128."""

    def body(mesh, case):
        hidden = torch.ones(1024, 1, 1, dtype=torch.bfloat16)
        weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
        scores(mesh, hidden, weight, torch.zeros(1, 1024, dtype=torch.int64), 1).sum().backward()
        return weight.grad.flatten().tolist()

    assert on_ranks(body, tp=1) == ([512.0, -512.0],)


@pytest.mark.parametrize("chunk_size", [1, 3, 64, None])
def test_many_small_chunks_are_as_good_as_one(chunk_size):
    """The case and so the budget are the same, whether d weight is a sum over 64 chunks or one product."""
    case = linear_logprobs.case(tp=2, s=64, b=1, d=3, v=8, dtype="bfloat16", seed=5, chunk_size=chunk_size)
    verify_case(linear_logprobs, case).raise_if_failed()


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_no_chunk_size_changes_the_ledger(declared):
    sizes = {axis: 2 for axis in declared.mesh} | ({"t": 16, "b": 1} if "t" in declared.dims else {"s": 8, "b": 2})
    assert {op for op, _ in calls_of_all(declared, (None, 1, 2, 5), **sizes, d=3, v=6, seed=3)} >= {"all_gather"}


def test_the_automatic_chunk_is_a_power_of_two_within_its_memory():
    def rows(s, b, v, chunk_size=None, dtype=torch.float32):
        return chunk_positions(torch.empty(s, b, 1, dtype=dtype), v, chunk_size)

    assert rows(10**6, 1, 32768) == 256  # 32 MiB
    assert rows(10**6, 1, 32768, dtype=torch.bfloat16) == 512
    assert rows(10**6, 1, 32768, dtype=torch.float64) == 128
    assert rows(10**6, 1, 32767) == 256
    assert rows(10**6, 1, 32769) == 128
    assert rows(10**6, 1, 10**6) == 128  # never fewer rows
    assert rows(10**6, 4, 10**6) == 32
    assert rows(10**6, 2, 32768) == 128
    assert rows(100, 1, 8) == 100
    assert rows(100, 1, 8, 7) == 7
    assert rows(3, 1, 8, 7) == 3
    assert rows(0, 1, 8) == 1
