"""Parity of attention over sequences that share a prefix: pairs that meet, keys that are sent, values and gradients."""

import doctest

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float, Int
from torch import Tensor

from jax_ref.context_parallel import continued_attention, continued_positions
from jax_ref.layouts import contiguous
from jax_ref.layouts import packed as packed_reference
from parity_tests.context_parallel.attention_schemes import (
    DTYPES,
    HEADS,
    ROUNDINGS,
    cost_over_two_axes,
    exchange_cost,
)
from parity_tests.context_parallel.seen_pairs import times_seen
from parity_tests.parity import parity
from shardproof import integers, scheme
from shardproof.cost.attention import needed_keys, visible_pairs
from shardproof.draw.profiles import few
from torch_impl import context_parallel as cp
from torch_impl.context_parallel import block_schedule, context_parallel_attention
from torch_impl.context_parallel.needed_keys import needed_rows
from torch_impl.layouts import TokenLayout, prefixes

N = 4
PADDED, REAL = [0, 16, 24, 40, 48], [0, 13, 21, 32, 37]
TREES = {"responses": (-1, 0, 0, 0), "turns": (-1, 0, 1, -1)}
FILL = -1000
LONG = 22  # a window that hides no key of any sequence, and some of a prefix
# The same sequences as a batch, in one row or two: by entries of the row, before an entry of fill is put among them.
ROWS = {"responses": [[-1, 0, 0, 0]], "turns": [[-1, 0, 1, -1]], "rows": [[-1, 0], [-1, 0]]}
FILL_BEFORE = {"none": 4, "the second": 1, "the first": 0}  # the entry of each row that stands behind the fill


