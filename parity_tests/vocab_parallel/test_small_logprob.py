"""The short route of small calls on full rows: when it is taken, what it saves, and rows without a softmax."""

import math

import pytest
import torch
import torch.distributed as dist

from parity_tests.vocab_parallel.rounding import equal_to_rounding
from torch_impl.vocab_parallel import small_logprob, vocab_parallel_logprob

V = 8


@pytest.fixture
def route(monkeypatch):
    """The number of calls that take the short route."""
    forward, calls = small_logprob.forward, []
    monkeypatch.setattr(small_logprob, "forward", lambda *arguments: (calls.append(1), forward(*arguments))[1])
    return calls


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def logprob_and_gradient(z, target, group, **options):
    z = z.clone().requires_grad_()
    options = {"vocab_start_index": 0, "vocab_end_index": z.shape[-1], **options}
    score = vocab_parallel_logprob(z, target, group, **options)
    score.backward(torch.linspace(-1.0, 2.0, score.numel(), dtype=score.dtype).view(score.shape))
    return score.detach(), z.grad


def rows():
    """Rows of ordinary logits and of each kind that has no softmax, each looked up inside and outside."""
    ordinary = torch.linspace(-3.0, 3.0, V, dtype=torch.float64).repeat(3, 1) * torch.tensor([[1.0], [9.0], [200.0]])
    special = torch.zeros(6, V, dtype=torch.float64)
    special[1] = -math.inf
    special[2, 3] = math.inf
    special[3, 3] = -math.inf
    special[4, 5] = math.nan
    special[5, 1:] = -math.inf
    z = torch.cat([ordinary, special]).repeat_interleave(4, 0)
    return z, torch.tensor([0, 3, -100, V]).repeat(len(z) // 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_routes_agree(route, monkeypatch, group, dtype, temperature):
    """A chunk size of all positions computes the same by the other route, also where a row has no softmax."""
    z, target = rows()
    z = z.to(dtype)
    small = logprob_and_gradient(z, target, group, temperature=temperature)
    assert len(route) == 1
    blocks = logprob_and_gradient(z, target, group, temperature=temperature, chunk_size=len(z))
    assert len(route) == 1
    for ours, other in zip(small, blocks, strict=True):
        assert ours.dtype == other.dtype
        assert torch.equal(ours.isnan(), other.isnan())
        assert equal_to_rounding(ours[~ours.isnan()], other[~other.isnan()])


def test_an_ignored_row_has_score_and_gradient_zero_whatever_its_logits(group):
    z, target = rows()
    score, gradient = logprob_and_gradient(z, target, group)
    ignored = (target < 0) | (target >= V)
    assert not score[ignored].any()
    assert torch.equal(gradient[ignored], torch.zeros_like(z[ignored]))


def test_ids_are_relative_to_the_start_of_the_range(route, group):
    """Ids 5 to 12 of eight columns; 0 and 13 are outside."""
    z, target = torch.randn(4, V), torch.tensor([5, 12, 0, 13])
    shifted = logprob_and_gradient(z, target, group, vocab_start_index=5, vocab_end_index=5 + V)
    from_zero = logprob_and_gradient(z, target - 5, group)
    assert route == [1, 1]
    assert all(torch.equal(a, b) for a, b in zip(shifted, from_zero, strict=True))
    assert torch.equal(shifted[0] == 0, torch.tensor([False, False, True, True]))


def test_saves_twelve_bytes_per_token(route, group):
    z, saved = torch.randn(2, 3, V, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x), lambda x: x):
        vocab_parallel_logprob(z, torch.zeros(2, 3, dtype=torch.long), group, vocab_start_index=0, vocab_end_index=V)
    assert route == [1]
    assert sum(x.nbytes for x in saved if x.data_ptr() != z.data_ptr()) == 12 * 2 * 3


@pytest.mark.parametrize(
    "options",
    [{"with_entropy": True}, {"chunk_size": 1}, {"inplace_gradient": True}],
    ids=lambda options: next(iter(options)),
)
def test_what_it_does_not_compute_takes_the_other_route(route, group, options):
    z = torch.randn(2, 3, V)
    vocab_parallel_logprob(
        z, torch.zeros(2, 3, dtype=torch.long), group, vocab_start_index=0, vocab_end_index=V, **options
    )
    assert route == []


def test_large_logits_are_read_in_blocks(route, group):
    largest = small_logprob.MAX_LOGITS
    for columns, calls in ((largest, 1), (largest + 1, 0)):
        route.clear()
        logprob_and_gradient(torch.zeros(1, columns), torch.zeros(1, dtype=torch.long), group)
        assert len(route) == calls


def test_columns_beyond_the_vocabulary_are_no_ids(route, group):
    """Padding of the shard: its columns count in the normaliser, and an id of one is outside the vocabulary."""
    z, target = torch.linspace(-1.0, 1.0, V).repeat(2, 1), torch.tensor([V - 3, V - 2])
    small = logprob_and_gradient(z, target, group, vocab_end_index=V - 2)
    assert len(route) == 1 and small[0][1] == 0.0 and not small[1][1].any()
    blocks = logprob_and_gradient(z, target, group, vocab_end_index=V - 2, chunk_size=2)
    assert len(route) == 1
    assert all(equal_to_rounding(ours, others) for ours, others in zip(small, blocks, strict=True))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"with_entropy": True}], ids=str)
def test_no_column_is_an_id(group, options):
    """Of an empty range every id is outside the vocabulary, also the one before its start."""
    z = torch.linspace(-1.0, 1.0, 3 * V).view(3, V).requires_grad_()
    vocab = {"vocab_start_index": 4, "vocab_end_index": 4}
    outputs = vocab_parallel_logprob(z, torch.tensor([3, 4, -100]), group, **vocab, **options)
    score = outputs[0] if isinstance(outputs, tuple) else outputs
    (gradient,) = torch.autograd.grad(score.sum(), z)
    assert score.tolist() == [0.0] * 3 and not gradient.any()
