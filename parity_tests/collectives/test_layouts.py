"""Layouts with collectives: a rank knows which positions it holds, and gathered shards are put back in order."""

import pytest
import torch

from parity_tests.collectives import meanings
from parity_tests.parity import parity
from shardproof import Cost, offsets, scheme
from torch_impl import layouts
from torch_impl.collectives import all_gather, reduce_scatter
from torch_impl.layouts import inverse, packed, striped
from torch_impl.layouts.index_arrays import packed_positions

RANKS = {"cp": (1, 2, 3, 4)}
PACKED = {"mesh": RANKS, "dims": {"n": (3, 5)}, "draw": {"offsets": offsets("s", padded=True)}}


def numbered(x, ids):
    return x * ids.to(x)[:, None]


def gathered_cost(case):
    piece = case.s // case.cp * case.d
    return Cost(
        forward={"all_gather": (1, piece * case.itemsize)},
        backward={"reduce_scatter": (1, case.s * case.d * case.accumulator_itemsize)},
    )


def scattered_cost(case):
    turned = gathered_cost(case)
    return Cost(forward=turned.backward, backward=turned.forward)


@scheme(reference=meanings.numbered, mesh=RANKS, inputs={"x": "s/cp d"}, outputs="s/cp d", cost=lambda case: Cost())
def numbered_in_blocks(mesh, x):
    return numbered(x, mesh.global_ids("s"))


@scheme(
    reference=meanings.numbered,
    mesh=RANKS,
    inputs={"x": "s/cp:ragged d"},
    outputs="s/cp:ragged d",
    cost=lambda case: Cost(),
)
def numbered_in_ragged_blocks(mesh, x):
    return numbered(x, mesh.global_ids("s"))


@scheme(
    reference=meanings.numbered,
    mesh=RANKS,
    inputs={"x": "s/cp:striped d"},
    outputs="s/cp:striped d",
    sums="float32",
    cost=lambda case: Cost(),
)
def numbered_in_stripes(mesh, x):
    return numbered(x, mesh.global_ids("s"))


@scheme(
    reference=meanings.numbered,
    mesh={"cp": (1, 2, 3), "tp": (1, 2)},
    inputs={"x": "s/cp:dual_chunk_swap/tp d"},
    outputs="s/cp:dual_chunk_swap/tp d",
    sums="float32",
    cost=lambda case: Cost(),
)
def numbered_over_two_axes(mesh, x):
    """Two chunks on each rank of cp, in blocks over tp."""
    return numbered(x, mesh.global_ids("s"))


@scheme(
    reference=meanings.numbered,
    mesh=RANKS,
    inputs={"x": "s/cp:dual_chunk_swap d"},
    outputs="s/cp:dual_chunk_swap d",
    sums="float32",
    cost=lambda case: Cost(),
)
def numbered_in_swapped_chunks(mesh, x):
    world = mesh.size("cp")
    return numbered(x, layouts.dual_chunk_swap(len(x) * world, world)[mesh.rank("cp")])


@scheme(
    reference=meanings.numbered_beside,
    inputs={"x": "s/cp:packed d", "offsets": "n"},
    outputs="s/cp:packed d",
    sums="float32",
    cost=lambda case: Cost(),
    **PACKED,
)
def numbered_in_sequences(mesh, x, offsets):
    world = mesh.size("cp")
    return numbered(x, packed_positions(len(x) * world, world, mesh.rank("cp"), offsets))


@scheme(
    reference=meanings.identity,
    mesh=RANKS,
    contract=all_gather,
    inputs={"x": "s/cp:dual_chunk_swap d"},
    cost=gathered_cost,
    sums="float32",
)
def gathered_in_order(mesh, x):
    world = mesh.size("cp")
    order = inverse(layouts.dual_chunk_swap(len(x) * world, world))
    return all_gather(x, mesh["cp"], out="R")[order]


@scheme(
    reference=meanings.identity,
    mesh=RANKS,
    contract=all_gather,
    inputs={"x": "s/cp:striped d"},
    cost=gathered_cost,
    sums="float32",
)
def gathered_from_stripes(mesh, x):
    world = mesh.size("cp")
    return all_gather(x, mesh["cp"], out="R")[inverse(striped(len(x) * world, world))]


@scheme(
    reference=meanings.identity_of_sequences,
    contract=reduce_scatter,
    inputs={"x": "s d cp=P", "offsets": "n"},
    outputs="s/cp:packed d",
    sums="float32",
    cost=scattered_cost,
    **PACKED,
)
def scattered_in_sequences(mesh, x, offsets):
    order = torch.cat(packed(len(x), mesh.size("cp"), offsets))
    return reduce_scatter(x[order], mesh["cp"])


SCHEMES = (
    numbered_in_blocks,
    numbered_in_ragged_blocks,
    numbered_in_stripes,
    numbered_in_swapped_chunks,
    numbered_over_two_axes,
    numbered_in_sequences,
    gathered_in_order,
    gathered_from_stripes,
    scattered_in_sequences,
)
test_parity = parity(SCHEMES, lockstep=20, gloo=5)


def divided_by_the_full_size(mesh, x):
    return x / mesh.total("s")


@pytest.mark.parametrize("layout", ["contiguous", "ragged", "dual_chunk_swap"])
def test_the_full_size_of_a_sharded_dim_is_known_on_a_rank(layout):
    spec = f"s/cp:{layout} d"
    declared = scheme(reference=lambda x: x / len(x), mesh=RANKS, inputs={"x": spec}, outputs=spec)
    assert declared(divided_by_the_full_size).verify(examples=8).ok


def test_a_dim_that_is_not_sharded_has_no_full_size():
    def outside(mesh, x):
        return x / mesh.total("d")

    declared = scheme(reference=lambda x: x, mesh={"cp": (2,)}, inputs={"x": "s/cp d"}, outputs="s/cp d")(outside)
    assert "ValueError: mesh: dim 'd' is not known here (s)" in str(declared.verify(examples=1).failure)
