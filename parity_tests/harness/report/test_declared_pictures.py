"""A picture shows several ranks, each with positions of its own, unless sizes are given that have none."""

import pytest

from shardproof.declaration import scheme
from shardproof.declare.discover import built_in
from shardproof.report.declared_pictures import ENOUGH, _fewest_positions, declared_pictures, pictured_case


def declared(spec, mesh, **dims):
    @scheme(reference=lambda x: x, mesh=mesh, inputs={"x": spec}, outputs=spec, dims=dims)
    def itself(mesh, x):
        return x

    return itself


@pytest.mark.parametrize("layout", ["", ":ragged", ":striped", ":dual_chunk_swap"])
def test_each_of_two_ranks_has_two_positions(layout):
    drawn = declared(f"b s/cp{layout}", {"cp": (1, 2, 4)})
    case = pictured_case(drawn, {})
    assert case.mesh == {"cp": 2} and _fewest_positions(drawn, case) == ENOUGH


def test_the_smallest_mesh_with_several_ranks_on_the_most_axes():
    drawn = declared("b/dp s/cp", {"dp": (1, 3), "cp": (1, 2, 4)})
    assert pictured_case(drawn, {}).mesh == {"dp": 3, "cp": 2}
    assert pictured_case(drawn, {"dp": 1}).mesh == {"dp": 1, "cp": 2}


def test_sizes_that_are_given_are_drawn():
    drawn = declared("b s/cp:ragged", {"cp": (1, 2, 4)})
    case = pictured_case(drawn, {"cp": 4, "s": 3})
    assert (case.mesh, case.dims["s"]) == ({"cp": 4}, 3)


def test_a_mesh_that_no_shape_goes_with_is_passed_over():
    drawn = declared("s/cp", {"cp": (2, 3)}, s=(9,))
    assert pictured_case(drawn, {}).mesh == {"cp": 3}
    with pytest.raises(ValueError, match="s=10"):
        pictured_case(drawn, {"cp": 3, "s": 10})


def test_every_built_in_scheme_that_has_several_ranks_is_drawn_with_them():
    for each in built_in():
        if any(size > 1 for sizes in each.mesh.values() for size in sizes):
            assert pictured_case(each, {}).world > 1, each.name


def test_a_part_of_a_mesh_has_the_picture_of_the_full_one():
    pictures = declared_pictures(declared("s/cp", {"cp": (1, 2)}))
    assert pictures[""] == pictures["cp=2"] != pictures["cp=1"]
