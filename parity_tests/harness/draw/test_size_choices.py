"""The choice of shapes: a few, the simplest first, at least one for every mesh, and all as the formulas of dims say."""

import inspect
import itertools

import pytest

from shardproof import offsets, scheme
from shardproof.draw import size_choices
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.draw.profiles import SHAPES

NUMBERS = itertools.count()


def declared(mesh, inputs, outputs, **more):
    """A scheme that computes nothing."""

    def function(mesh, **arguments): ...

    names = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("mesh", *inputs)]
    function.__name__ = f"function_{next(NUMBERS)}"
    function.__signature__ = inspect.Signature(names)
    return scheme(reference=lambda **arguments: None, mesh=mesh, inputs=inputs, outputs=outputs, **more)(function)


SCHEMES = {
    "one sharding": declared({"tp": (1, 2, 4)}, {"x": "b s v/tp"}, "b s tp=I"),
    "swapped": declared({"cp": (1, 2, 3, 4)}, {"x": "b s/cp:dual_chunk_swap"}, "b s/cp"),
    "twice": declared({"cp": (1, 2, 3), "tp": (1, 2, 4)}, {"x": "s/cp:dual_chunk_swap/tp:striped"}, "s/cp/tp"),
    "many meshes": declared(
        {"dp": (1, 2), "cp": (1, 2, 3, 4), "tp": (1, 2, 4, 8)}, {"x": "b/dp s/cp:striped h/tp"}, "b/dp s/cp h/tp"
    ),
    "beyond the limit": declared(
        {"dp": (1, 4, 8), "cp": (1, 4, 8), "tp": (1, 4, 8)}, {"x": "b/dp s/cp h/tp"}, "b/dp s/cp h/tp"
    ),
    "ragged": declared({"tp": (1, 2, 3, 4)}, {"x": "b v/tp:ragged"}, "b tp=I"),
    "packed": declared(
        {"cp": (1, 2, 4)}, {"x": "t/cp:packed", "cu": "m", "padded": "m"}, "t/cp:packed",
        draw={"cu": offsets("t"), "padded": offsets("t", padded=True)},
    ),
    "groups": declared({"tp": (1, 2, 4, 8)}, {"q": "h/tp p", "k": "g/tp p"}, "h/tp p", dims={"h": "2*g", "p": (4,)}),
    "related": declared({"tp": (1, 2, 3, 4, 8)}, {"q": "h/tp", "k": "g tp=R"}, "h/tp", dims={"h": "3*g"}),
    "shifted": declared({"tp": (1, 2, 4)}, {"q": "h/tp", "k": "g tp=R"}, "h/tp", dims={"h": "g+1"}),
    "shorter": declared({"tp": (1, 2)}, {"x": "s/tp", "y": "r tp=I"}, "s/tp", dims={"r": "s-3"}),
    "few sizes": declared({"tp": (1, 2, 4)}, {"x": "s/tp v"}, "s/tp v", dims={"s": (3, 4, 6)}),
}  # fmt: skip
each_scheme = pytest.mark.parametrize("declaration", SCHEMES.values(), ids=SCHEMES.keys())


@each_scheme
@pytest.mark.parametrize("profile", ["dev", "ci", "nightly"])
def test_few_size_choices_fit_every_mesh(declaration, profile):
    tried = size_choices.meshes(declaration, {}, None)
    shapes = size_choices.shapes(declaration, {}, tried, SHAPES[profile])
    assert 1 < len(shapes) <= {"dev": 8, "ci": 12, "nightly": 48}[profile]
    assert len({tuple(shape.items()) for shape in shapes}) == len(shapes)
    for mesh in tried:
        served = [shape for shape in shapes if size_choices.compatible(declaration, shape, mesh)]
        assert served, mesh


@each_scheme
def test_drawn_cases_use_the_size_choices_and_cover_every_mesh(declaration):
    tried = size_choices.meshes(declaration, {}, None)
    shapes = size_choices.shapes(declaration, {}, tried, 8)
    cases = [draw_case(declaration, seeded_chooser(seed), {}, seed=seed) for seed in range(300)]
    assert all(dict(case.dims) in shapes for case in cases)
    assert {tuple(case.mesh.items()) for case in cases} == {tuple(mesh.items()) for mesh in tried}
    assert max(case.world for case in cases) <= 64


def test_the_first_shape_is_the_smallest():
    declaration = SCHEMES["one sharding"]
    shapes = size_choices.shapes(declaration, {}, size_choices.meshes(declaration, {}, None), 8)
    assert shapes[0] == {"b": 1, "s": 1, "v": 1}
    assert all(len(set(shape.values())) > 1 for shape in shapes[1:])  # unequal sizes are the rule


