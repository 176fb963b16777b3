"""The layout of one batch: goldens typed by hand, two ways to state the same layout, and rejections."""

from itertools import accumulate, pairwise

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax import Array
from jaxtyping import Bool, Int
from torch import Tensor

from jax_ref.layouts import BUILTIN as REFERENCES
from jax_ref.layouts import ceil_lengths, check_partition, reference
from parity_tests.parity import parity
from shardproof import CaseSpec, Cost, drawn, integers, offsets, scheme
from shardproof.engines.engines import run
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.index_arrays import contiguous, dual_chunk_swap, ragged, striped

worlds = st.sampled_from([1, 2, 3, 4, 8])


def rank_positions(layout):
    return [[g for g in row if g >= 0] for row in layout.index.tolist()]


def test_golden_dense():
    dense = TokenLayout.dense
    assert rank_positions(dense("dual_chunk_swap", 8, cp_size=2, cp_rank=0)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    twelve = dense("dual_chunk_swap", 12, cp_size=3, cp_rank=0)
    assert rank_positions(twelve) == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert rank_positions(dense("striped", 6, cp_size=3, cp_rank=0)) == [[0, 3], [1, 4], [2, 5]]
    assert rank_positions(dense("contiguous", 6, cp_size=3, cp_rank=0)) == [[0, 1], [2, 3], [4, 5]]
    ragged = dense("ragged", 7, cp_size=3, cp_rank=2)
    assert ragged.index.tolist() == [[0, 1, 2], [3, 4, 5], [6, -1, -1]]
    assert ragged.local_index.tolist() == [6]
    assert ragged.cu_padded.dtype == ragged.cu_real.dtype == torch.int32
    assert rank_positions(dense("ragged", 4, cp_size=3, cp_rank=0)) == [[0, 1], [2, 3], []]
    assert rank_positions(dense("ragged", 4, cp_size=2, cp_rank=0, counts=[1, 3])) == [[0], [1, 2, 3]]


def test_golden_packed():
    layout = TokenLayout.packed([0, 4, 12], [0, 3, 10], cp_size=2, cp_rank=1)
    assert layout.index.tolist() == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    assert layout.local_index.tolist() == [1, 2, 6, 7, 8, 9]
    assert layout.inverse.tolist() == [0, 6, 7, 1, 2, 3, 8, 9, 10, 11, 4, 5]
    assert layout.sequence_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert layout.padding_mask.nonzero().flatten().tolist() == [3, 11]
    assert layout.local_cu.tolist() == [0, 2, 6]
    assert layout.original_length == 11
    assert TokenLayout.packed([0, 4, 8], [0, 4, 5], cp_size=2, cp_rank=0).original_length == 5
    for cu in ([0, 4, 8], torch.tensor([0, 4, 8])):  # offsets as a list and as a tensor
        for real in ([0, 4, 4], torch.tensor([0, 4, 4])):
            assert TokenLayout.packed(cu, real, cp_size=2, cp_rank=0).original_length == 4
    assert layout.cu_padded.dtype == layout.cu_real.dtype == layout.local_cu.dtype == torch.int32


PICTURES = [
    (TokenLayout.dense("contiguous", 8, cp_size=2, cp_rank=0), "00001111"),
    (TokenLayout.dense("ragged", 7, cp_size=2, cp_rank=0), "0000111"),
    (TokenLayout.dense("dual_chunk_swap", 8, cp_size=2, cp_rank=0), "00111100"),
    (TokenLayout.dense("striped", 8, cp_size=2, cp_rank=0), "01010101"),
    (TokenLayout.packed([0, 4, 12], cp_size=2, cp_rank=0), "0110|00111100"),
    (TokenLayout.packed([0, 0, 4, 4], cp_size=2, cp_rank=0), "|0110|"),
    (TokenLayout.packed([0, 3, 8], cp_size=2, cp_rank=0, kind="striped"), "010|10101"),
    (TokenLayout.packed([0], cp_size=2, cp_rank=0), ""),
    (TokenLayout.packed([0, 1, 4], cp_size=1, cp_rank=0), "0|000"),
    (TokenLayout.dense("striped", 38, cp_size=38, cp_rank=0), "0123456789abcdefghijklmnopqrstuvwxyz??"),
]


@pytest.mark.parametrize(("layout", "picture"), PICTURES)
def test_picture(layout, picture):
    assert layout.draw() == picture


@given(st.sampled_from(["contiguous", "dual_chunk_swap", "ragged", "striped"]), worlds, st.integers(0, 5))
def test_dense_is_the_reference_and_a_partition(kind, n, chunks):
    length = chunks if kind == "ragged" else 2 * n * chunks
    expected = REFERENCES[kind](length, n)
    check_partition(kind, expected, length)
    for rank in range(n):
        layout = TokenLayout.dense(kind, length, cp_size=n, cp_rank=rank)
        assert rank_positions(layout) == [piece.tolist() for piece in expected]
        assert layout.local_index.tolist() == expected[rank].tolist()
        assert layout.local_cu.tolist() == [0, len(expected[rank])]
        assert layout.position_ids.tolist() == list(range(length))
    assert np.concatenate(expected)[layout.inverse.numpy()].tolist() == list(range(length))
    assert layout.counts == tuple(map(len, expected))
    if kind == "ragged":
        assert list(layout.counts) == ceil_lengths(length, n)


lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), max_size=6)  # chunks, and how many are padding


