"""Sharding, stitching and addends: the ranks' inputs add up to the reference's."""

import itertools

import numpy as np
import pytest
import torch

from jax_ref.layouts import BUILTIN
from shardproof import values
from shardproof.declare.case import DTYPES, CaseSpec
from shardproof.declare.declared import Argument, nested
from shardproof.declare.spec import parse
from shardproof.draw import inputs
from shardproof.engines.stitch import stitch
from shardproof.judge.reference import reference_input

MESH = {"dp": 2, "cp": 2, "tp": 3}
AXES = tuple(MESH)
LENGTHS = {"t": {"padded": [4, 0, 8], "real": [3, 0, 8]}}


def reversed_blocks(size, world):
    """A custom layout: equal blocks, the last rank first."""
    return np.split(np.arange(size), world)[::-1]


CUSTOM = {"reversed_blocks": reversed_blocks}


def argument(text, name="x", is_integer=False):
    spec = parse(text, AXES, (*BUILTIN, *CUSTOM), name=name, differentiable=not is_integer, typeless_ok=True)
    return Argument(name, spec, is_integer)


def a_case(**changes):
    dims = {"b": 4, "s": 12, "t": 12, "v": 7, "h": 24, "n": 0}
    return CaseSpec("f", MESH, dims, lengths=LENGTHS, **changes)


def pieces_of(arg, array, case):
    return [inputs.piece(arg, array, case, at, CUSTOM) for at in inputs.coordinates(case.mesh)]


SPECS = (
    "b/dp s v",
    "b s/cp v",
    "s/cp:dual_chunk_swap v",
    "s/tp:striped b",
    "v/tp:ragged s",
    "t/cp:packed v",
    "s/cp:reversed_blocks",
    "b/dp s/cp:dual_chunk_swap h/tp:striped",
    "h/cp/tp",
    "h/tp:striped/cp:dual_chunk_swap",
    "h/cp:dual_chunk_swap/dp:reversed_blocks/tp",
    "b 1 v/tp:ragged",
    "1/cp:ragged v",
    "n/tp v",
    "",
    "b s",
)


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("lengths", [[7, 0, 0], [0, 3, 4], [3, 3, 1]])
def test_sharded_and_stitched_again(text, lengths):
    arg = argument(text)
    case = a_case(layouts={"v/tp": {"name": "ragged", "lengths": lengths}})
    array = np.random.default_rng(0).normal(size=arg.shape(case))
    pieces = pieces_of(arg, array, case)
    for at, piece in zip(inputs.coordinates(MESH), pieces, strict=True):
        assert piece.shape == inputs.local_shape(arg, case, at, CUSTOM)
    stitched = stitch(arg, pieces, case, CUSTOM, "output")
    assert (stitched.copies == array).all()
    assert len(stitched.copies) == np.prod([size for axis, size in MESH.items() if axis not in arg.spec.axes])


def rank_entries(text, **at):
    """One rank's entries of 0, 1, 2, ... along the only dim."""
    arg, case = argument(text), a_case()
    [dim] = arg.shape(case)
    return inputs.piece(arg, np.arange(dim), case, {"dp": 0, "cp": 0, "tp": 0, **at}, CUSTOM).tolist()


def test_who_holds_what():
    """By hand, so that a wrong sharding and a wrong stitch cannot cancel."""
    assert rank_entries("s/cp", cp=1) == [6, 7, 8, 9, 10, 11]
    assert rank_entries("s/cp:dual_chunk_swap", cp=0) == [0, 1, 2, 9, 10, 11]
    assert rank_entries("s/cp:dual_chunk_swap", cp=1) == [3, 4, 5, 6, 7, 8]
    assert rank_entries("s/tp:striped", tp=2) == [2, 5, 8, 11]
    assert rank_entries("t/cp:packed", cp=0) == [0, 3, 4, 5, 10, 11]
    assert rank_entries("s/cp:reversed_blocks", cp=0) == [6, 7, 8, 9, 10, 11]


