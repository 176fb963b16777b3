"""All messages by which log-probabilities reject arguments; every rank raises them before anything is sent."""

import itertools
from operator import mul

import pytest
import torch

from parity_tests.rejections import rejected
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp
from torch_impl.vocab_parallel.logprob import may_share_memory

LOGITS = torch.zeros(2, 8, 8)
TARGET = torch.zeros(2, 8, dtype=torch.int64)
HINT = "pass a ProcessGroup (a group of size 1 for no tensor parallelism)"


def call_logprob(group, logits=LOGITS, target=TARGET, start=0, end=8, **options):
    return vp.vocab_parallel_logprob(logits, target, group, vocab_start_index=start, vocab_end_index=end, **options)


def call_plain(group, logits=LOGITS, target=TARGET, start=0, end=8, temperature=1.0):
    return vp.DistributedLogprob.apply(logits, target, start, end, group, False, temperature)


def call_chunked(group, chunk_size):
    return vp.ChunkedDistributedLogprob.apply(LOGITS, TARGET, 0, 8, chunk_size, group)


TYPE_ERRORS = [
    (lambda g: call_logprob(None), f"vocab_parallel.logprob: tp_group is None; {HINT}"),
    (lambda g: call_logprob(0), f"vocab_parallel.logprob: tp_group is an int; {HINT}"),
    (lambda g: call_plain(None), f"vocab_parallel.DistributedLogprob: group is None; {HINT}"),
    (lambda g: call_chunked(None, 1), f"vocab_parallel.ChunkedDistributedLogprob: tp_group is None; {HINT}"),
    (
        lambda g: vp._compute_distributed_log_softmax(LOGITS, None),
        f"vocab_parallel.log_softmax: group is None; {HINT}",
    ),
    (lambda g: vp._compute_distributed_softmax(LOGITS, None), f"vocab_parallel.softmax: group is None; {HINT}"),
    (
        lambda g: call_logprob(g, target=TARGET.float()),
        "vocab_parallel.logprob: target is float32; ids must be int32 or int64",
    ),
    (
        lambda g: call_plain(g, target=TARGET.bool()),
        "vocab_parallel.DistributedLogprob: target is bool; ids must be int32 or int64",
    ),
    (
        lambda g: call_logprob(g, logits=LOGITS.long()),
        "vocab_parallel.logprob: vocab_parallel_logits is int64; logits must be floating",
    ),
    (
        lambda g: vp._compute_distributed_softmax(LOGITS.int(), g),
        "vocab_parallel.softmax: vocab_parallel_logits is int32; logits must be floating",
    ),
]
VALUE_ERRORS = [
    (
        lambda g: call_logprob(g, logits=torch.tensor(1.0), target=torch.tensor(0)),
        "vocab_parallel.logprob: vocab_parallel_logits has no dims; the last one must be the vocabulary",
    ),
    (
        lambda g: call_logprob(g, target=TARGET[:, :7]),
        "vocab_parallel.logprob: target is [2, 7] but vocab_parallel_logits has leading shape [2, 8]",
    ),
    (
        lambda g: call_plain(g, target=TARGET.unsqueeze(-1)),
        "vocab_parallel.DistributedLogprob: target is [2, 8, 1] but vocab_parallel_logits has leading shape [2, 8]",
    ),
    (
        lambda g: call_logprob(g, end=16),
        "vocab_parallel.logprob: vocab range [0, 16) has 16 ids but vocab_parallel_logits has 8 columns",
    ),
    (
        lambda g: call_logprob(g, start=-1),
        "vocab_parallel.logprob: vocab range [-1, 8) starts below 0; vocab_start_index is its first id",
    ),
    (
        lambda g: call_plain(g, start=8, end=4),
        "vocab_parallel.DistributedLogprob: vocab range [8, 4) is reversed; vocab_end_index is one past its last id",
    ),
    (
        lambda g: call_chunked(g, 0),
        "vocab_parallel.ChunkedDistributedLogprob: chunk_size=0 must be at least 1, or None for automatic blocks",
    ),
    (
        lambda g: call_logprob(g, chunk_size=-3),
        "vocab_parallel.logprob: chunk_size=-3 must be at least 1, or None for automatic blocks",
    ),
    (lambda g: call_logprob(g, temperature=0.0), "vocab_parallel.logprob: temperature=0.0 must be positive"),
    (
        lambda g: call_plain(g, temperature=float("nan")),
        "vocab_parallel.DistributedLogprob: temperature=nan must be finite",
    ),
    (
        lambda g: call_logprob(g, backend="cuda"),
        "vocab_parallel.logprob: backend='cuda' is not one of auto, eager, compile, triton",
    ),
    (
        lambda g: call_logprob(g, backend="triton"),
        "vocab_parallel.logprob: backend='triton' runs on CUDA but vocab_parallel_logits is on cpu; use 'auto', "
        "'eager' or 'compile', or set TRITON_INTERPRET=1 before triton is first imported",
    ),
    *(
        (
            lambda g, logits=logits: call_logprob(g, logits=logits, inplace_gradient=True),
            "vocab_parallel.logprob: inplace_gradient=True writes over vocab_parallel_logits, whose elements may share "
            "memory; pass vocab_parallel_logits.contiguous() or inplace_gradient=False",
        )
        for logits in (
            LOGITS[:1].expand(2, 8, 8),
            torch.zeros(2, 22).unfold(1, 8, 2),  # windows of 8 that begin at every second number
            torch.zeros(30).as_strided((2, 8, 8), (7, 1, 2)),
        )
    ),
]


test_rejection = rejected(
    {"tp": 2},
    [
        (text[15:55], lambda mesh, call=call: call(mesh["tp"]), text, kind)
        for kind, rows in ((TypeError, TYPE_ERRORS), (ValueError, VALUE_ERRORS))
        for call, text in rows
    ],
)


def test_int32_ids_and_a_range_narrower_than_the_shard_are_fine():
    def body(mesh, case):
        rank = mesh.rank("tp")
        logits = torch.arange(8.0).view(1, 8)  # 5 ids and 3 columns of padding, which are in the softmax
        target = torch.tensor([6], dtype=torch.int32)  # a padding column of rank 0, the second id of rank 1
        return call_logprob(mesh["tp"], logits, target, start=5 * rank, end=5 * rank + 5).item()

    everywhere = torch.arange(8.0).repeat(2).double().log_softmax(-1)
    assert run(body, CaseSpec(scheme="vocab_parallel", mesh={"tp": 2})).results == (everywhere[1].float().item(),) * 2


@pytest.mark.parametrize("ndim", [0, 1, 2, 3])
def test_elements_that_share_memory_are_seen(ndim):
    """For all small sizes and strides. A tensor with strides that no view has may be rejected without need."""
    memory = torch.zeros(64)
    for sizes in itertools.product(range(4), repeat=ndim):
        for strides in itertools.product(range(5), repeat=ndim):
            offsets = [sum(map(mul, index, strides)) for index in itertools.product(*map(range, sizes))]
            is_shared = len(set(offsets)) < len(offsets)
            assert may_share_memory(memory.as_strided(sizes, strides)) or not is_shared


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.permute(2, 0, 1),
        lambda x: x[::2, 1:, ::3].transpose(0, 1),
        lambda x: x[:0],
        lambda x: x[:, :1].as_strided((4, 1, 6), (30, 0, 1)),
        lambda x: x.unsqueeze(1).expand(4, 1, 5, 6),
    ],
)
def test_views_of_separate_elements_share_none(view):
    assert not may_share_memory(view(torch.zeros(4, 5, 6)))
