"""Parity of packed rows as one stream and in chunks, with every kind of entry."""

import jax.numpy as jnp
import pytest
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jax_ref.context_parallel import tables
from shardproof import Cost, integers, lengths, scheme
from torch_impl import context_parallel as cp

KINDS, DEFAULT_FILL = 2, -1000
POSITIONS = ("none", "one kind", "kinds")
Lengths = Int[Tensor, " n"]
Streams = tuple[
    Float[Tensor, "b t d"],
    Int[Tensor, "b t"],
    Int[Tensor, "k b t"],
    Bool[Tensor, "b t"],
    Float[Tensor, "b e"],
    Lengths,
    Lengths,
    Int[Tensor, " b"],
    Int[Tensor, " b"],
]


def row_slots(padded, real, b, t):
    """Row 0 is one sequence with one padding token; row r has the slots of `padded` and `real`, rolled by r places."""
    return [([t], [t - 1]), *((jnp.roll(padded, r), jnp.roll(real, r)) for r in range(1, b))]


def stream_by_hand(x, ids, kinds, scores, padded, real, num_chunks, positions):
    b, t = ids.shape
    rows = [tuple(jnp.asarray(each, padded.dtype) for each in row) for row in row_slots(padded, real, b, t)]
    places, masks = zip(*(tables(t, *row) for row in rows), strict=True)
    place = jnp.stack(places).astype(ids.dtype)
    by_position = {"none": jnp.stack(KINDS * [place]), "one kind": jnp.stack(KINDS * [kinds[0]]), "kinds": kinds}
    slots, lengths_ = (jnp.concatenate(each) for each in zip(*rows, strict=True))
    # For each chunk: the longest slot, and how many offsets fewer it has than the fullest chunk.
    each, counts = b // num_chunks, [len(row[0]) for row in rows]
    longest = [jnp.stack([row[0].max() for row in rows[c * each : c * each + each]]).max() for c in range(num_chunks)]
    sums = [sum(counts[c * each : c * each + each]) for c in range(num_chunks)]
    by_chunk = (longest, [max(sums) - count for count in sums])
    by_row = (jnp.repeat(jnp.stack([jnp.asarray(x, ids.dtype) for x in of]), each) for of in by_chunk)
    return x, ids, by_position[positions], jnp.stack(masks), scores, lengths_, slots, *by_row


def given_rows(padded, real, b, t, tail, fill):
    """The two tables; with `tail` the last slot of a row is as short as it may be."""
    tables_ = torch.full((2, b, 1 + len(padded)), fill)
    tables_[:, 0, 0] = torch.tensor([t - 1, t])
    for r in range(1, b):
        tables_[:, r, :-1] = torch.stack([real, padded]).roll(r, 1)
    last = [0, *(b - 1) * [len(padded) - 1]]
    if tail:
        tables_[1, range(b), last] = tables_[0, range(b), last]
    return {"seq_lens": tables_[0], "seq_lens_padded": tables_[1]}


def lengths_and_fills(table, m, fill):
    """The lengths of the sequences in all chunks, and the number of fill entries of each chunk."""
    chunks = table if m > 1 else table[None]
    assert chunks.dtype == torch.int32 and bool(((chunks >= 0) | (chunks == fill)).all())
    return torch.cat([chunk[chunk >= 0].long().diff() for chunk in chunks]), (chunks < 0).sum(1)


@scheme(
    reference=stream_by_hand,
    mesh={"cp": (1,)},
    inputs={
        "x": "b t d cp=R",
        "ids": "b t/cp:packed",
        "kinds": "k b t",
        "scores": "b e cp=R",
        "padded": "q",
        "real": "q",
    },
    outputs=("b t d cp=R", "b t", "k b t", "b t", "b e cp=R", "n", "n", "b", "b"),
    dims={"b": (4,), "q": (3, 2), "t": (24, 16), "d": (2,), "e": (3,), "k": (KINDS,), "n": "b*q-q+1"},
    draw={"ids": integers(0, 99), "kinds": integers(0, 9), "padded": lengths("t", padded=True), "real": lengths("t")},
    options={"num_chunks": (1, 2, 4), "positions": POSITIONS},
    rank_options={"tail": (True, False), "fill": (None, -7), "return_layout": (None, True)},
    dtypes=("float32", "float64"),
    cost=lambda c: Cost(),
)
@pytest.mark.cases(20)
def streams_of_rows(
    mesh, x, ids, kinds, scores, padded, real, num_chunks, positions, tail, fill, return_layout
) -> Streams:
    """With None an argument is left out."""
    (b, t), m = ids.shape, num_chunks
    batch = {"input_ids": ids, "labels": None, "features": x, "scores": scores, "name": "any"}
    batch |= {"none": {}, "one kind": {"position_ids": kinds[0]}, "kinds": {"position_ids": kinds}}[positions]
    batch |= given_rows(padded, real, b, t, tail, fill or DEFAULT_FILL)
    settings = {"seq_lens_padding_value": fill, "return_layout": return_layout}
    settings = {name: value for name, value in settings.items() if value is not None}
    split = cp.split_batch_into_thd_chunks
    made = split(batch, m, **settings) if m > 1 else cp.process_input_for_thd(batch, **settings)
    out = made[0] if return_layout else made
    assert out["name"] == "any" and out["labels"] is None

    def as_rows(entry):
        if return_layout:
            return made[1].gather(entry)
        return (entry.flatten(0, 1) if m > 1 else entry).unflatten(0, (b, t))

    places = out["position_ids"]
    if positions == "kinds":  # k 1 b*t, or m k 1 t of chunks
        streams = places.movedim(0, 2).flatten(2) if m > 1 else places
        places = streams.view(KINDS, b, t)
    else:
        places = as_rows(places).expand(KINDS, b, t)
    (lengths_, fills), (slots, _) = (
        lengths_and_fills(out[name], m, fill or DEFAULT_FILL) for name in ("cu_seqlens", "cu_seqlens_padded")
    )
    by_row = (each.long().repeat_interleave(b // m) for each in (out["max_seqlen"].view(m), fills))
    scores = out["scores"].flatten(0, 1) if m > 1 else out["scores"]
    tokens = as_rows(out["features"]), as_rows(out["input_ids"]), places, as_rows(out["padding_mask"])
    return tuple(each.clone() for each in (*tokens, scores, lengths_, slots, *by_row))  # the stream is of views
