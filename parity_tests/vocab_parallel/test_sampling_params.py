"""Every sentence with which sampling rejects arguments, in full, on every rank and before anything is sent."""

import dataclasses

import pytest
import torch

from parity_tests.rejections import rejected
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp
from torch_impl.vocab_parallel.filter_bounds import limits_of

LOGITS = torch.zeros(2, 8, 8)
TARGET = torch.zeros(2, 8, dtype=torch.int64)
HINT = "pass a ProcessGroup (a group of size 1 for no tensor parallelism)"
PLAIN = "vocab_parallel.DistributedLogprobWithSampling"
CHUNKED = "vocab_parallel.ChunkedDistributedLogprobWithSampling"
PARAMS = "vocab_parallel.TrainingSamplingParams"


def plain(group, logits=LOGITS, target=TARGET, top_k=None, top_p=0.9, temperature=1.0, start=None, end=None):
    return vp.DistributedLogprobWithSampling.apply(logits, target, group, top_k, top_p, False, temperature, start, end)


def chunked(group, chunk_size=1, top_k=2, top_p=1.0, temperature=1.0):
    return vp.ChunkedDistributedLogprobWithSampling.apply(
        LOGITS, TARGET, group, top_k, top_p, chunk_size, False, temperature
    )


TYPE_ERRORS = [
    (lambda g: plain(None), f"{PLAIN}: tp_group is None; {HINT}"),
    (lambda g: plain("tp"), f"{PLAIN}: tp_group is a str; {HINT}"),
    (lambda g: chunked(None), f"{CHUNKED}: tp_group is None; {HINT}"),
    (lambda g: plain(g, target=TARGET.float()), f"{PLAIN}: target is float32; ids must be int32 or int64"),
    (lambda g: plain(g, logits=LOGITS.int()), f"{PLAIN}: vocab_parallel_logits is int32; logits must be floating"),
    (lambda g: plain(g, top_k=2.0), f"{PLAIN}: top_k=2.0 must be an integer (None turns it off)"),
    (lambda g: chunked(g, top_k=True), f"{CHUNKED}: top_k=True must be an integer (None turns it off)"),
    (
        lambda g: vp.TrainingSamplingParams(top_k="all"),
        f"{PARAMS}: top_k='all' must be an integer (None turns it off)",
    ),
]
VALUE_ERRORS = [
    (
        lambda g: plain(g, target=TARGET[:, :7]),
        f"{PLAIN}: target is [2, 7] but vocab_parallel_logits has leading shape [2, 8]",
    ),
    (lambda g: plain(g, top_p=90), f"{PLAIN}: top_p=90 must lie in [0, 1] (1.0 turns it off)"),
    (lambda g: chunked(g, top_p=-0.5), f"{CHUNKED}: top_p=-0.5 must lie in [0, 1] (1.0 turns it off)"),
    (lambda g: plain(g, top_p=float("nan")), f"{PLAIN}: top_p=nan must lie in [0, 1] (1.0 turns it off)"),
    (lambda g: vp.TrainingSamplingParams(top_p=1.5), f"{PARAMS}: top_p=1.5 must lie in [0, 1] (1.0 turns it off)"),
    (lambda g: plain(g, temperature=0.0), f"{PLAIN}: temperature=0.0 must be positive"),
    (lambda g: chunked(g, temperature=-1.0), f"{CHUNKED}: temperature=-1.0 must be positive"),
    (lambda g: vp.TrainingSamplingParams(temperature=0.0), f"{PARAMS}: temperature=0.0 must be positive"),
    (
        lambda g: chunked(g, chunk_size=0),
        f"{CHUNKED}: chunk_size=0 must be at least 1, or None for automatic blocks",
    ),
    (
        lambda g: chunked(g, chunk_size=-2, top_k=None),
        f"{CHUNKED}: chunk_size=-2 must be at least 1, or None for automatic blocks",
    ),
    (
        lambda g: plain(g, start=0, end=16),
        f"{PLAIN}: vocab range [0, 16) has 16 ids but vocab_parallel_logits has 8 columns",
    ),
    (
        lambda g: plain(g, start=-8, end=0),
        f"{PLAIN}: vocab range [-8, 0) starts below 0; vocab_start_index is its first id",
    ),
    (
        lambda g: plain(g, start=8),
        f"{PLAIN}: vocab_start_index=8 but vocab_end_index=None; pass both, or neither to count ids in rank order",
    ),
]


test_rejection = rejected(
    {"tp": 2},
    [
        (text[15:75], lambda mesh, call=call: call(mesh["tp"]), text, kind)
        for kind, rows in ((TypeError, TYPE_ERRORS), (ValueError, VALUE_ERRORS))
        for call, text in rows
    ],
)


@pytest.mark.parametrize(
    ("top_k", "top_p", "limits"),
    [(None, 1.0, (None, None)), (0, None, (None, None)), (-1, 1, (None, None)), (5, 0, (5, 0.0)), (1, 0.5, (1, 0.5))],
)
def test_filters_that_are_off(top_k, top_p, limits):
    computed = limits_of(top_k, top_p)
    assert computed == (*limits, None) and computed.are_off == (limits == (None, None))


def test_the_parameters_are_values():
    params = vp.TrainingSamplingParams()
    assert (params.top_k, params.top_p, params.temperature) == (None, 1.0, 1.0)
    assert vp.TrainingSamplingParams(5, 0.9, 0.7) == vp.TrainingSamplingParams(top_k=5, top_p=0.9, temperature=0.7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (None, 0.4), (16, 0.4)])
def test_columns_past_the_range_take_part_and_are_no_target(top_k, top_p):
    def body(mesh, case):
        start = 5 * mesh.rank("tp")  # 5 ids and 3 more columns on each rank
        target = torch.tensor([4, 9, 10], dtype=torch.int32)  # the last id of each rank, and one out of the vocabulary
        local = torch.arange(8.0).expand(3, 8)
        return plain(mesh["tp"], local, target, top_k, top_p, start=start, end=start + 5).tolist()

    # The two largest logits, both 7, are in columns past the ranges. Together they have more than 0.4 of the mass, and
    # top_k=3 keeps them and the two sixes. So ids 4 and 9, whose logit is 4, are filtered.
    scores = [-torch.inf, -torch.inf, 0.0]
    assert run(body, CaseSpec(scheme="sampling_params", mesh={"tp": 2})).results == (scores, scores)
