"""Protocol and cost: each turns red for a small scheme that breaks it, and says so."""

import pytest
import torch.distributed as dist

from parity_tests.specimens.small_scheme import declared, summed
from shardproof import Cost, integers
from shardproof.engines.ledger import Ledger, LedgerRow
from shardproof.judge import side_checks
from shardproof.report.report import CostMismatch, HygieneViolation, ProtocolMismatch, Report
from shardproof.verify_one_case import verify_case

# Calls that a real backend rejects


def sum_of_columns(mesh, x):
    total = x.detach().clone().T  # as wide as high, so that only the strides tell the two apart
    dist.all_reduce(total, group=mesh["tp"])
    return x * 0.0 + total.T


def test_a_tensor_that_is_not_contiguous_is_a_protocol_finding():
    report = declared(sum_of_columns, lambda x: x * 1.0, {"x": "b c tp=P"}, "b c tp=I").verify(tp=2, b=3, c=3)
    (finding,) = report.protocol
    assert finding.startswith("rank 0 issued all_reduce float32[3, 3] SUM (group tp, #0) at test_side_checks.py:")
    assert finding.endswith(
        ": its input has strides (1, 3), which NCCL rejects ('Tensors must be contiguous') and of which gloo may give "
        "other numbers without an error; pass x.contiguous()"
    )


# Cost


def total(mesh, x):
    return summed(x, mesh["tp"])


def costs(cost):
    return declared(total, lambda x: x * 1.0, {"x": "b tp=P"}, "b tp=I", cost=cost).verify(tp=2, b=3)


@pytest.mark.fast_values(2)
@pytest.mark.parametrize(
    ("cost", "violations"),
    [
        (lambda c: Cost(forward={"all_reduce": (1, 4 * c.b)}), ()),
        (
            lambda c: Cost(forward={"all_reduce": (2, 4 * c.b)}),
            ("forward all_reduce: declared 2 calls of 12 bytes, rank 0 issued 1 of 12",),
        ),
        (
            lambda c: Cost(forward={"all_reduce": (1, 4 * c.b + 1)}),
            ("forward all_reduce: declared 1 call of 13 bytes, rank 0 issued 1 of 12",),
        ),
        (lambda c: Cost(), ("forward all_reduce: declared 0 calls of 0 bytes, rank 0 issued 1 of 12",)),
        (
            lambda c: Cost(forward={"all_reduce": (1, 12), "barrier": (1, 0)}),
            ("forward barrier: declared 1 call of 0 bytes, rank 0 issued 0 of 0",),
        ),
        (
            lambda c: Cost(forward={"all_reduce": (1, 12)}, backward={"all_reduce": (1, 12)}),
            ("backward all_reduce: declared 1 call of 12 bytes, rank 0 issued 0 of 0",),
        ),
    ],
)
def test_cost(cost, violations):
    report = costs(cost)
    assert report.cost == violations
    assert report.verdict == ("cost" if violations else "equal")


def test_cost_of_one_rank():
    def uneven(mesh, x):
        if mesh.rank("tp") == 1:
            dist.all_reduce(x.detach().clone(), group=dist.new_group([1], use_local_synchronization=True))
        return summed(x, mesh["tp"])

    declaration = declared(
        uneven, lambda x: x * 1.0, {"x": "b tp=P"}, "b tp=I", cost=lambda c: Cost(forward={"all_reduce": (1, 4 * c.b)})
    )  # fmt: skip
    assert declaration.verify(tp=2, b=3).cost == (
        "forward all_reduce: declared 1 call of 12 bytes, rank 1 issued 2 of 24",
    )


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("of_rank_1", "violations"), [(24, 0), (12, 1)])
def test_a_cost_of_each_rank(of_rank_1, violations, inside):
    """As of rows that go to the ranks of their experts; inside a larger world each half has the same."""

    def uneven(mesh, x):
        for _ in range(1 + mesh.rank("tp")):
            dist.all_reduce(x.detach().clone(), group=mesh["one"])
        return x * 1.0

    def each(case):
        return [Cost(forward={"all_reduce": (1, 12)}), Cost(forward={"all_reduce": (2, of_rank_1)})]

    spec = "b tp=I one=I"
    mesh = {"tp": (2,), "one": (1,)}
    declaration = declared(uneven, lambda x: x * 1.0, {"x": spec}, spec, mesh=mesh, cost=each)
    report = declaration.verify(tp=2, one=1, b=3, inside_subgroup=inside)
    assert len(report.cost) == violations
    if violations:
        assert report.cost == ("forward all_reduce: declared 2 calls of 12 bytes, rank 1 issued 2 of 24",)


def first_sends_to_last(mesh, x, count):
    """`count` elements, from the first rank to the last."""
    rank, last, elements = mesh.rank("tp"), mesh.size("tp") - 1, x.detach().clone()[: int(count[0])]
    if len(elements) and rank in (0, last):
        dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv if rank else dist.isend, elements, group=mesh["tp"], group_peer=last - rank)]
        )[0].wait()
    return x * 1.0


