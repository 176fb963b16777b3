"""Calls that a real backend would reject: lockstep reports them, and gloo behaves as the report says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.small_scheme import declared
from shardproof import ProtocolMismatch
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.failure import CollectiveMismatch
from shardproof.engines.lockstep.backends import UNEVEN, rejection
from shardproof.engines.protocol import disagreement

CONTIGUOUS = torch.zeros(4, 6)
STRIDED = {
    "transposed": CONTIGUOUS.T,
    "every other column": CONTIGUOUS[:, ::2],
    "expanded": torch.zeros(()).expand(2, 3),
}


@pytest.mark.parametrize("strides", STRIDED)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all", "scatter", "send"])
def test_strides_are_reported(op, strides):
    x = STRIDED[strides]
    assert rejection(op, [x], []).startswith("its input has strides (")
    assert rejection(op, [CONTIGUOUS], [x]).startswith("its output has strides (")


def test_a_receive_buffer_is_not_copied():
    sentence = rejection("recv", [STRIDED["transposed"]], [])
    assert sentence.startswith("its buffer has strides (1, 6), which gloo rejects")
    assert sentence.endswith("; receive into a contiguous one and copy from it")


@pytest.mark.parametrize(
    "x",
    [
        CONTIGUOUS,
        CONTIGUOUS[1:],
        torch.zeros(0, 3).T,
        torch.zeros(1, 3).T,
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
)
def test_a_call_that_every_backend_accepts_is_not_reported(x):
    assert rejection("all_reduce", [x], [x]) is None


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16])
def test_a_dtype_that_backends_lack(dtype):
    name = str(dtype).removeprefix("torch.")
    assert rejection("broadcast", [torch.zeros(2, dtype=dtype)], []) == (
        f"gloo and NCCL have no {name}; pass another dtype"
    )


def exchange_strided(mesh, case):
    x = torch.arange(16.0).view(4, 4).T
    try:
        dist.all_to_all_single(torch.empty(4, 4), x, group=mesh["tp"])
    except ValueError as error:
        return str(error)
    return "accepted"


def scatter_strided(mesh, case):
    x = torch.arange(16.0).view(4, 4).T
    received = torch.empty(4, 4)
    dist.scatter(received, [x, x] if mesh.rank("tp") == 0 else None, group=mesh["tp"], group_src=0)
    return bool(torch.equal(received, x))


def gather_unevenly(mesh, case):
    x = torch.full((mesh.rank("tp") + 1, 2), float(mesh.rank("tp")))
    parts = [torch.empty(rank + 1, 2) for rank in range(mesh.size("tp"))]
    try:
        dist.all_gather(parts, x, group=mesh["tp"])
    except RuntimeError as error:
        assert "invalid tensor size" in str(error)
        return "rejected"
    return [part.tolist() for part in parts]


def gather_other_shapes(mesh, case):
    """Entry r of each list has rank r's shape; no two are alike in any dim."""
    shapes = [(2, 4), (3,), (1, 6, 2)]
    parts = [torch.empty(shape) for shape in shapes]
    dist.all_gather(parts, torch.full(shapes[mesh.rank("tp")], float(mesh.rank("tp"))), group=mesh["tp"])
    return [(tuple(part.shape), part.unique().tolist()) for part in parts]


def reduce_scatter_unevenly(mesh, case):
    out = torch.empty(mesh.rank("tp") + 1, 2)
    dist.reduce_scatter(out, [torch.ones(rank + 1, 2) for rank in range(mesh.size("tp"))], group=mesh["tp"])
    return out.tolist()


def gather_into_wrong_shapes(mesh, case):
    x = torch.ones(mesh.rank("tp") + 1)
    parts = [torch.empty(3 - rank if mesh.rank("tp") == 0 and rank else rank + 1) for rank in range(3)]
    dist.all_gather(parts, x, group=mesh["tp"])


def test_lists_of_unlike_sizes_are_carried_out():
    pair, three = CaseSpec("lists", {"tp": 2}), CaseSpec("lists", {"tp": 3})
    ranks = run(gather_unevenly, three)
    assert ranks.results == ([[[0.0] * 2], [[1.0] * 2] * 2, [[2.0] * 2] * 3],) * 3
    assert [row.rejected for row in ranks.ledger.rows] == [UNEVEN] * 3
    ranks = run(gather_other_shapes, three)
    assert ranks.results == ([((2, 4), [0.0]), ((3,), [1.0]), ((1, 6, 2), [2.0])],) * 3
    assert disagreement(ranks.ledger) is None
    assert run(reduce_scatter_unevenly, pair).results == run(reduce_scatter_unevenly, pair, "gloo").results
    with pytest.raises(CollectiveMismatch) as caught:
        run(gather_into_wrong_shapes, three)
    assert "rank 2 sends float32[3] to rank 0, which expects float32[1]" in str(caught.value)


def test_gloo_rejects_the_list_of_an_all_gather():
    assert run(gather_unevenly, CaseSpec("lists", {"tp": 2}), "gloo").results == ("rejected",) * 2


@pytest.mark.parametrize(("engines", "verdict"), [(("lockstep", "gloo"), "protocol"), (("lockstep", "nccl"), "equal")])
def test_a_call_that_only_gloo_rejects_is_a_finding_for_gloo_schemes(engines, verdict):
    def uneven(mesh, x):
        gather_unevenly(mesh, None)
        return x * 2

    report = declared(uneven, engines=engines).verify(examples=2, tp=2)
    assert report.verdict == verdict
    if verdict == "protocol":
        assert report.protocol[0].endswith(UNEVEN)
        with pytest.raises(ProtocolMismatch):
            report.raise_if_failed()


def test_gloo_behaves_as_described():
    case = CaseSpec("gloo", {"tp": 2})
    assert run(exchange_strided, case, "gloo").results == ("Tensors must be contiguous",) * 2
    assert run(scatter_strided, case, "gloo").results == (False, False)
    assert run(scatter_strided, case).results == (True, True)