def test_each_mesh_has_a_shape_of_several_columns_per_rank_and_one_of_a_single_column():
    """A rank with one row hides a swap of rows, and the softmax of a single column is 1 for every function."""
    declaration = SCHEMES["one sharding"]
    shapes = size_choices.shapes(declaration, {}, size_choices.meshes(declaration, {}, None), 8)
    for tp in (1, 2, 4):
        local_sizes = [(shape["b"], shape["s"], shape["v"] / tp) for shape in shapes[1:]]
        assert (2, 3, 5) in local_sizes
        assert (3, 5, 1) in local_sizes


def test_local_sizes():
    declaration = declared({"tp": (4,)}, {"x": "b v/tp"}, "b tp=I")
    shapes = size_choices.shapes(declaration, {}, size_choices.meshes(declaration, {}, None), 48)
    assert {shape["v"] // 4 for shape in shapes} == {1, 2, 3, 5, 8} == {shape["b"] for shape in shapes}


def sizes_of(name):
    declaration = SCHEMES[name]
    return size_choices.shapes(declaration, {}, size_choices.meshes(declaration, {}, None), 48)


def test_relations_hold_in_every_shape():
    assert all(shape["h"] == 2 * shape["g"] for shape in sizes_of("groups"))
    assert all(shape["h"] == 3 * shape["g"] for shape in sizes_of("related"))
    assert all(shape["h"] == shape["g"] + 1 for shape in sizes_of("shifted"))
    assert all(shape["r"] == shape["s"] - 3 >= 0 for shape in sizes_of("shorter"))


def test_size_choices_of_dims_are_respected():
    assert {shape["s"] for shape in sizes_of("few sizes")} == {3, 4, 6}
    assert {shape["p"] for shape in sizes_of("groups")} == {4}


def test_offsets_hold_one_sequence_at_least():
    assert min(shape["m"] for shape in sizes_of("packed")) == 2


def rejection(declaration, **sizes):
    with pytest.raises(ValueError) as caught:
        declaration.case(**sizes)
    return str(caught.value)


def test_sizes_given_by_hand():
    declaration = SCHEMES["swapped"]
    assert rejection(declaration, cp=4, s=30) == (
        f"scheme '{declaration.name}': "
        "s=30 cannot be sharded by dual_chunk_swap over cp=4 (needs a multiple of 8); pad to 32"
    )
    assert declaration.case(cp=4, s=32).dims["s"] == 32
    # Only the declared meshes that can shard 30 are kept: it is not a multiple of 4 or 8.
    assert {declaration.case(s=30, seed=seed).cp for seed in range(40)} == {1, 3}
    assert declaration.case(cp=5, s=10).mesh == {"cp": 5}


def test_a_dim_in_a_relation_given_by_hand():
    declaration = SCHEMES["groups"]
    assert declaration.case(tp=2, h=12).dims == {"g": 6, "p": 4, "h": 12}
    assert declaration.case(tp=2, g=4).dims["h"] == 8
    none = f"scheme '{declaration.name}': no sizes agree with h=2*g and can be sharded"
    assert rejection(declaration, tp=1, h=5) == none
    assert rejection(declaration, tp=1, h=6, g=4) == none


def test_a_mesh_that_can_never_be_drawn():
    declaration = declared({"tp": (1, 2, 4)}, {"x": "v/tp"}, "v/tp", dims={"v": (2, 6)})
    assert rejection(declaration) == (
        f"scheme '{declaration.name}': mesh {{'tp': 4}} can never be drawn: "
        "v=2 cannot be sharded by contiguous over tp=4 (needs a multiple of 4); pad to 4"
    )
    assert declaration.case(v=6).dims == {"v": 6}


def test_a_world_above_the_limit_or_without_a_mesh():
    declaration = SCHEMES["one sharding"]
    prefix = f"scheme '{declaration.name}': no mesh of "
    assert rejection(declaration, tp=65) == prefix + "tp=65 has 64 ranks or fewer, which is the limit"
    with pytest.raises(ValueError) as caught:
        draw_case(declaration, seeded_chooser(0), {}, world=3)
    assert str(caught.value) == prefix + "tp=(1, 2, 4) has 3 ranks"


def test_a_fixed_world():
    declaration = SCHEMES["many meshes"]
    meshes = {tuple(draw_case(declaration, seeded_chooser(s), {}, world=8).mesh.values()) for s in range(80)}
    assert meshes == {(1, 1, 8), (1, 2, 4), (1, 4, 2), (2, 1, 4), (2, 2, 2), (2, 4, 1)}