def of_each_rank(c, count):
    size = 4 * int(count[0])
    ends = Cost(forward={"send": (1, size)}), Cost(forward={"recv": (1, size)})
    return [ends[0], *[Cost()] * (c.tp - 2), ends[1]]


def test_cost_of_each_rank_in_every_part_of_a_world():
    inputs, draw = {"x": "b tp=R", "count": "n"}, {"count": integers(1, 2)}
    scheme = declared(first_sends_to_last, lambda x, count: x * 1.0, inputs, "b tp=R", draw=draw, cost=of_each_rank)
    for mesh in ({"tp": 4, "spare": 2}, {"spare": 2, "tp": 4}):
        case = scheme.case(tp=4, b=3, n=1).replace(mesh=mesh)
        assert verify_case(scheme, case).cost == ()


@pytest.mark.slow
@pytest.mark.parametrize("inside_subgroup", [False, True])
def test_cost_of_values_and_of_each_rank(inside_subgroup):
    def verified(cost):
        inputs, draw = {"x": "b tp=R", "count": "n"}, {"count": integers(1, 2)}
        scheme = declared(
            first_sends_to_last, lambda x, count: x * 1.0, inputs, "b tp=R", draw=draw, cost=cost, dtypes=("float32",)
        )
        return scheme.verify(tp=4, b=3, n=1, dtype="float32", inside_subgroup=inside_subgroup)

    assert verified(of_each_rank).cost == ()
    (finding,) = verified(lambda c, count: of_each_rank(c, count + 1)).cost
    assert finding.startswith("forward send: declared 1 call of ") and "rank 0 issued 1 of " in finding
    (finding,) = verified(lambda c, count: of_each_rank(c, count)[::-1]).cost
    assert finding.endswith("rank 0 issued 0 of 0")


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (Cost(), "cost is Cost; pass a function of the case: def cost(case): ..."),
        (lambda c, y: Cost(), "cost takes 'y', which is not an input of the scheme (x)"),
    ],
)
def test_a_cost_that_cannot_be_called(cost, message):
    with pytest.raises(ValueError) as caught:
        declared(total, lambda x: x * 1.0, {"x": "b tp=P"}, "b tp=I", cost=cost)
    assert str(caught.value) == f"scheme 'total': {message}"


@pytest.mark.parametrize(
    ("axis", "violations"),
    [
        ("tp", ()),
        ("cp", ("forward all_reduce over ranks 0,1: declared 0 calls of 0 bytes, rank 0 issued 1 of 12",)),
    ],
)
def test_cost_over_an_axis(axis, violations):
    """As many calls and bytes, over the other axis of the mesh."""
    specs = {"x": "b tp=P cp=I"}, "b tp=I cp=I"
    mesh = {"cp": (2,), "tp": (2,)}
    declaration = declared(
        total, lambda x: x * 1.0, *specs, mesh=mesh, cost=lambda c: Cost(forward={f"all_reduce/{axis}": (1, 4 * c.b)})
    )
    assert declaration.verify(cp=2, tp=2, b=3).cost == violations


def test_cost_over_an_axis_that_the_mesh_lacks():
    with pytest.raises(ValueError, match=r"names all_reduce/cp; the axes are tp$"):
        costs(lambda c: Cost(forward={"all_reduce/cp": (1, 4 * c.b)}))


# Protocol


def a_row(rank, **changes):
    record = dict(
        rank=rank, seq=0, op="all_reduce", group=(0, 1), group_name="tp", dtypes=("float32",), shapes=((3,),),
        bytes_in=12, bytes_out=12, reduce_op="SUM", source=f"scheme.py:{rank}",
    )  # fmt: skip
    return LedgerRow(**{**record, **changes})


@pytest.mark.parametrize(
    "change",
    [
        {"op": "broadcast", "reduce_op": None, "root": 0},
        {"dtypes": ("int32",)},
        {"shapes": ((1, 3),)},
        {"reduce_op": "MAX"},
    ],
)
def test_ledgers_that_disagree_although_all_ranks_finished(change):
    """As on a backend that gives wrong numbers without an error."""
    assert side_checks.protocol(Ledger([a_row(0), a_row(1)])) == ()
    [message] = side_checks.protocol(Ledger([a_row(0), a_row(1, **change)]))
    assert "rank" in message and "scheme.py:" in message


def test_a_row_left_over():
    [message] = side_checks.protocol(Ledger([a_row(0), a_row(1), a_row(1, seq=1)]))
    assert "#1" in message


# Reports on them


@pytest.mark.parametrize(
    ("finding", "raised"),
    [("protocol", ProtocolMismatch), ("cost", CostMismatch), ("hygiene", HygieneViolation)],
)
def test_each_oracle_has_its_exception(finding, raised):
    report = Report("m:f", declared(total, lambda x: x * 1.0, {"x": "b tp=P"}, "b tp=I").case(), **{finding: ("so",)})
    assert not report.ok and report.verdict == finding
    with pytest.raises(raised):
        report.raise_if_failed()
    assert f"{finding}: so" in str(report)
