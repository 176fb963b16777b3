"""Attention over full sequences with dense scores and a mask, and the batches that cp shards.

    out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j]   over the keys j that query i sees

With a softcap c the logits x become c * tanh(x / c). A sink is an extra logit in each softmax, with value 0.

Query i sees key j if both are real tokens of the same sequence, and their positions in it satisfy the causal and window
rules. Query head i uses KV head i * hk // h. The output of padding, and of a query that sees no key, is 0.

In a batch of packed rows, row b has sequence j in a slot of `seq_lens_padded[b][j]` tokens, and `seq_lens[b][j]` of
them are real; lengths equal to `fill` are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Queries = Float[Array, "b h s p"]
Keys = Float[Array, "b hk s p"]
Rows = Sequence[Sequence[int]]
ByToken = Int[Array, "b t"]
Lengths = Int[Array, "b q"]


def attention(
    q: Queries,
    k: Keys,
    v: Keys,
    seen: Bool[Array, "s s"],
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
) -> Float[Array, "b h s p"]:
    """Attention with the mask `seen[i, j]`: query i sees key j. `sinks` has a logit per head for a key with value 0."""
    # 1. A KV head for each query head: consecutive query heads share a KV head.
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    # 2. All scores, then the softmax over the seen keys.
    scores = jnp.einsum("bhip,bhjp->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    # A large negative number, since a row of -inf would give NaN; queries without keys get zeros below.
    logits = jnp.where(seen, scores, -1e30)
    if sinks is not None:
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))], -1)
    weights = jax.nn.softmax(logits)[..., : k.shape[2]]
    return jnp.einsum("bhij,bhjp->bhip", jnp.where(seen, weights, 0.0), v)


def seen_pairs(
    sequence: Int[Array, " s"],
    position: Int[Array, " s"],
    is_real: Bool[Array, " s"],
    causal: bool = True,
    window: int | None = None,
) -> Bool[Array, "s s"]:
    """seen[i, j]: whether query i sees key j, from every token's sequence and its position in the sequence."""
    ahead = position[:, None] - position[None, :]
    seen = (sequence[:, None] == sequence[None, :]) & is_real[:, None] & is_real[None, :]
    # Without the causal rule a window reaches in both directions.
    seen &= (ahead >= 0) | jnp.logical_not(causal)
    return seen if window is None else seen & (abs(ahead) < window)


def packed_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    padded: Int[Array, " n"],
    real: Int[Array, " n"],
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "b h s p"]:
    """Attention in a packed stream: sequence j is at `padded[j]:padded[j + 1]`.

    Its first `real[j + 1] - real[j]` tokens are real, the others padding.
    """
    token = jnp.arange(q.shape[2])
    sequence = (token[:, None] >= padded[None, 1:]).sum(1)
    position = token - padded[sequence]
    return attention(
        q, k, v, seen_pairs(sequence, position, position < jnp.diff(real)[sequence], causal, window), scale
    )


def continued_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    padded: Sequence[int],
    real: Sequence[int],
    prefix_of: Sequence[int],
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "b h s p"]:
    """Attention for each packed sequence separately, after its prefix `prefix_of[j]` and that sequence's prefixes."""
    out = jnp.zeros_like(q)
    for j in range(len(prefix_of)):
        # 1. The chain of prefixes of sequence j, back to a sequence without a prefix.
        path = [j]
        while prefix_of[path[0]] >= 0:
            path.insert(0, prefix_of[path[0]])
        # 2. Attention over their real tokens as one sequence; take the rows of sequence j.
        runs = [jnp.arange(padded[i], padded[i] + real[i + 1] - real[i]) for i in path]
        tokens, own = jnp.concatenate(runs), len(runs[-1])
        if own:
            alone = dense_attention(q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], causal, window, scale)
            out = out.at[:, :, tokens[-own:]].set(alone[:, :, -own:])
    return out


def continued_positions(padded: Sequence[int], real: Sequence[int], prefix_of: Sequence[int]) -> list[int]:
    """Position of each token in its sequence, counted on from the real tokens of the sequence's prefixes.

    >>> continued_positions([0, 3, 5], [0, 2, 4], [-1, 0])
    [0, 1, 2, 2, 3]
    """
    before: list[int] = []
    for parent in prefix_of:
        before.append(before[parent] + real[parent + 1] - real[parent] if parent >= 0 else 0)
    return [before[j] + place for j in range(len(before)) for place in range(padded[j + 1] - padded[j])]