@given(lengths, worlds, st.sampled_from(["packed", "contiguous", "striped"]))
def test_packed_is_the_reference_and_a_partition(chunks, n, kind):
    slots = [2 * n * chunk for chunk, _ in chunks]
    cu, real = [0, *accumulate(slots)], [0, *accumulate(max(s - p, 0) for s, (_, p) in zip(slots, chunks, strict=True))]
    total = cu[-1]
    expected = REFERENCES[kind](total, n, cu) if kind == "packed" else REFERENCES[kind](total, n)
    check_partition(kind, expected, total)
    ids = reference.sequence_ids(cu)
    for rank in range(n):
        layout = TokenLayout.packed(torch.tensor(cu), torch.tensor(real), cp_size=n, cp_rank=rank, kind=kind)
        assert rank_positions(layout) == [piece.tolist() for piece in expected]
        assert layout.local_index.tolist() == expected[rank].tolist()
        assert layout.local_cu.tolist() == [int((ids[expected[rank]] < j).sum()) for j in range(len(cu))]
    assert layout.sequence_ids.tolist() == ids.tolist()
    assert layout.position_ids.tolist() == reference.position_ids(cu).tolist()
    assert layout.padding_mask.tolist() == reference.padding_mask(cu, real).tolist()
    assert np.concatenate(expected)[layout.inverse.numpy()].tolist() == list(range(total))


PACKED = dict(
    mesh={"cp": (1, 2, 4)},
    dims={"n": (4, 6, 3), "t": (24, 40, 16), "b": (2, 1)},
    draw={"padded": offsets("t", padded=True), "real": offsets("t")},
)
DTYPES = ("float32", "bfloat16", "float64")


def with_fill(offsets, fill):
    """Offsets of a batch of streams: a stream with fewer sequences than another ends with -1."""
    return offsets if offsets is None else torch.nn.functional.pad(offsets, (0, fill), value=-1)