@st.composite
def trees(draw):
    """Documents that fill a stream of a multiple of 2 * N, some of them empty, each of which may continue another."""
    kind = draw(st.sampled_from(["contiguous", "striped", "packed"]))
    unit = 2 * N if kind == "packed" else 1
    padded = [unit * length for length in draw(st.lists(st.integers(0, 32 // unit), min_size=1, max_size=5))]
    padded += [-sum(padded) % (2 * N)]
    real = [draw(st.integers(0, length)) for length in padded]
    prefix_of = [draw(st.integers(-1, j - 1)) for j in range(len(padded))]
    offsets, sums = (np.cumsum([0, *each]).tolist() for each in (padded, real))
    return kind, offsets, sums, prefix_of, draw(st.booleans()), draw(st.sampled_from([None, 1, 2, 5, 11, 40]))


def positions_of(kind, offsets):
    layout = TokenLayout.packed(offsets, cp_size=N, cp_rank=0, kind=kind)
    return [row.numpy() for row in layout.index]


@settings(max_examples=few(20))
@given(trees())
def test_each_pair_that_meets_does_so_once_and_its_key_is_sent(tree):
    kind, offsets, sums, prefix_of, causal, window = tree
    visible = visible_pairs(offsets[-1], causal, window, offsets, sums, prefix_of)
    counts = np.zeros_like(visible, int)
    expected = needed_keys(positions_of(kind, offsets), visible)
    for rank in range(N):
        layout = TokenLayout.packed(offsets, sums, cp_size=N, cp_rank=rank, kind=kind, prefix_of=prefix_of)
        counts += times_seen(layout, causal, window)
        needed = needed_rows(layout, causal, window).numpy()
        for source in range(N):
            assert set(layout.index[source].numpy()[needed[rank, source]]) == expected[rank][source]
    np.testing.assert_array_equal(counts, visible)


def test_pairs_of_long_runs(monkeypatch):
    """Segments of a window, over the end of a prefix and into the one before."""
    monkeypatch.setattr(block_schedule, "MAX_SEGMENT_QUERIES", 4)
    offsets, prefix_of = [0, 24, 40, 64, 80], [-1, 0, 1, 0]
    visible = visible_pairs(80, True, 30, offsets, offsets, prefix_of)
    layouts = [
        TokenLayout.packed(offsets, cp_size=2, cp_rank=rank, kind="contiguous", prefix_of=prefix_of) for rank in (0, 1)
    ]
    np.testing.assert_array_equal(sum(times_seen(layout, True, 30) for layout in layouts), visible)


def of_a_tree(q, k, v, tree, causal, window):
    return continued_attention(q, k, v, PADDED, REAL, TREES[tree], causal, window)


def turned(size, world):
    return packed_reference(size, world, PADDED)


def specs(cut):
    tensors = {"q": f"b h {cut} p", "k": f"b g {cut} p", "v": f"b g {cut} p"}
    return dict(inputs=tensors, outputs=f"b h {cut} p")


DECLARED = dict(
    reference=of_a_tree,
    dims={"b": (1,), "h": (4,), "g": (2,), "s": (PADDED[-1],), "p": (4,)},
    draw=HEADS,
    options={"tree": ("responses", "turns"), "causal": (True, False), "window": (None, 11, LONG)},
    dtypes=DTYPES,
    reduction=("s", "p"),
    roundings=ROUNDINGS,
)
EXCHANGES = {"exchange": ("ring", "all_gather", "ulysses")}


def cost_of(layout):
    return lambda c: exchange_cost(c, layout(c.s, c.cp), (c.causal, c.window), PADDED, REAL, TREES[c.tree])


def layout_of(tree, kind, cp_size, cp_rank):
    return TokenLayout.packed(PADDED, REAL, cp_size=cp_size, cp_rank=cp_rank, kind=kind, prefix_of=TREES[tree])


@scheme(
    contract=context_parallel_attention,
    **specs("s/cp:turned"),
    mesh={"cp": (1, 2, 4)},
    layouts={"turned": turned},
    rank_options=EXCHANGES,
    cost=cost_of(turned),
    **DECLARED,
)
@pytest.mark.cases(3, engine="gloo")
def attention_over_shared_prefixes(mesh, q, k, v, tree, causal, window, exchange):
    layout = layout_of(tree, "packed", mesh.size("cp"), mesh.rank("cp"))
    call = dict(exchange=exchange, causal=causal, window=window)
    return context_parallel_attention(q, k, v, group=mesh["cp"], layout=layout, **call)


@scheme(
    contract=context_parallel_attention,
    **specs("s/cp"),
    mesh={"cp": (1, 2, 4, 8)},
    rank_options=EXCHANGES,
    cost=cost_of(contiguous),
    **DECLARED | {"dims": {**DECLARED["dims"], "h": (8,)}},
)
def attention_over_shared_prefixes_in_order(mesh, q, k, v, tree, causal, window, exchange):
    layout = layout_of(tree, "contiguous", mesh.size("cp"), mesh.rank("cp"))
    call = dict(exchange=exchange, causal=causal, window=window)
    return context_parallel_attention(q, k, v, group=mesh["cp"], layout=layout, **call)


def usp_cost(c):
    visible = visible_pairs(c.s, c.causal, c.window, PADDED, REAL, TREES[c.tree])
    return cost_over_two_axes(c, contiguous(c.s, c.ring), visible)


@scheme(
    contract=context_parallel_attention,
    **specs("s/ring/heads"),
    mesh={"ring": (1, 2), "heads": (1, 2)},
    cost=usp_cost,
    **DECLARED,
)
def attention_over_shared_prefixes_on_two_axes(mesh, q, k, v, tree, causal, window):
    a, rank = mesh.size("heads"), mesh.rank("ring") * mesh.size("heads") + mesh.rank("heads")
    layout = layout_of(tree, "contiguous", mesh.size("ring") * a, rank)
    call = dict(exchange="usp", causal=causal, window=window)
    return context_parallel_attention(q, k, v, mesh=mesh.device_mesh, layout=layout, **call)


def packed_rows(ids, tree, fill_before):
    """The batch of a tree, whose ids are the stream."""
    parents, behind = torch.tensor(ROWS[tree]), FILL_BEFORE[fill_before]
    real, padded = (torch.tensor(x).diff().view(len(parents), -1) for x in (REAL, PADDED))
    tables = {"seq_lens": real, "seq_lens_padded": padded, "prefix_of": parents + (parents >= behind)}
    fill = parents.new_full((len(parents), 1), FILL)
    filled = {name: torch.cat([x[:, :behind], fill, x[:, behind:]], 1) for name, x in tables.items()}
    return {"input_ids": ids.view(len(parents), -1), **filled}


def of_packed_rows(q, k, v, ids, tree, causal, window):
    prefix_of = {**TREES, "rows": (-1, 0, -1, 2)}[tree]
    out = continued_attention(q, k, v, PADDED, REAL, prefix_of, causal, window)
    return out, ids, jnp.asarray(continued_positions(PADDED, REAL, prefix_of), ids.dtype)


OfRows = tuple[Float[Tensor, "b h l p"], Int[Tensor, " l"], Int[Tensor, " l"]]
BATCHES = {**specs("s/cp:turned"), **DECLARED}
BATCHES["inputs"] = {**BATCHES["inputs"], "ids": "s"}
BATCHES["outputs"] = (BATCHES["outputs"], "s/cp:turned", "s/cp:turned")


def share_of_each_chunk(batch, mesh):
    """This rank's shares of the chunks, one stream for each row, one after the other; and the layout of all rows."""
    stacked, layout = cp.split_batch_into_thd_chunks(batch, len(batch["input_ids"]), return_layout=True)
    is_one = layout.chunks == 1
    chunks = [stacked] if is_one else [{name: x[i] for name, x in stacked.items()} for i in range(layout.chunks)]
    cp_mesh = mesh.device_mesh["cp"]
    shares = [cp._shard_thd_chunk_for_te(chunk, cp_mesh, "thd", FILL, 0, return_layout=True)[0] for chunk in chunks]
    out = {name: torch.cat([share[name] for share in shares]) for name in ("input_ids", "position_ids")}
    return out, layout.tokens.rebind(mesh.size("cp"), mesh.rank("cp"))


def share_by(route, batch, mesh):
    """This rank's share of the batch, and the layout of its tokens."""
    cp_mesh = mesh.device_mesh["cp"]
    if route == "each chunk":
        return share_of_each_chunk(batch, mesh)
    if route == "stream":
        stream, _ = cp.process_input_for_thd(batch, return_layout=True)
        out, layout = cp._shard_thd_chunk_for_te(stream, cp_mesh, "thd", FILL, 0, return_layout=True)
    elif route == "context":
        _, out, layout = cp.make_cp_batch_and_ctx(mesh.device_mesh, batch, use_te=True, return_layout=True)
    else:
        chunks = len(batch["input_ids"]) if route == "chunks" else 1
        out, layout = cp.make_cp_batch_for_te(cp_mesh, batch, num_chunks=chunks, return_layout=True)
    return out, layout.tokens


@scheme(
    mesh={"cp": (1, 2, 4)},
    layouts={"turned": turned},
    **{
        **BATCHES,
        "reference": of_packed_rows,
        "draw": {**HEADS, "ids": integers(0, 9)},
        "options": {**DECLARED["options"], "tree": tuple(ROWS)},
    },
    rank_options={"route": ("batch", "stream", "chunks", "each chunk", "context"), "fill_before": tuple(FILL_BEFORE)},
)
def attention_of_packed_rows_with_prefixes(mesh, q, k, v, ids, tree, causal, window, route, fill_before) -> OfRows:
    """Packed rows with prefixes, sharded by each route: at once, in chunks, by streams made first, in a context."""
    out, layout = share_by(route, packed_rows(ids, tree, fill_before), mesh)
    y = context_parallel_attention(q, k, v, group=mesh["cp"], layout=layout, causal=causal, window=window)
    return y, out["input_ids"].flatten(), out["position_ids"].flatten()


SCHEMES = (
    attention_over_shared_prefixes,
    attention_of_packed_rows_with_prefixes,
    attention_over_shared_prefixes_in_order,
    attention_over_shared_prefixes_on_two_axes,
)
test_parity = parity(SCHEMES, lockstep=15)


def test_positions_count_on_from_the_prefix():
    layout = TokenLayout.packed([0, 4, 8, 12], [0, 3, 5, 8], cp_size=2, cp_rank=0, prefix_of=[-1, 0, 1])
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 5, 6, 7, 8]
    assert layout.padding_mask.tolist() == [False] * 3 + [True] + [False] * 2 + [True] * 2 + [False] * 3 + [True]
    again = layout.rebind(1, 0)
    assert again.prefix_of == (-1, 0, 1) and again.position_ids.tolist() == layout.position_ids.tolist()
    assert layout.on("cpu").prefix_of == (-1, 0, 1)


@pytest.mark.parametrize(
    ("prefix_of", "kind", "message"),
    [
        ([-1, 0.5], TypeError, "prefix_of=[-1, 0.5]; pass the number of a sequence for each, or -1 for none"),
        (0, TypeError, "prefix_of=0; pass the number of a sequence for each, or -1 for none"),
        ([-1], ValueError, "prefix_of: 1 entries for 2 sequences; give one for each, -1 for none"),
        ([-1, 1], ValueError, "prefix_of: sequence 1 continues 1; pass an earlier sequence, or -1 for none"),
        ([-2, 0], ValueError, "prefix_of: sequence 0 continues -2; pass an earlier sequence, or -1 for none"),
    ],
)
def test_rejections(prefix_of, kind, message):
    with pytest.raises(kind) as caught:
        TokenLayout.packed([0, 4, 8], cp_size=2, cp_rank=0, prefix_of=prefix_of)
    assert str(caught.value) == message


def test_the_table_of_a_batch_matches_its_streams():
    """By the numbers of sequences in the stream, or in each chunk; in the rows fill may stand anywhere."""
    lengths = torch.tensor([[4, FILL, 4], [2, 4, 2], [8, FILL, FILL], [FILL, 4, 4]])
    prefix_of = torch.tensor([[-1, 5, 0], [-1, 0, 1], [-1, 3, 3], [7, -1, 1]])
    batch = {"input_ids": torch.zeros(4, 8), "seq_lens": lengths, "seq_lens_padded": lengths, "prefix_of": prefix_of}
    stream, layout = cp.process_input_for_thd(batch, return_layout=True)
    assert stream["prefix_of"].tolist() == [-1, 0, -1, 2, 3, -1, -1, 6] == list(layout.tokens.prefix_of)
    chunks, same = cp.split_batch_into_thd_chunks(batch, 2, return_layout=True)
    assert chunks["prefix_of"].tolist() == [[-1, 0, -1, 2, 3], [-1, -1, 1, FILL, FILL]]
    assert same.tokens.prefix_of == layout.tokens.prefix_of
    chunk = {name: x[1] for name, x in chunks.items()}
    of_chunk, alone = cp._shard_thd_chunk_for_te(chunk, None, "thd", FILL, 0, return_layout=True)
    assert of_chunk["prefix_of"].tolist() == [-1, -1, 1] == list(alone.tokens.prefix_of)
    assert of_chunk["position_ids"].tolist() == [*range(8), *range(8)]
    plain, _ = cp.process_input_for_thd({k: x for k, x in batch.items() if k != "prefix_of"}, return_layout=True)
    assert "prefix_of" not in plain


def a_batch(**changed):
    lengths = torch.tensor([[4, 4]])
    tables = {"seq_lens": lengths, "seq_lens_padded": lengths, "prefix_of": torch.tensor([[-1, 0]])}
    return {"input_ids": torch.arange(8)[None], **tables, **changed}


THD = "context_parallel.thd: "
WITHOUT_LAYOUT = (
    "batch has 'prefix_of', which offsets cannot express; pass return_layout=True and give attention the layout's "
    "tokens"
)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: cp.process_input_for_thd(a_batch()), ValueError, THD + WITHOUT_LAYOUT),
        (lambda: cp.split_batch_into_thd_chunks(a_batch(), 1), ValueError, THD + WITHOUT_LAYOUT),
        (lambda: cp.make_cp_batch_for_te(None, a_batch()), ValueError, "context_parallel.te: " + WITHOUT_LAYOUT),
        (
            lambda: cp._shard_thd_chunk_for_te(
                cp.process_input_for_thd(a_batch(), return_layout=True)[0], None, "thd", FILL, 0
            ),
            ValueError,
            "context_parallel.te: " + WITHOUT_LAYOUT,
        ),
        (
            lambda: cp.make_cp_batch_and_ctx(None, a_batch(), use_te=True),
            ValueError,
            "context_parallel.batch: " + WITHOUT_LAYOUT,
        ),
        (
            lambda: cp.make_cp_batch_and_ctx(None, a_batch()),
            ValueError,
            "context_parallel.batch: batch has 'prefix_of', and a dense row is one sequence; pass use_te=True",
        ),
        (
            lambda: cp.process_input_for_thd(a_batch(prefix_of=[[-1, 0]]), return_layout=True),
            TypeError,
            THD + "prefix_of is a list; pass a Tensor",
        ),
        (
            lambda: cp.process_input_for_thd(a_batch(prefix_of=torch.ones(1, 2)), return_layout=True),
            TypeError,
            THD + "prefix_of is float32; it has numbers of sequences, or -1",
        ),
        (
            lambda: cp.process_input_for_thd(a_batch(prefix_of=torch.tensor([[-1]])), return_layout=True),
            ValueError,
            THD + "prefix_of is [1, 1], seq_lens is [1, 2]; give one for each sequence, -1 for none",
        ),
        (
            lambda: cp.process_input_for_thd(a_batch(prefix_of=torch.tensor([[-1, 1]])), return_layout=True),
            ValueError,
            THD + "prefix_of: row 0: sequence 1 continues 1; pass an earlier sequence of the row, or -1 for none",
        ),
    ],
)
def test_batches_that_are_rejected(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_the_docstrings_example():
    assert doctest.testmod(prefixes) == (0, 1)