def dense_attention(
    q: Queries, k: Keys, v: Keys, causal: bool = True, window: int | None = None, scale: float | None = None
) -> Float[Array, "b h s p"]:
    """Attention with all tokens in one sequence."""
    token = jnp.arange(q.shape[2])
    return attention(q, k, v, seen_pairs(0 * token, token, token >= 0, causal, window), scale)


def layer_with_cross_attention(x: Queries, states: Keys, window: int | None = None) -> Queries:
    """Causal self-attention of x, then attention to all `states`, each with a residual connection."""
    x = x + dense_attention(x, x, x, True, window)
    return x + attention(x, states, states, jnp.ones((x.shape[2], states.shape[2]), bool))


def slots(size: int, seq_lens: Rows, seq_lens_padded: Rows, fill: int) -> list[tuple[int, int]]:
    """(real, padded) length of each sequence; the rest of each row of `size` tokens is padding of its last slot.

    >>> slots(8, [[3, 2], [8, -1]], [[4, 2], [8, -1]], -1)
    [(3, 4), (2, 4), (8, 8)]
    """
    pairs = []
    for real_row, padded_row in zip(seq_lens, seq_lens_padded, strict=True):
        row = [(real, padded) for real, padded in zip(real_row, padded_row, strict=True) if real != fill]
        if row:
            # The last slot takes the rest of the row as padding.
            real, padded = row.pop()
            row.append((real, padded + size - sum(slot for _, slot in row) - padded))
        pairs += row
    return pairs


def stream(slots: Sequence[tuple[int, int]]) -> dict[str, list]:
    """Offsets, positions and padding mask of a stream of slots, one after another.

    >>> stream([(1, 2), (3, 3)])["cu_seqlens_padded"]
    [0, 2, 5]
    """
    out: dict[str, list] = {"cu_seqlens": [0], "cu_seqlens_padded": [0], "position_ids": [], "padding_mask": []}
    for real, padded in slots:
        out["cu_seqlens"].append(out["cu_seqlens"][-1] + real)
        out["cu_seqlens_padded"].append(out["cu_seqlens_padded"][-1] + padded)
        for place in range(padded):
            out["position_ids"].append(place)
            out["padding_mask"].append(place >= real)
    return out


def tables(size: int, padded: Int[Array, " q"], real: Int[Array, " q"]) -> tuple[Int[Array, " t"], Bool[Array, " t"]]:
    """(position in its sequence, whether it is padding) for each of `size` positions.

    The sequence index of a position is the number of slots that end at or before it.
    """
    position, ends = jnp.arange(size), jnp.cumsum(padded)
    sequence = (ends[None, :] <= position[:, None]).sum(1)
    place = position - (ends - padded)[sequence]
    return place, place >= real[sequence]


def padded_batch(
    x: Float[Array, "b s d"], ids: Int[Array, "b s"], labels: Int[Array, "b s"], real: int
) -> tuple[Float[Array, "b s d"], Int[Array, "b s"], Int[Array, "b s"], Int[Array, "b s"], Bool[Array, "b s"]]:
    """Embeddings, ids, labels, positions and padding mask of a dense batch; columns from `real` on are padding.

    Padding has embedding 0, id 0 and label -100; positions are the columns; the mask is True for padding.
    """
    column = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    padding = column >= real
    return (
        jnp.where(padding[..., None], 0.0, x),
        jnp.where(padding, 0, ids),
        jnp.where(padding, -100, labels),
        column,
        padding,
    )


def packed_batch(
    x: Float[Array, "b t d"], labels: ByToken, padded: Int[Array, " q"], real: Int[Array, " q"]
) -> tuple[Float[Array, "b t d"], ByToken, ByToken, Bool[Array, "b t"], Lengths, Lengths]:
    """Embeddings, labels, positions, padding mask, real and padded lengths of a batch of rows with equal slots."""
    positions, mask = (jnp.broadcast_to(table, labels.shape) for table in tables(labels.shape[1], padded, real))
    real_lengths, slots = (jnp.broadcast_to(each, (len(labels), len(each))) for each in (real, padded))
    return x, labels, positions, mask, real_lengths, slots


def shard_and_squares(x: Float[Array, "b s d"], real: int) -> tuple[Float[Array, "b s d"], Float[Array, "b s d"]]:
    """(x with zeros from column `real` on, its squares): the batch that cp shards, and its squares, gathered again."""
    filled = jnp.where((jnp.arange(x.shape[1]) < real)[:, None], x, 0.0)
    return filled, filled**2
