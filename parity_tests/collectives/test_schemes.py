"""The collectives as schemes: each with its types, its cost in closed form, and its meaning on one device."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from parity_tests.collectives import meanings
from parity_tests.collectives.uneven_shards import uneven
from parity_tests.collectives.uneven_shards import uneven_lengths as lengths
from parity_tests.parity import parity
from shardproof import Cost, integers, scheme
from torch_impl import collectives as c
from torch_impl.collectives.plain import sum_in_place

WORLDS = {"tp": (1, 2, 3, 4)}


UNEVEN = {"layouts": {"uneven": uneven}, "draw": {"beside": integers(0, 1)}}


def sum_cost(to_replicated):
    """One all_reduce forward; the same backward where the cotangents are addends."""

    def cost(case):
        once = {"all_reduce": (1, case.a * case.b * case.accumulator_itemsize)}
        return Cost(forward=once, backward=once if to_replicated else {})

    return cost


def gather_cost(to_replicated, longest):
    """One all_gather of the longest piece; backward one reduce_scatter where the cotangents are addends."""

    def cost(case):
        piece = case.a * longest(case)
        back = {"reduce_scatter": (1, case.tp * piece * case.accumulator_itemsize)}
        return Cost(forward={"all_gather": (1, piece * case.itemsize)}, backward=back if to_replicated else {})

    return cost


def scatter_cost(longest):
    """The two of gather_cost with forward and backward exchanged."""

    def cost(case):
        turned = gather_cost(True, longest)(case)
        return Cost(forward=turned.backward, backward=turned.forward)

    return cost


def even_piece(case):
    return case.b // case.tp


def longest_piece(case):
    return max(lengths(case.b, case.tp))


def exchange_cost(case):
    once = {"all_to_all": (1, case.a * case.b // case.tp * case.itemsize)}
    return Cost(forward=once, backward=once)


def exchange_along_cost(case):
    once = {"all_to_all": (1, case.a * (case.tp + 1) * case.itemsize)}
    return Cost(forward=once, backward=once)


def broadcast_cost(to_replicated):
    def cost(case):
        back = {"reduce": (1, case.a * case.accumulator_itemsize)} if to_replicated else {}
        return Cost(forward={"broadcast": (1, case.a * case.itemsize)}, backward=back)

    return cost


def shift_cost(case):
    row = (1, case.a * case.itemsize)
    once = {"send": row, "recv": row} if case.tp > 1 else {}
    return Cost(forward=once, backward=once)


@scheme(
    reference=meanings.identity,
    mesh=WORLDS,
    contract=c.all_reduce,
    inputs={"x": "a b tp=P"},
    cost=sum_cost(True),
    sums="float32",
)
def sum_to_replicated(mesh, x):
    return c.all_reduce(x, mesh["tp"], out="R")


@scheme(
    reference=meanings.identity,
    mesh=WORLDS,
    contract=c.all_reduce,
    inputs={"x": "a b tp=P"},
    outputs="a b tp=I",
    sums="float32",
    rank_options={"out": (None, "I")},
    cost=sum_cost(False),
)
def sum_to_invariant(mesh, x, out):
    return c.all_reduce(x, mesh["tp"]) if out is None else c.all_reduce(x, mesh["tp"], out=out)


@scheme(
    reference=lambda x: x.sum(0),
    mesh=WORLDS,
    inputs={"x": "n/tp a"},
    outputs="a",
    draw={"x": integers(-(2**40), 2**40)},
    cost=lambda case: Cost(forward={"all_reduce": (1, case.a * 8)}),
)
def sum_of_integers(mesh, x: Int[Tensor, "n a"]) -> Int[Tensor, "a"]:
    """Counts are summed as integers, exactly beyond the digits of float32."""
    return c.all_reduce(x.sum(0), mesh["tp"], out="I")


@scheme(
    reference=meanings.column_maximum,
    mesh=WORLDS,
    inputs={"x": "n/tp a"},
    outputs="a tp=I",
    nograd=("x",),
    cost=lambda case: Cost(forward={"all_reduce": (1, case.n // case.tp * case.a * case.itemsize)}),
)
def maximum(mesh, x):
    return c.all_reduce_max(x, mesh["tp"]).amax(0)


@scheme(
    reference=meanings.identity,
    mesh=WORLDS,
    contract=c.all_gather,
    inputs={"x": "a b/tp"},
    outputs="a b tp=R",
    sums="float32",
    cost=gather_cost(True, even_piece),
)
def gather_to_replicated(mesh, x):
    return c.all_gather(x, mesh["tp"], out="R", dim=1)


@scheme(
    reference=lambda x: x.reshape(-1),
    mesh=WORLDS,
    inputs={"x": "a b/tp"},
    outputs="r tp=I",
    dims={"r": "a*b"},
    cost=gather_cost(False, even_piece),
)
def gather_that_is_flattened(mesh, x):
    """What is gathered along any dim has no gaps, so that a caller may view it."""
    return c.all_gather(x, mesh["tp"], out="I", dim=1).view(-1)


@scheme(
    reference=meanings.identity_beside,
    mesh=WORLDS,
    contract=c.all_gather,
    inputs={"x": "a b/tp:uneven", "beside": "b"},
    outputs="a b tp=R",
    sums="float32",
    cost=gather_cost(True, longest_piece),
    **UNEVEN,
)
def uneven_gather_to_replicated(mesh, x, beside):
    return c.all_gather(x, mesh["tp"], out="R", dim=-1, lengths=lengths(len(beside), mesh.size("tp")))


@scheme(
    reference=meanings.identity_beside,
    mesh=WORLDS,
    contract=c.all_gather,
    inputs={"x": "b/tp:uneven a", "beside": "b"},
    outputs="b a tp=I",
    cost=gather_cost(False, longest_piece),
    **UNEVEN,
)
def uneven_gather_to_invariant(mesh, x, beside):
    return c.all_gather(x, mesh["tp"], out="I", lengths=lengths(len(beside), mesh.size("tp")))


@scheme(
    reference=meanings.identity,
    mesh=WORLDS,
    contract=c.reduce_scatter,
    inputs={"x": "b a tp=P"},
    cost=scatter_cost(even_piece),
    sums="float32",
)
def scatter(mesh, x):
    return c.reduce_scatter(x, mesh["tp"])


@scheme(
    reference=meanings.identity,
    mesh=WORLDS,
    contract=c.reduce_scatter,
    inputs={"x": "a b tp=P"},
    outputs="a b/tp:uneven",
    sums="float32",
    layouts={"uneven": uneven},
    cost=scatter_cost(longest_piece),
)
def uneven_scatter(mesh, x):
    return c.reduce_scatter(x, mesh["tp"], dim=1, lengths=lengths(x.shape[1], mesh.size("tp")))


@scheme(reference=meanings.identity, mesh=WORLDS, inputs={"x": "a/tp b"}, outputs="a b/tp", cost=exchange_cost)
def exchange(mesh, x):
    return c.all_to_all(x, mesh["tp"], split_dim=1, concat_dim=0)


@scheme(
    reference=meanings.identity_beside,
    mesh=WORLDS,
    inputs={"x": "b/tp:uneven a", "beside": "b"},
    outputs="b a/tp",
    **UNEVEN,
)
def uneven_exchange(mesh, x, beside):  # each rank sends its own number of bytes: no closed form for all
    return c.all_to_all(x, mesh["tp"], split_dim=-1, concat_dim=0, concat_lengths=lengths(len(beside), mesh.size("tp")))


def overlap(one, other):
    """How many positions two ranges share."""
    return max(min(one[1], other[1]) - max(one[0], other[0]), 0)


def spans(lengths):
    """(first, stop) of each rank."""
    ends = np.cumsum(lengths)
    return list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))


@scheme(
    reference=meanings.identity_beside,
    mesh=WORLDS,
    inputs={"x": "a b/tp:uneven", "beside": "b"},
    outputs="a b/tp",
    **UNEVEN,
)
def exchange_along_one_dim(mesh, x, beside):
    """From uneven shards to even ones: a rank sends each other rank another number of columns."""
    world, rank, size = mesh.size("tp"), mesh.rank("tp"), len(beside)
    before, after = spans(lengths(size, world)), spans([size // world] * world)
    sent = [overlap(before[rank], each) for each in after]
    received = [overlap(each, after[rank]) for each in before]
    return c.all_to_all(x, mesh["tp"], split_dim=1, concat_dim=-1, split_lengths=sent, concat_lengths=received)


def pieces(world):
    """How many columns rank i sends to rank j, and j to i: all rows add up to world + 1."""
    ranks = np.arange(world)
    return 1 + ((ranks[:, None] + ranks[None]) % world == 0)


def exchanged_pieces(x, mesh):
    sizes = pieces(mesh["tp"])
    starts = np.cumsum(sizes, 1) - sizes + (mesh["tp"] + 1) * np.arange(mesh["tp"])[:, None]
    order = [np.arange(starts[i, j], starts[i, j] + sizes[i, j]) for j in range(len(sizes)) for i in range(len(sizes))]
    return x[:, np.concatenate(order)]


@scheme(
    reference=exchanged_pieces,
    mesh=WORLDS,
    inputs={"x": "a b/tp"},
    outputs="a b/tp",
    dims={"b": "tp*tp+tp"},
    cost=exchange_along_cost,
)
def exchange_of_equal_pairs(mesh, x):
    """Without concat_lengths a rank receives from each other one as much as it sends there."""
    sent = pieces(mesh.size("tp"))[mesh.rank("tp")].tolist()
    return c.all_to_all(x, mesh["tp"], split_dim=1, concat_dim=1, split_lengths=sent)


@scheme(
    reference=meanings.first_row_of_shard,
    mesh=WORLDS,
    inputs={"x": "n/tp a"},
    outputs="1 a tp=R",
    sums="float32",
    options={"src": (0, 1, 2, -1)},
    cost=broadcast_cost(True),
)
def broadcast_to_replicated(mesh, x, src):
    return c.broadcast(x[:1], mesh["tp"], src=src % mesh.size("tp"), out="R")


@scheme(
    reference=meanings.first_row_of_shard,
    mesh=WORLDS,
    inputs={"x": "n/tp a"},
    outputs="1 a tp=I",
    options={"src": (0, 1, 2, -1)},
    cost=broadcast_cost(False),
)
def broadcast_to_invariant(mesh, x, src):
    return c.broadcast(x[:1], mesh["tp"], src=src % mesh.size("tp"), out="I")


@scheme(
    reference=meanings.rolled,
    mesh=WORLDS,
    contract=c.ring_shift,
    inputs={"x": "n/tp a"},
    options={"shift": (1, -1)},
    cost=shift_cost,
)
def neighbours_row(mesh, x, shift):
    arriving = c.ring_shift(x[-1:] if shift == 1 else x[:1], mesh["tp"], shift)
    return torch.cat([arriving, x[:-1]] if shift == 1 else [x[1:], arriving])


def moves(case):
    """Whether another rank's shard comes: shift is no multiple of the ranks, and is 1 if it is left out."""
    return (1 if case.shift is None else case.shift) % case.tp != 0


