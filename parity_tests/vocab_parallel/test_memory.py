"""Peak memory beside the logits: live tensors of forward and backward, in units of one rank's logits; and the bytes
saved for backward, exactly.

The first of two ranks has 64 MiB of logits, much more than a block of rows, whose size is fixed. The second rank has
next to no logits, to save time.
"""

import functools
import itertools
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.live_peak import LivePeak
from torch_impl import vocab_parallel as vp

SIZE = 64 << 20
COLUMNS, OTHERS = 1 << 15, 1 << 6  # of the two ranks
K = 16
SHARE, FILTERED_SHARE = 0.05, 0.1
DTYPES = (torch.float32, torch.bfloat16)
BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dataclass(frozen=True)
class Rank:
    """A function's arguments: this rank's logits, all targets and the ids that the rank owns."""

    mesh: object
    logits: torch.Tensor
    target: torch.Tensor
    start: int
    end: int

    @property
    def group(self):
        return self.mesh["tp"]

    @property
    def ids(self):
        return (self.target.unsqueeze(-1) + torch.arange(K) * 1000) % (COLUMNS + OTHERS)


@functools.cache
def drawn(dtype, kind, columns):
    rows = SIZE // dtype.itemsize // COLUMNS
    normal = torch.randn(1, rows, columns, generator=torch.Generator().manual_seed(columns))
    return normal.mul_({"flat": 1.0, "peaked": 8.0}[kind]).to(dtype)


def rank_arguments(mesh, dtype, kind="flat"):
    start, end = (0, COLUMNS) if mesh.rank("tp") == 0 else (COLUMNS, COLUMNS + OTHERS)
    logits = drawn(dtype, kind, end - start).clone().requires_grad_()
    target = torch.arange(logits.shape[1]).unsqueeze(0) * 7919 % (COLUMNS + OTHERS)
    return Rank(mesh, logits, target, start, end)


def peaks(call, dtype, kind="flat"):
    """The first rank's peaks (forward, backward), in units of its logits."""

    def body(mesh, case):
        rank = rank_arguments(mesh, dtype, kind)
        with LivePeak() as forward:
            result = call(rank)
        outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None and x.requires_grad]
        cotangents = [torch.ones_like(x) for x in outputs]
        with LivePeak() as backward:
            if outputs:
                torch.autograd.grad(outputs, rank.logits, cotangents)
        return forward.most / rank.logits.nbytes, backward.most / rank.logits.nbytes

    return run(body, CaseSpec(scheme="memory", mesh={"tp": 2})).results[0]


def logprob(rank, **options):
    owned = dict(vocab_start_index=rank.start, vocab_end_index=rank.end)
    return vp.vocab_parallel_logprob(rank.logits, rank.target, rank.group, **owned, **options)


def chunked(rank, chunk_size=None):
    return vp.ChunkedDistributedLogprob.apply(rank.logits, rank.target, rank.start, rank.end, chunk_size, rank.group)


def distilled(rank, zero_outside_topk):
    teacher = rank.ids.float()
    groups = rank.mesh.rank("tp"), rank.group
    student, _, entropy = vp.get_distillation_topk_logprobs_from_logits(
        rank.logits, teacher, rank.ids, zero_outside_topk, True, *groups
    )
    return student, entropy


WITH_GRADIENT = {
    "logprob": lambda r: vp.DistributedLogprob.apply(r.logits, r.target, r.start, r.end, r.group),
    "logprob in chunks chosen here": chunked,
    "logprob in chunks of 4": partial(chunked, chunk_size=4),
    "logprob with entropy": partial(logprob, with_entropy=True),
    "logprob, heated": partial(logprob, temperature=0.7),
    "entropy": lambda r: vp.ChunkedDistributedEntropy.apply(r.logits, None, r.group),
    "logprobs at ids": lambda r: vp.ChunkedDistributedGatherLogprob.apply(
        r.logits, r.ids, r.start, r.end, None, r.group
    ),
    "cross entropy": lambda r: vp.DistributedCrossEntropy.apply(r.logits, r.logits.detach(), r.group),
    "next tokens": lambda r: vp.from_parallel_logits_to_logprobs(r.logits, r.target, r.start, r.end, r.group),
    "distillation over all": partial(distilled, zero_outside_topk=True),
    "distillation over k": partial(distilled, zero_outside_topk=False),
    "logits at ids": lambda r: vp.gather_logits_at_global_indices(
        r.logits, r.ids, r.group, vocab_start_index=r.start, vocab_end_index=r.end
    ),
}