def packed_layout(mesh, padded, real=None, fill=0, **more):
    padded, real = with_fill(padded, fill), with_fill(real, fill)
    return TokenLayout.packed(padded, real, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"), **more)


def first(x, padded):
    return x


@scheme(
    reference=first,
    contract=TokenLayout.shard,
    inputs={"x": "b t d cp=R", "padded": "n"},
    outputs="b t/cp:packed d",
    dtypes=DTYPES,
    cost=lambda c: Cost(),
    **{**PACKED, "draw": {"padded": offsets("t", padded=True)}},
)
def sharded_by_layout(mesh, x, padded):
    return packed_layout(mesh, padded).shard(x, 1)


def gather_cost(gradient):
    def cost(c):
        elements = c.b * c.t * c.d
        back = {"reduce_scatter": (1, elements * c.accumulator_itemsize)} if gradient == "R" else {}
        return Cost(forward={"all_gather": (1, elements // c.cp * c.itemsize)}, backward=back)

    return cost


@scheme(
    reference=first,
    contract=TokenLayout.unshard,
    inputs={"x": "b t/cp:packed d", "padded": "n"},
    dtypes=DTYPES,
    sums="float32",
    cost=gather_cost("R"),
    rank_options={"fill": (0, 1, 3)},
    **{**PACKED, "draw": {"padded": offsets("t", padded=True)}},
)
def gathered_by_layout(mesh, x, padded, fill):
    return packed_layout(mesh, padded, fill=fill).unshard(x, 1, mesh["cp"])


@scheme(
    reference=first,
    contract=TokenLayout.unshard,
    inputs={"x": "b t/cp:packed d", "padded": "n"},
    outputs="b t d cp=I",
    dtypes=DTYPES,
    cost=gather_cost("I"),
    **{**PACKED, "draw": {"padded": offsets("t", padded=True)}},
)
def gathered_by_layout_with_one_gradient(mesh, x, padded):
    return packed_layout(mesh, padded).unshard(x, -2, mesh["cp"], gradient="I")


Row = Int[Tensor, " t"]
Tables = tuple[Row, Row, Bool[Tensor, " t"], Row, Int[Tensor, " n"]]


def tables(ids, padded, real, mesh) -> tuple[Array, ...]:
    """The sequence of position g is the number of ends at or before g; its rank counts chunks from both ends."""
    g = jnp.arange(ids.shape[1])
    sequence = (padded[1:][None, :] <= g[:, None]).sum(1)
    position = g - padded[sequence]
    chunk = position * 2 * mesh["cp"] // jnp.diff(padded)[sequence]
    rank = jnp.minimum(chunk, 2 * mesh["cp"] - 1 - chunk)
    return position, sequence, position >= jnp.diff(real)[sequence], rank, padded // mesh["cp"]


@scheme(
    reference=tables,
    inputs={"ids": "b t", "padded": "n", "real": "n"},
    outputs=(*("t/cp:packed",) * 4, "n"),
    rank_options={"validate": (True, False)},
    **{**PACKED, "draw": {**PACKED["draw"], "ids": integers(0, 9)}},
)
def tables_of_layout(mesh, ids, padded, real, validate) -> Tables:
    """A layout copies its offsets: later writes into the caller's tensor do not change it."""
    offsets = padded.clone().int(), real.clone().int()
    sizes = dict(cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
    layout = TokenLayout.packed(*offsets, total=ids.shape[1], validate=validate, **sizes)
    for each in offsets:
        each.fill_(0)
    ranks = torch.tensor([int(rank) for rank in layout.draw().replace("|", "")]).to(ids)
    assert layout.local_cu.dtype == torch.int32  # attention's kernels take offsets of this dtype
    by_token = layout.position_ids, layout.sequence_ids, layout.padding_mask, ranks
    return *(layout.shard(x, 0) for x in by_token), layout.local_cu.to(ids)


def prefixes(generator, shape):
    """For each sequence an earlier one that it continues, or -1 for none."""
    return np.array([generator.integers(-1, j) if generator.random() < 0.7 else -1 for j in range(shape[0])])


def tables_of(owner):
    """The tables of a stream whose position g is on rank `owner(g, size, ranks)`, across the ends of sequences."""

    def of_stream(ids, padded, real, prefix_of, mesh) -> tuple[Array, ...]:
        size, ranks, lengths = ids.shape[1], mesh["cp"], jnp.diff(real)
        g = jnp.arange(size)
        sequence = (padded[1:][None, :] <= g[:, None]).sum(1)
        before = jnp.zeros_like(lengths)  # a prefix comes earlier, so its own tokens before are known
        for j in range(1, len(lengths)):
            k = prefix_of[j]
            before = before.at[j].set(jnp.where(k < 0, 0, before[k] + lengths[k]))
        position = g - padded[sequence]
        is_here = owner(g, size, ranks)[None, :] == jnp.arange(ranks)[:, None]
        of_rank = is_here[:, None, :] & (sequence[None, None, :] < jnp.arange(len(padded))[None, :, None])
        return position + before[sequence], sequence, position >= lengths[sequence], of_rank.sum(2), ids[0]

    return of_stream


OF_STREAM = dict(
    inputs={"ids": "b t", "padded": "n", "real": "n", "prefix_of": "m"},
    rank_options={"is_rebound": (False, True), "fill": (0, 2)},
    mesh={"cp": (1, 2, 4)},
    dims={**PACKED["dims"], "m": "n-1", "r": "cp"},
    draw={**PACKED["draw"], "ids": integers(0, 9), "prefix_of": drawn(prefixes, integer=True)},
)
StreamTables = tuple[Row, Row, Bool[Tensor, " t"], Int[Tensor, "r n"], Row]


def computed_tables(mesh, ids, padded, real, prefix_of, is_rebound, fill, kind):
    """The tables of this rank's layout; or of a single rank's layout, bound to this rank."""
    place = dict(cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
    built = dict(cp_size=1, cp_rank=0) if is_rebound else place
    offsets = with_fill(padded, fill), with_fill(real, fill)
    layout = TokenLayout.packed(*offsets, kind=kind, prefix_of=prefix_of, **built)
    layout = layout.rebind(**place) if is_rebound else layout
    by_token = (layout.shard(x, 0) for x in (layout.position_ids, layout.sequence_ids, layout.padding_mask))
    return *by_token, layout.local_cu.to(ids)[None], layout.unshard(layout.shard(ids[0], 0), 0, mesh["cp"])


@scheme(
    reference=tables_of(lambda g, size, ranks: g * ranks // size), outputs=(*["t/cp"] * 3, "r/cp n", "t"), **OF_STREAM
)
def tables_of_contiguous_stream(mesh, ids, padded, real, prefix_of: Int[Tensor, "m"], is_rebound, fill) -> StreamTables:
    return computed_tables(mesh, ids, padded, real, prefix_of, is_rebound, fill, "contiguous")


@scheme(
    reference=tables_of(lambda g, size, ranks: g % ranks), outputs=(*["t/cp:striped"] * 3, "r/cp n", "t"), **OF_STREAM
)
def tables_of_stripes(mesh, ids, padded, real, prefix_of: Int[Tensor, "m"], is_rebound, fill) -> StreamTables:
    return computed_tables(mesh, ids, padded, real, prefix_of, is_rebound, fill, "striped")


def up_to_the_last_token(x, padded, real):
    """The ids up to the last real token, and 0 after it."""
    lengths = jnp.diff(real)
    last = jnp.where(lengths > 0, padded[:-1] + lengths, 0).max()
    return jnp.where(jnp.arange(x.shape[1])[:, None] < last, x, 0)


@scheme(
    reference=up_to_the_last_token,
    inputs={"x": "b t/cp:packed d", "padded": "n", "real": "n"},
    outputs="b t d cp=R",
    dtypes=DTYPES,
    sums="float32",
    cost=gather_cost("R"),
    rank_options={"fill": (0, 1, 3), "validate": (True, False)},
    **PACKED,
)
def trimmed_by_layout(mesh, x, padded, real, fill, validate):
    """Trimmed, then filled up to a common size."""
    total = mesh.total("t")
    trimmed = packed_layout(mesh, padded, real, fill=fill, total=total, validate=validate).unshard(
        x, 1, mesh["cp"], trim=True
    )
    return torch.nn.functional.pad(trimmed, (0, 0, 0, total - trimmed.shape[1]))


DENSE = ("contiguous", "striped", "dual_chunk_swap")


def steep_lengths(size, n):
    """Later ranks have more; the first may have no position."""
    ends = [size * i * i // (n * n) for i in range(n + 1)]
    return [stop - start for start, stop in pairwise(ends)]


def in_blocks_of(lengths):
    """The layout of a rule for lengths."""
    return lambda size, n: np.split(np.arange(size), np.cumsum(lengths(size, n))[:-1])


def in_all_orders(x, y):
    """The last three positions of x are padding, and each layout knows that."""
    real = jnp.where(jnp.arange(len(x)) < len(x) - 3, x, 0)
    return (*[real] * len(DENSE), *[x] * len(DENSE), *[y] * 4)


@scheme(
    reference=in_all_orders,
    mesh={"cp": (1, 2, 3, 4)},
    inputs={"x": "s", "y": "r"},
    outputs=(*["s/cp", "s/cp:striped", "s/cp:dual_chunk_swap"] * 2, *["r/cp:steep", "r/cp:ceil"] * 2),
    dims={"s": (24, 48), "r": (7, 5, 1)},
    layouts={"steep": in_blocks_of(steep_lengths), "ceil": in_blocks_of(ceil_lengths)},
    draw=dict.fromkeys("xy", integers(0, 99)),
    rank_options={"is_rebound": (False, True)},
)
def sharded_by_dense_layouts(mesh, x, y, is_rebound) -> tuple[Row, Row, Row, Row, Row, Row, Row, Row, Row, Row]:
    """By a layout, bound from a single rank's or not, and by the positions of this rank."""
    n, rank = mesh.size("cp"), mesh.rank("cp")
    ranks, counts = dict(cp_size=n, cp_rank=rank, device=x.device), steep_lengths(len(y), n)
    first = ranks | {"cp_size": 1, "cp_rank": 0} if is_rebound else ranks
    layouts = [TokenLayout.dense(kind, len(x), real_length=len(x) - 3, **first).rebind(n, rank) for kind in DENSE]
    shards = [layout.shard(x.masked_fill(layout.padding_mask, 0), 0) for layout in layouts]
    shards += [x[layout(len(x), n)[rank]] for layout in (contiguous, striped, dual_chunk_swap)]
    shards += [TokenLayout.dense("ragged", len(y), counts=lengths, **ranks).shard(y, 0) for lengths in (counts, None)]
    return *shards, y[ragged(len(y), n, counts)[rank]], y[ragged(len(y), n)[rank]]


SCHEMES = (
    sharded_by_layout,
    gathered_by_layout,
    gathered_by_layout_with_one_gradient,
    trimmed_by_layout,
    tables_of_layout,
    tables_of_contiguous_stream,
    tables_of_stripes,
    sharded_by_dense_layouts,
)
test_parity = parity(SCHEMES, lockstep=15, gloo=3)


def on_ranks(cp, body):
    return run(body, CaseSpec(scheme="layouts", mesh={"cp": cp})).results


@pytest.mark.parametrize(
    ("kind", "length"), [("contiguous", 9), ("striped", 9), ("ragged", 7), ("dual_chunk_swap", 12)]
)
@pytest.mark.parametrize("gradient", ["R", "I"])
def test_dense_comes_back_bitwise_with_its_gradient(kind, length, gradient):
    def body(mesh, case):
        rank, real = mesh.rank("cp"), length - 2
        layout = TokenLayout.dense(kind, length, cp_size=3, cp_rank=rank, real_length=real)
        x = torch.arange(2.0 * length).view(2, length)
        local = layout.shard(x, 1).requires_grad_()
        back = layout.unshard(local, 1, mesh["cp"], gradient=gradient)
        back.backward(x if gradient == "I" else x * (rank + 1))
        trimmed = layout.unshard(local, -1, mesh["cp"], trim=True)
        times = 6 if gradient == "R" else 1  # 1 + 2 + 3
        return (
            torch.equal(back, x),
            torch.equal(trimmed, x[:, :real]),
            torch.equal(local.grad, times * layout.shard(x, 1)),
        )

    assert on_ranks(3, body) == ((True, True, True),) * 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_any_dtype_comes_back(dtype):
    def body(mesh, case):
        layout = packed_layout(mesh, torch.tensor([0, 4, 4, 12]), torch.tensor([0, 3, 3, 6]))
        x = torch.arange(12).to(dtype)
        back = layout.unshard(layout.shard(x, 0), 0, mesh["cp"], trim=True)
        return torch.equal(back, x[:7])  # up to the last real token

    assert on_ranks(2, body) == (True, True)


def test_another_group_and_another_device():
    layout = TokenLayout.packed([0, 8, 24], [0, 5, 16], cp_size=2, cp_rank=1)
    again = layout.rebind(4, 3)
    assert rank_positions(again) == [piece.tolist() for piece in REFERENCES["packed"](24, 4, [0, 8, 24])]
    assert (again.cp_rank, again.cu_real.tolist()) == (3, [0, 5, 16])
    dense = TokenLayout.dense("dual_chunk_swap", 8, cp_size=2, cp_rank=0, real_length=6).rebind(4, 1)
    assert (dense.draw(), dense.original_length) == ("01233210", 6)
    assert TokenLayout.dense("ragged", 7, cp_size=2, cp_rank=0).rebind(3, 2).draw() == "0001112"
    assert layout.on("meta").index.is_meta


def test_layouts_without_reordering_are_marked():
    assert TokenLayout.dense("contiguous", 8, cp_size=2, cp_rank=0).is_identity
    assert TokenLayout.packed([0, 3, 5], cp_size=1, cp_rank=0).is_identity
    assert not TokenLayout.dense("striped", 8, cp_size=2, cp_rank=0).is_identity


@pytest.mark.parametrize("kind", ["contiguous", "dual_chunk_swap", "ragged", "striped", "packed"])
def test_a_layout_made_in_inference_serves_training(kind):
    """With everything that is derived from it; rows that layouts share are saved for backward."""

    def body(mesh, case):
        sizes = dict(cp_size=2, cp_rank=mesh.rank("cp"))
        with torch.inference_mode():
            offsets = torch.tensor([0, 4, 8])
            layout = TokenLayout.packed(offsets, **sizes) if kind == "packed" else TokenLayout.dense(kind, 8, **sizes)
            layouts = layout, layout.on("cpu"), layout.rebind(2, mesh.rank("cp"))
            for one in layouts:
                assert len(one.inverse) == len(one.padding_mask) == 8 and len(one.local_index) == one.local_cu[-1]
        x = torch.arange(8.0, requires_grad=True)
        for one in layouts:
            full = one.unshard(one.shard(x, 0), 0, mesh["cp"], gradient="I")
            (full.masked_fill(one.padding_mask, 0.0) * one.position_ids).sum().backward()
            if any(value.is_inference() for value in vars(one).values() if isinstance(value, torch.Tensor)):
                return None
        return x.grad.tolist()

    places = torch.tensor([0, 1, 2, 3] * 2 if kind == "packed" else range(8))
    total = sum(torch.tensor(gradient) for gradient in on_ranks(2, body))
    assert total.tolist() == (3 * places).tolist()  # of three layouts
