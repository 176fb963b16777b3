"""A user's layout may reject sizes by a ValueError: they are not drawn, and a layout that takes none is rejected."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shardproof import check, scheme
from shardproof.declare.conditions import record_of
from shardproof.declare.declaration_failure import DeclarationFailure
from shardproof.draw import size_choices
from shardproof.verify_one_case import verify_case

MESH = (1, 2, 4)


def blocks(multiple):
    """A layout of equal blocks that asks for a multiple of `multiple * world`."""

    def blocked(size, world):
        if size % (multiple * world):
            raise ValueError(f"blocked needs a multiple of {multiple * world}")
        return np.split(np.arange(size), world)

    return blocked


def odd(size, world):
    """All positions on the first rank; sizes are odd, so no size is a multiple of two ranks."""
    if size % 2 == 0:
        raise ValueError("odd sizes only")
    return [list(range(size))] + [[]] * (world - 1)


def power_of_two(size, world):
    if size < world or size & (size - 1):
        raise ValueError("no power of two")
    return np.split(np.arange(size), world)


def broken(size, world):
    return [int("not a number")] * world


def broken_on_four(size, world):
    return broken(size, world) if world == 4 else blocks(1)(size, world)


def declared(layout, **more):
    def doubled(mesh, x):
        return x * 2

    return scheme(
        **{
            "reference": lambda x: jnp.multiply(x, 2.0), "mesh": {"ring": MESH},
            "inputs": {"x": "b t/ring:mine"}, "outputs": "b t/ring:mine",
            "layouts": {"mine": layout}, "dtypes": ("float32",), **more,
        }
    )(doubled)  # fmt: skip


def drawn_sizes(declaration, count=60, **sizes):
    """(ranks, size) in the cases of many seeds."""
    return {(case.ring, case.t) for case in (declaration.case(seed=seed, **sizes) for seed in range(count))}


def viewed(size, world):
    return torch.arange(size).view(world, -1)


def reshaped(size, world):
    return jnp.arange(size).reshape(world, -1)


def asserted(size, world):
    assert size % (2 * world) == 0, f"not of {2 * world}"
    return (range(rank, size, world) for rank in range(world))


def message_of(call, *args, **keywords):
    with pytest.raises(ValueError) as caught:
        call(*args, **keywords)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [viewed, reshaped, asserted])
def test_a_rejection_by_a_library_counts(layout):
    """A view, a reshape or an assertion may reject a size; a layout may return a generator of rows, not only a list."""
    declaration = declared(layout)
    assert declaration.verify(examples=12).meshes == ("ring=1", "ring=2", "ring=4")
    assert declaration.verify(ring=2, t=8, examples=2).ok
    assert declaration.draw(ring=2, t=8)
    assert "t=7 cannot be sharded by mine over ring=2: " in message_of(declaration.verify, ring=2, t=7)


def test_another_error_is_reported_with_its_type():
    assert message_of(declared(asserted).verify, ring=2, t=6).endswith(": AssertionError: not of 4")


@pytest.mark.parametrize("layout", [blocks(2), blocks(3), blocks(100), blocks(1024), odd, power_of_two])
def test_only_sizes_that_a_layout_takes_are_drawn_and_every_mesh_has_one(layout):
    pairs = drawn_sizes(declared(layout))
    assert {world for world, _ in pairs} == set(MESH)
    for world, size in pairs:
        assert sum(map(len, layout(size, world))) == size


def test_few_size_choices_fit_every_mesh():
    """The least common size of all meshes is none of the odd ones or the powers of two."""
    for layout in (odd, power_of_two):
        declaration = declared(layout, mesh={"ring": (1, 2, 3, 4)} if layout is odd else {"ring": MESH})
        tried = size_choices.meshes(declaration, {}, None)
        shapes = size_choices.shapes(declaration, {}, tried, 1, with_pairs=False)
        assert all(any(size_choices.compatible(declaration, shape, mesh) for shape in shapes) for mesh in tried)


def test_size_choices_are_checked_against_the_layout():
    assert drawn_sizes(declared(blocks(2), dims={"t": (4, 8, 9, 16)})) <= {
        (1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16), (4, 8), (4, 16)
    }  # fmt: skip
    assert drawn_sizes(declared(odd, dims={"t": (4, 5, 9)})) == {(world, size) for world in MESH for size in (5, 9)}


@pytest.mark.slow
def test_a_second_sharding_divides_the_shards_of_the_first():
    axes = {"dp": (1, 2), "ring": (1, 2)}
    outer, inner = "b t/ring:mine/dp", "b t/dp/ring:mine"
    for spec, layout in ((outer, blocks(3)), (inner, blocks(3)), (outer, odd)):
        declaration = declared(layout, mesh=axes, inputs={"x": spec}, outputs=spec, dims={"t": (3, 6, 9, 12)})
        for case in (declaration.case(dp=1, seed=seed) for seed in range(20)):
            assert check(case).ok
    # The first rank has all 9 positions, which two ranks of dp cannot halve.
    sentence = "t=9 cannot be sharded by contiguous over dp=2 (needs a multiple of 2); pad to 10"
    assert message_of(declaration.case, dp=2, ring=2, t=9).endswith(sentence)


def test_a_scheme_is_verified_on_the_meshes_that_can_shard_it():
    declaration = declared(blocks(2))
    assert declaration.verify(examples=12).meshes == ("ring=1", "ring=2", "ring=4")
    assert declaration.verify(t=4).meshes == ("ring=1", "ring=2")


@pytest.mark.usefixtures("unexplained")
def test_a_mistake_shrinks_to_the_smallest_size_that_can_be_sharded():
    def tripled(mesh, x):
        return x * 3

    wrong = scheme(
        reference=lambda x: x * 2, mesh={"ring": (2,)}, inputs={"x": "b t/ring:mine"}, outputs="b t/ring:mine",
        layouts={"mine": blocks(2)}, dtypes=("float32",),
    )(tripled)  # fmt: skip
    report = wrong.verify()
    assert not report.ok and dict(report.case.dims) == {"b": 1, "t": 4}


def test_a_size_passed_by_hand_is_rejected_with_the_message_of_the_layout():
    declaration = declared(blocks(2))
    sentence = "scheme 'doubled': t=6 cannot be sharded by mine over ring=2: blocked needs a multiple of 4"
    assert message_of(declaration.case, ring=2, t=6) == sentence
    assert message_of(declaration.verify, ring=2, t=6) == sentence
    assert message_of(declaration.draw, ring=2, t=6) == sentence
    assert message_of(declaration.run, np.ones((1, 6), np.float32), ring=2) == sentence
    assert message_of(check, declaration.case(ring=2, t=8).replace(dims={"b": 1, "t": 6})) == sentence


def test_a_layout_that_takes_no_size_is_rejected():
    words = "invalid literal for int() with base 10: 'not a number'"
    start, rest = "scheme 'doubled': mine shards no size of t over ring=", f" tried: {words}; "
    end = "if it shards others, name them: dims={'t': (...)}"
    for sizes in ({}, {"b": 2}):
        assert message_of(declared(broken).verify, **sizes) == f"{start}1, of 1 to 1024{rest}{end}"
        assert message_of(declared(broken_on_four).verify, **sizes) == f"{start}4, of 4 to 4096{rest}{end}"
    assert declared(broken_on_four).verify(ring=2, examples=2).ok
    # For a given size, the report names this size alone.
    report = declared(broken_on_four).verify(t=8, examples=4)
    assert report.ok and report.left_out == {"ring=4": f"t=8 cannot be sharded by mine over ring=4: {words}"}


def test_size_choices_that_no_mesh_divides():
    assert message_of(declared(blocks(2), dims={"t": (2, 4)}).verify) == (
        "scheme 'doubled': mesh {'ring': 4} can never be drawn: "
        "t=2 cannot be sharded by mine over ring=4: blocked needs a multiple of 8"
    )


def test_an_incomplete_partition_is_reported_with_the_scheme():
    def lost(size, world):
        return [[0]] * world

    assert message_of(declared(lost).verify, ring=2, t=2) == (
        "scheme 'doubled': layout 'mine' is not a partition of 2 positions over 2 ranks: missing [1], repeated [0]"
    )


@pytest.mark.parametrize("name", ["call_before", "call_between"])
def test_a_layout_that_breaks_in_another_call_is_reported(name):
    """The layout is right only for the sizes of the judged call."""

    def lost(size, world):
        return [[0]] * world if size == 4 else np.split(np.arange(size), world)

    declaration = declared(lost, dims={"t": (2, 4)})
    other = declaration.case(ring=2, t=4, b=1)
    case = declaration.case(ring=2, t=2, b=1).replace(conditions={name: record_of(other)})
    assert message_of(verify_case, declaration, case).startswith(
        "scheme 'doubled': layout 'mine' is not a partition of 4 positions over 2 ranks: missing [1, 2, 3]"
    )


def test_a_layout_that_raises_fails_the_declaration():
    sentence = (
        r"^scheme 'doubled': layout 'mine' raised ZeroDivisionError at test_custom_layout\.py:\d+: integer division"
    )
    with pytest.raises(DeclarationFailure, match=sentence) as caught:
        declared(lambda size, world: 1 // 0).verify()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (lambda size, world: [list(range(size))], "returns positions for 1 ranks where there are 2"),
        (lambda size, world: None, "returns a NoneType; return a list of positions for each rank"),
    ],
)
def test_a_layout_without_a_row_for_each_rank_is_rejected(layout, message):
    declaration = declared(layout)
    with pytest.raises(ValueError, match=f"layout 'mine' {message}"):
        declaration.verify(ring=2)
    with pytest.raises(ValueError, match=f"layout 'mine' {message}"):
        check(declaration.case(ring=2))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("sharding", ["1/ring:ragged b", "1/ring:mine b"])
def test_a_dim_of_size_one_may_be_sharded(sharding):
    """Any one rank may have it."""
    layouts = {"mine": lambda size, world: [[]] * (world - 1) + [list(range(size))]}
    declaration = declared(None, inputs={"x": sharding}, outputs=sharding, layouts=layouts)
    assert declaration.verify(ring=4).ok
    with pytest.raises(ValueError, match="1=1 cannot be sharded by contiguous over ring=2"):
        declared(None, inputs={"x": "1/ring b"}, outputs="1/ring b", layouts={}).verify(ring=2)