def test_two_shardings_of_a_dim_apply_from_left_to_right():
    assert rank_entries("s/cp/tp", cp=1, tp=2) == [10, 11]
    assert rank_entries("s/tp/cp", cp=1, tp=2) == [10, 11]
    assert rank_entries("s/cp/tp", cp=0, tp=2) == [4, 5]
    assert rank_entries("s/tp/cp", cp=0, tp=2) == [8, 9]
    assert rank_entries("s/cp:dual_chunk_swap/tp:striped", cp=0, tp=1) == [1, 10]  # every third of 0 1 2 9 10 11
    assert rank_entries("s/tp:striped/cp:dual_chunk_swap", cp=1, tp=1) == [4, 7]  # the middle of 1 4 7 10


def test_a_custom_layout_must_be_a_partition():
    broken = {"reversed_blocks": lambda size, world: [np.zeros(size // world, int)] * world}
    with pytest.raises(ValueError) as caught:
        inputs.positions(argument("b/cp:reversed_blocks"), a_case(), {"cp": 0}, broken)
    assert str(caught.value) == (
        "layout 'reversed_blocks' is not a partition of 4 positions over 2 ranks: missing [1, 2, 3], repeated [0]"
    )


def test_shards_that_are_summed_and_shards_that_are_repeated():
    """tp=P adds up, cp=R repeats in an output and adds up in a gradient."""
    arg, case = argument("b/dp tp=P cp=R"), a_case()
    pieces = [np.full(2, 100.0 * at["cp"] + at["tp"]) for at in inputs.coordinates(MESH)]
    output = stitch(arg, pieces, case, CUSTOM, "output")
    assert output.coordinates == ({"cp": 0}, {"cp": 1})
    assert output.copies.tolist() == [[3.0] * 4, [303.0] * 4]  # 0 + 1 + 2, then 100 + 101 + 102
    assert output.summed_ranks == 3
    gradient = stitch(arg, pieces, case, CUSTOM, "gradient")
    assert gradient.coordinates == ({"tp": 0}, {"tp": 1}, {"tp": 2})
    assert gradient.copies.tolist() == [[100.0] * 4, [102.0] * 4, [104.0] * 4]
    assert gradient.summed_ranks == 2


def test_ranks_are_in_mesh_order():
    assert inputs.coordinates({"cp": 2, "tp": 2}) == [
        {"cp": 0, "tp": 0}, {"cp": 0, "tp": 1}, {"cp": 1, "tp": 0}, {"cp": 1, "tp": 1}
    ]  # fmt: skip


# Addends


def is_of(array, dtype):
    again = torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, dtype)).double().numpy()
    return np.array_equal(again, array, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "zeros", "ones", "large", "tiny", "huge", "neg_inf_mask"])
def test_addends_sum_to_the_references_input(dtype, kind):
    arg, case = argument("b s cp=P tp=P dp=R"), a_case(dtype=dtype, values={"x": {"kind": kind}})
    array = inputs.full_array(arg, values(), case)
    addends = inputs.addends(arg, array, case, "input")
    assert addends.shape == (6, 4, 12)
    assert is_of(addends, dtype)
    total = reference_input(addends).total
    assert np.array_equal(total, addends.sum(0))
    finite = np.isfinite(array)
    assert np.array_equal(total[~finite], array[~finite])
    # The remainder is rounded once: the reference's input is off by at most that.
    last = np.abs(addends[-1][finite])
    assert (np.abs(total[finite] - array[finite]) <= last * torch.finfo(getattr(torch, dtype)).eps).all()
    assert len({addend.tobytes() for addend in addends}) == 6


def test_an_addend_does_not_resemble_the_sum():
    arg, case = argument("b s cp=P dp=R tp=R"), a_case(values={"x": {"kind": "normal"}})
    array = inputs.full_array(arg, values("normal"), case)
    addends = inputs.addends(arg, array, case, "input")
    for addend in addends:
        assert abs(np.corrcoef(addend.ravel(), array.ravel())[0, 1]) < 0.9
        assert addend.std() > array.std() / 2


