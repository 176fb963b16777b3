"""`reinterpret` and `convert`: every change of a gradient type as a scheme, its transpose, and the manual's table."""

import pytest
import torch

from parity_tests.collectives import meanings
from parity_tests.collectives.uneven_shards import uneven, uneven_lengths
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from shardproof import Cost, integers, scheme
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.places import ROOT
from torch_impl.collectives import convert, reinterpret
from torch_impl.collectives.gradient_types import BY_COLLECTIVE

WORLDS = {"tp": (1, 2, 3, 4)}
SHARES = {"excluded_conditions": ("overwritten",)}  # a result that is x itself, or a view of it
SPECS = {"I": "a b tp=I", "R": "a b tp=R", "P": "a b tp=P", "V": "a b/tp"}
CONVERTED = ("IR", "IV", "IP", "RI", "RV", "RP", "VP")


def summed(case):
    """What the sum of the cotangents costs."""
    return Cost(forward={}, backward={"all_reduce": (1, case.a * case.b * case.accumulator_itemsize)})


def converting(types):
    """The scheme of one change along dim 1, which means the identity."""
    src, dst = types

    def cost(case):
        gathered = {"all_gather": (1, case.a * (case.b // case.tp) * case.itemsize)} if types == "IV" else {}
        return summed(case) if types == "IR" else Cost(forward={}, backward=gathered)

    def change(mesh, x):
        dim = {"dim": 1} if "V" in types else {}
        return convert(x, mesh["tp"], src=src, dst=dst, **dim)

    change.__name__ = f"convert_{src}_to_{dst}"
    return scheme(
        reference=meanings.identity,
        mesh=WORLDS,
        inputs={"x": SPECS[src]},
        outputs=SPECS[dst],
        cost=cost,
        **(SHARES if types in ("IR", "RI") else {}),
    )(change)


@scheme(
    reference=meanings.identity_beside,
    mesh=WORLDS,
    inputs={"x": "b a tp=I", "beside": "b"},
    outputs="b/tp:uneven a",
    layouts={"uneven": uneven},
    draw={"beside": integers(0, 1)},
)
def convert_to_uneven_shards(mesh, x, beside):
    return convert(x, mesh["tp"], src="I", dst="V", lengths=uneven_lengths(len(beside), mesh.size("tp")))


@scheme(
    reference=meanings.identity_beside,
    mesh=WORLDS,
    inputs={"x": "b a tp=R", "beside": "b"},
    outputs="b/tp:uneven a",
    layouts={"uneven": uneven},
    draw={"beside": integers(0, 1)},
    cost=lambda case: Cost(forward={}, backward={}),
)
def convert_terms_to_uneven_shards(mesh, x, beside):
    return convert(x, mesh["tp"], src="R", dst="V", lengths=uneven_lengths(len(beside), mesh.size("tp")))


@scheme(
    reference=meanings.identity_beside,
    mesh=WORLDS,
    inputs={"x": "b/tp:uneven a", "beside": "b"},
    outputs="b a tp=P",
    layouts={"uneven": uneven},
    draw={"beside": integers(0, 1)},
    cost=lambda case: Cost(forward={}, backward={}),
)
def convert_uneven_shards_to_terms(mesh, x, beside):
    return convert(x, mesh["tp"], src="V", dst="P", lengths=uneven_lengths(len(beside), mesh.size("tp")))


def reinterpreting(types, reference, inputs, outputs, **dims):
    """The scheme of one change that leaves each rank's tensor as it is."""
    src, dst = types

    def change(mesh, x):
        return reinterpret(x, mesh["tp"], src=src, dst=dst)

    change.__name__ = f"reinterpret_{src}_as_{dst}"
    cost = summed if src == "I" else lambda case: Cost(forward={}, backward={})
    declare = scheme(
        reference=reference, mesh=WORLDS, inputs={"x": inputs}, outputs=outputs, dims=dims, cost=cost, **SHARES
    )
    return declare(change)


CHANGES = (
    *(converting(types) for types in CONVERTED),
    convert_to_uneven_shards,
    convert_terms_to_uneven_shards,
    convert_uneven_shards_to_terms,
    reinterpreting("IR", meanings.identity, SPECS["I"], SPECS["R"]),
    reinterpreting("RI", meanings.identity, SPECS["R"], SPECS["I"]),
    reinterpreting("IV", meanings.stacked_copies, "a b tp=I", "copies/tp b", copies="tp*a"),
    reinterpreting("RV", meanings.stacked_copies, "a b tp=R", "copies/tp b", copies="tp*a"),
    reinterpreting("IP", meanings.times_ranks, SPECS["I"], SPECS["P"]),
    reinterpreting("RP", meanings.times_ranks, SPECS["R"], SPECS["P"]),
    reinterpreting("VP", meanings.sum_of_rows, "w/tp b", "1 b tp=P", w="tp"),
)
test_parity = parity(CHANGES, lockstep=12, gloo=3)


THREE = CaseSpec(scheme="collectives", mesh={"x": 3})
X = torch.arange(12.0, dtype=torch.float64).reshape(2, 6)
ONCE = {"R": True, "I": True, "P": False, "V": False}  # types of which all ranks hold the same tensor
CALLS = [
    *(("reinterpret", types) for types in ("IR", "RI", "IV", "RV", "IP", "RP", "VP")),
    *(("convert", types) for types in CONVERTED),
]


def called(function, types, x, group):
    src, dst = types
    if function == "reinterpret":
        return reinterpret(x, group, src=src, dst=dst)
    return convert(x, group, src=src, dst=dst, dim=1 if "V" in types else 0)


@pytest.mark.parametrize(("function", "types"), CALLS)
def test_the_transpose_of_the_transpose_is_the_map(function, types):
    """So each can be differentiated twice; and no gradient shares memory with the cotangent that came."""

    def body(mesh, case):
        group = mesh["x"]
        x = (X + (0 if ONCE[types[0]] else 100 * group.rank())).requires_grad_()
        y = called(function, types, x, group)
        of_all = (ONCE[types[1]] and types[1] == "I") or types[1] == "P"  # cotangents that all ranks share
        cotangent = (torch.arange(float(y.numel()), dtype=torch.float64) ** 2).reshape(y.shape)
        cotangent = (cotangent + (0 if of_all else 7 * group.rank())).requires_grad_()
        (gradient,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
        (again,) = torch.autograd.grad(gradient, cotangent, x.detach())
        before = cotangent.detach().clone()
        called(function, types, leaf := X.clone().requires_grad_(), group).backward(cotangent.detach())
        leaf.grad.fill_(-1.0)
        return torch.equal(again, y.detach()), torch.equal(cotangent.detach(), before)

    assert run(body, THREE).results == ((True, True),) * 3


NO_CHANGE = "is dst already; use x itself"
test_rejected_before_anything_is_sent = rejected(
    {"x": 2},
    [
        (
            "no change",
            lambda mesh: convert(X, mesh["x"], src="P", dst="P"),
            f"collectives.convert: src='P' {NO_CHANGE}",
        ),
        *(
            (
                f"{change} by {function.__name__}",
                lambda mesh, change=change, function=function: function(X, mesh["x"], src=change[0], dst=change[-1]),
                f"collectives.{function.__name__}: src={change[0]!r}, dst={change[-1]!r}: only a collective makes this "
                f"change; write {by}",
            )
            for change, by in BY_COLLECTIVE.items()
            for function in (convert, reinterpret)
        ),
        (
            "unknown type",
            lambda mesh: convert(X, mesh["x"], src="I", dst="S"),
            "collectives.convert: dst='S' is not one of R, I, V, P",
        ),
        (
            "dim without a shard",
            lambda mesh: convert(X, mesh["x"], src="I", dst="R", dim=1),
            "collectives.convert: dim is for a V, which is sharded; I -> R changes no shape: leave it out",
        ),
        (
            "lengths without a shard",
            lambda mesh: convert(X, mesh["x"], src="I", dst="P", lengths=[1, 1]),
            "collectives.convert: lengths is for a V, which is sharded; I -> P changes no shape: leave it out",
        ),
        (
            "an uneven dim",
            lambda mesh: convert(X[:, :5], mesh["x"], src="R", dst="V", dim=1),
            "collectives.convert: dim 1 has 5 positions, which 2 ranks cannot share equally; pass lengths",
        ),
        (
            "a dim that is not there",
            lambda mesh: convert(X, mesh["x"], src="V", dst="P", dim=2),
            "collectives.convert: dim=2 is outside a tensor of 2 dims",
        ),
        (
            "no group",
            lambda mesh: reinterpret(X, None, src="I", dst="R"),
            "collectives.reinterpret: group is None; pass a ProcessGroup",
            TypeError,
        ),
    ],
)


def test_the_manual_has_each_change_of_a_type():
    """A row for each pair of two types: the call, and the collectives of its backward as the schemes declare them."""
    page = (ROOT / "docs" / "reference" / "collectives.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith(("| I ->", "| R ->", "| V ->", "| P ->"))]
    by_change = {cells[1].strip(): cells[2].strip() for cells in rows if len(cells) == 6}  # the table of four columns
    assert set(by_change) == {f"{src} -> {dst}" for src in "RIVP" for dst in "RIVP" if src != dst}
    for change, call in by_change.items():
        if change in BY_COLLECTIVE:
            assert call.startswith(f"`{BY_COLLECTIVE[change].partition('(')[0]}(x, group"), change
        else:
            assert f'`convert(x, group, src="{change[0]}", dst="{change[-1]}"' in call, change