@pytest.mark.fast_values(1)
@BOTH
@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_a_gradient_and_little_more(name, dtype):
    forward, backward = peaks(WITH_GRADIENT[name], dtype)
    assert forward <= SHARE
    assert 1.0 <= backward <= 1.0 + SHARE


@pytest.mark.fast_values(1)
@BOTH
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_gradient_in_place_takes_next_to_nothing(with_entropy, dtype):
    forward, backward = peaks(partial(logprob, with_entropy=with_entropy, inplace_gradient=True), dtype)
    assert forward <= SHARE and backward <= SHARE


@pytest.mark.fast_values(2)
@BOTH
@pytest.mark.parametrize("f", [vp._compute_distributed_softmax, vp._compute_distributed_log_softmax])
def test_a_softmax_and_little_more(f, dtype):
    forward, _ = peaks(lambda rank: f(rank.logits, rank.group), dtype)
    assert 1.0 <= forward <= 1.0 + SHARE


# Sums over the vocabulary take seconds at this size, so the last four do not combine every kind with every dtype.
FILTERS = [
    *itertools.product([50], [1.0, 0.9], ["flat", "peaked"], DTYPES),
    *[(None, 0.95, "flat", torch.float32), (None, 0.95, "peaked", torch.bfloat16)],
    *[(2000, 0.95, "flat", torch.bfloat16), (2000, 0.95, "peaked", torch.float32)],
]


@pytest.mark.fast_values(2)
@pytest.mark.parametrize(("top_k", "top_p", "kind", "dtype"), FILTERS, ids=str)
def test_a_filter_takes_a_tenth_and_its_lists_or_sums(top_k, top_p, kind, dtype):
    def call(rank):
        options = False, 1.0, rank.start, rank.end
        return vp.DistributedLogprobWithSampling.apply(rank.logits, rank.target, rank.group, top_k, top_p, *options)

    forward, backward = peaks(call, dtype, kind)
    in_lists = top_k is not None and top_k <= 1024
    numbers = 2 * (top_k + 2) if in_lists else 256  # of each row, in float32
    assert forward <= FILTERED_SHARE + numbers * 4 / (COLUMNS * dtype.itemsize)
    assert 1.0 <= backward <= 1.0 + SHARE


@pytest.mark.fast_values(1)
@BOTH
def test_the_largest_logits_take_a_block_and_their_pairs(dtype):
    def call(rank):
        owned = dict(vocab_start_index=rank.start, vocab_end_index=rank.end)
        return vp.distributed_vocab_topk(rank.logits, K, rank.group, **owned)

    forward, _ = peaks(call, dtype)
    pairs = 2 * K * 12  # of both ranks, for each row: a float32 and an int64
    assert forward <= SHARE + pairs / (COLUMNS * dtype.itemsize)


def saved_bytes(call, dtype):
    """Bytes per token that the first of two ranks saves for backward beside the logits."""

    def body(mesh, case):
        start, end = (0, COLUMNS) if mesh.rank("tp") == 0 else (COLUMNS, COLUMNS + OTHERS)
        logits = torch.ones(1, 3, end - start, dtype=dtype, requires_grad=True)
        rank = Rank(mesh, logits, torch.tensor([[0, 1, COLUMNS]]), start, end)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            call(rank)
        beside = [x for x in saved if x.data_ptr() != rank.logits.data_ptr()]
        return sum(x.nbytes for x in beside) / rank.target.numel()

    return run(body, CaseSpec(scheme="memory", mesh={"tp": 2})).results[0]


# For each token two numbers, and an int32 for each id; with entropy one number more.
SAVED_NUMBERS_AND_IDS = {
    "logprob": (2, 1),
    "logprob with entropy": (3, 1),
    "logprobs at ids": (2, K),
    "entropy": (3, 0),
    "cross entropy": (4, 0),
}


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)], ids=str)
@pytest.mark.parametrize("name", SAVED_NUMBERS_AND_IDS)
def test_numbers_saved_for_each_token(name, dtype, itemsize):
    numbers, ids = SAVED_NUMBERS_AND_IDS[name]
    assert saved_bytes(WITH_GRADIENT[name], dtype) == numbers * itemsize + ids * 4