def shards_cost(case):
    shard = (1, case.n // case.tp * case.a * case.itemsize)
    once = {"send": shard, "recv": shard} if moves(case) else {}
    return Cost(forward=once, backward=once)


SHIFTS = {"shift": (None, 1, -1, 2, -3, 4)}


@scheme(
    reference=meanings.rolled_by_shards,
    mesh=WORLDS,
    contract=c.ring_shift,
    inputs={"x": "n/tp a"},
    options=SHIFTS,
    cost=shards_cost,
)
def shards_around_the_ring(mesh, x, shift):
    return c.ring_shift(x, mesh["tp"]) if shift is None else c.ring_shift(x, mesh["tp"], shift)


def messages_cost(case):
    """One message of the shard, and one of as many integers of 8 bytes."""
    ids = case.n // case.tp * 8
    return Cost(forward={op: (2, size + ids) for op, (_, size) in shards_cost(case).forward.items()})


@scheme(
    reference=meanings.both_rolled_by_shards,
    mesh=WORLDS,
    inputs={"x": "n/tp a", "ids": "n/tp"},
    outputs=("n/tp a", "n/tp"),
    draw={"ids": integers(-(2**40), 2**40)},
    nograd=("x",),
    options=SHIFTS,
    cost=messages_cost,
)
def shards_around_the_ring_at_once(mesh, x, ids, shift) -> tuple[Float[Tensor, "n a"], Int[Tensor, " n"]]:
    """By the shift that returns at once, of two tensors of different dtypes in one batch."""
    arriving, works = c.start_ring_shift([x, ids], mesh["tp"], *(() if shift is None else (shift,)))
    for work in works:
        work.wait()
    return tuple(arriving)


def sums_in_place_cost(case):
    """For each dtype, over each axis one sum; the two tensors have one dtype if the tested one is float64."""
    pieces = [case.a * case.b * case.accumulator_itemsize, case.a * 8]
    calls = {"all_reduce": (1 if case.dtype == "float64" else 2, sum(pieces))}
    return Cost(forward={f"{op}/{axis}": count for axis in ("tp", "dp") for op, count in calls.items()})


@scheme(
    reference=lambda x, y, divisor: (x / divisor, y / divisor),
    mesh={"tp": (1, 2, 3), "dp": (1, 2)},
    inputs={"x": "a b tp=P dp=P", "y": "a tp=P dp=P"},
    outputs=("a b tp=I dp=I", "a tp=I dp=I"),
    options={"divisor": (1, 3)},
    nograd=("x", "y"),
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    roundings=2,
    cost=sums_in_place_cost,
)
def sums_in_place(mesh, x, y, divisor):
    """Over two axes, of a tensor that is stored transposed and of one in float64."""
    tensors = [x.T.clone(memory_format=torch.contiguous_format).T, y.double().clone()]
    sum_in_place(tensors, [mesh["tp"], mesh["dp"]], divisor)
    return tensors[0], tensors[1].to(y.dtype)


SCHEMES = (
    sums_in_place,
    sum_to_replicated,
    sum_to_invariant,
    sum_of_integers,
    maximum,
    gather_to_replicated,
    uneven_gather_to_replicated,
    gather_that_is_flattened,
    uneven_gather_to_invariant,
    scatter,
    uneven_scatter,
    exchange,
    uneven_exchange,
    exchange_along_one_dim,
    exchange_of_equal_pairs,
    broadcast_to_replicated,
    broadcast_to_invariant,
    neighbours_row,
    shards_around_the_ring,
    shards_around_the_ring_at_once,
)
test_parity = parity(SCHEMES, lockstep=20, gloo=5)