def test_a_non_finite_entry_goes_to_one_rank():
    arg, case = argument("b s tp=P dp=R cp=R"), a_case()
    array = np.zeros((4, 12))
    array[1, 2], array[3, 4], array[0, 0] = np.inf, -np.inf, np.nan
    owners = set()
    for seed in range(20):
        addends = inputs.addends(arg, array, case.replace(seed=seed), "input")
        for at in ((1, 2), (3, 4), (0, 0)):
            held_by = [rank for rank in range(3) if addends[rank][at] != 0.0]
            assert len(held_by) == 1
            assert np.array_equal(addends[held_by[0]][at], array[at], equal_nan=True)
            owners.add(held_by[0])
    assert owners == {0, 1, 2}


@pytest.mark.parametrize("value", [2.0, np.inf])
def test_addends_of_a_scalar(value):
    arg, case = argument("tp=P dp=I cp=I"), a_case()
    addends = inputs.addends(arg, np.array(value), case, "input")
    assert addends.shape == (3,)
    assert addends.sum() == value or abs(addends.sum() - value) < abs(addends[-1]) * 2**-23


def test_the_addend_of_a_rank_over_several_axes():
    """The rank's number among the P axes alone, counted as they stand in the spec, whatever the others are."""
    arg, case = argument("b tp=P cp=R dp=P"), a_case()
    addends = np.arange(6.0)[:, None] * np.ones(4)
    owned = {
        (at["tp"], at["dp"]): inputs.addend_of_rank(arg, addends, case, at, "input")[0]
        for at in inputs.coordinates(MESH)
    }
    assert owned == {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3, (2, 0): 4, (2, 1): 5}


def test_without_a_partial_axis_there_is_one_term():
    arg, case = argument("b/dp s tp=R cp=I"), a_case()
    array = np.ones((4, 12))
    assert inputs.addends(arg, array, case, "input").tolist() == [array.tolist()]
    assert inputs.addend_of_rank(arg, array[None], case, {"dp": 1, "cp": 1, "tp": 2}, "input") is not None


# Cotangents


def rank_cotangents(text, case):
    """The full cotangent of each rank, by coordinates."""
    arg = argument(text, "out")
    addends = inputs.addends(arg, inputs.cotangent(arg, case), case, "cotangent")
    return {
        tuple(at.values()): inputs.addend_of_rank(arg, addends, case, at, "cotangent")
        for at in inputs.coordinates(case.mesh)
    }


@pytest.mark.parametrize("letter", ["I", "P"])
def test_cotangents_of_invariant_and_partial_outputs_are_the_same_everywhere(letter):
    case = a_case(dtype="bfloat16")
    each = rank_cotangents(f"b s dp={letter} cp={letter} tp={letter}", case)
    assert len({cotangent.tobytes() for cotangent in each.values()}) == 1
    full = inputs.cotangent(argument("b s dp=I cp=I tp=I", "out"), case)
    assert all(np.array_equal(cotangent, full) for cotangent in each.values())
    assert is_of(full, "bfloat16")


def test_cotangents_of_replicated_outputs_are_partial():
    case = a_case(dtype="bfloat16")
    arg = argument("b s tp=R cp=I dp=I", "out")
    each = rank_cotangents("b s tp=R cp=I dp=I", case)
    for dp, cp in itertools.product(range(2), range(2)):
        parts = [each[dp, cp, tp] for tp in range(3)]
        assert len({part.tobytes() for part in parts}) == 3
        assert np.array_equal(sum(parts), inputs.addends(arg, inputs.cotangent(arg, case), case, "cotangent").sum(0))
        assert all(np.array_equal(part, each[0, 0, tp]) for tp, part in enumerate(parts))


def test_outputs_have_separate_cotangents():
    case = a_case()
    cotangents = [inputs.cotangent(argument("b s dp=I cp=I tp=I", name), case) for name in ("out[0]", "out[1]")]
    assert not np.array_equal(*cotangents)


def test_inputs_are_drawn_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        assert inputs.rounded(np.full(2, 1.0 + 2.0**-20), "bfloat16").tolist() == [1.0, 1.0]


def test_nested_names():
    assert nested({"a.b.c": 1, "a.b.d": 2, "a.e": 3, "f": 4}) == {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4}
