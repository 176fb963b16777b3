"""The gated delta rule in chunks: matrix products inside a chunk, and a recurrence from chunk to chunk.

The values that the tokens of a chunk write solve a linear system with a lower triangular matrix. With the solution, a
chunk is a linear function of the state that enters it: its outputs, and the state that leaves it. Every decay is the
exponential of a sum of logarithms, and no difference of long sums loses digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator, all_reduce, large_tensors, no_autocast
from torch_impl.contract import Finite, Group, PositiveInt, Rejected, Sharded, contract
from torch_impl.mamba.scan import _log_decays
from torch_impl.mamba.segments import blocks_of, with_zeros
from torch_impl.mamba.state_chain import PassedStates, Runs, runs_of
from torch_impl.mamba.token_layouts import Order, shard_layout

EPS = 1e-6  # under the root of the L2 norm, as in transformers and fla


# Gradient types: V -> V, of the initial state R, of the final state I.
@contract
def gated_delta_rule(
    query: Sharded[Tensor, "b s/cp:LAYOUT hk k"],
    key: Sharded[Tensor, "b s/cp:LAYOUT hk k"],
    value: Sharded[Tensor, "b s/cp:LAYOUT h v"],
    g: Sharded[Tensor, "b s/cp:LAYOUT h ..."],
    beta: Sharded[Tensor, "b s/cp:LAYOUT h"],
    cp_group: Group[ProcessGroup, "cp"],
    *,
    layout: Order = "dual_chunk_swap",
    cu_seqlens: Int[Tensor, " offsets"] | None = None,
    initial_state: Sharded[Tensor, "n h k v cp=R"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    scale: Finite | None = None,
    chunk_size: PositiveInt = 64,
) -> tuple[Sharded[Tensor, "b s/cp:LAYOUT h v"], Sharded[Tensor, "n h k v cp=I"] | None]:
    """The gated delta rule along each sequence, whichever ranks hold it: (outputs, final states or None).

        S'[t] = exp(g[t]) S[t-1];   S[t] = S'[t] + beta[t] k[t] (v[t] - S'[t]^T k[t])^T;   out[t] = scale S[t]^T q[t]

    The state first decays. Then the token replaces a part beta of the value that it finds under its key. `g` is the
    logarithm of the decay, at most 0: one per head, or [b, s, h, k], one per channel of the key. Value head i has key
    head i * hk // h. `use_qk_l2norm` divides each query and key by its norm, the root of the sum of squares + 1e-6.
    `scale` is k ** -0.5 by default.

    `layout` is contiguous, dual_chunk_swap (inside each sequence of a packed stream), or a TokenLayout in one of these
    orders or ragged: ranks may hold fewer tokens than a chunk, or none. `cu_seqlens` are the padded offsets of the
    full stream, for a batch of one. States are [n, ...] with one entry per row, or per sequence of the stream; every
    sequence starts with 0 without `initial_state`. The gradient of initial_state is a term: the full one is the SUM
    over cp. Under tensor parallelism h and hk are the rank's own heads, h/tp and hk/tp; nothing is sent over tp.

    Outputs have value's dtype; states, and all sums, are in float32 or wider, under autocast too. Padding may hold any
    finite numbers, and takes part in the states of its own sequence.

    Cost:   forward 1 all_gather of b * r * h * k * (k + v) elements in float32 or wider, backward 1 of
            b * r * h * k * v; r is 1 for contiguous, 2 per sequence for dual_chunk_swap. Nothing depends on s. None in
            a group of one, or if no rank has a token. With output_final_state 1 all_reduce of n * h * k * v forward,
            none backward; none for 0 tokens from no states.
            Per head and chunk of c tokens c^2 (3 k + 2 v) + c k (3 v + 2 k) + k^2 (k + v) multiplications or so, and
            with a decay per channel c^2 k exponentials: then choose a chunk_size of 16. Saves the states at the border
            of each chunk and the factors of each chunk; over ranks also k^2 elements per chunk and head.
    Errors: TypeError for a cp_group that is no ProcessGroup, or an unsupported dtype; ValueError for shapes that do not
            fit, value heads that are not a multiple of key heads, offsets that do not end at n * s or with several
            rows, another layout, or an initial_state without one entry per sequence.
    Source: arXiv 2412.06464, section 3; the conventions of transformers' Qwen3-Next. Decay per channel: 2510.26692.
    """
    # 1. Check the heads, the layout and the states, as far as the contract cannot.
    if not key.shape[2] or not value.shape[2] or value.shape[2] % key.shape[2]:
        raise Rejected(f"value has {value.shape[2]} heads; they must be a positive multiple of key's {key.shape[2]}")
    if g.shape[3:] not in ((), key.shape[3:]):
        raise Rejected(f"g is {list(g.shape)}; pass one decay per head, or one per channel, [b, s, h, {key.shape[3]}]")
    tokens = shard_layout(layout, "query", query, cu_seqlens, cp_group)
    wide, b, sequences = accumulator(value.dtype), len(query), len(tokens.cu_padded) - 1
    if initial_state is not None and len(initial_state) != b * sequences:
        raise Rejected(f"initial_state has {len(initial_state)} states; pass one for each of {b * sequences} sequences")
    initial = None if initial_state is None else initial_state.to(wide).unflatten(0, (b, sequences))
    if not tokens.total:
        if not output_final_state:
            return value, None
        return value, _final_without_tokens(initial, b * sequences, key, value, cp_group)
    # 2. The chunks of this rank's runs, each as a function of the state that enters it.
    runs = runs_of(tokens, chunk_size, query.device)
    factor = max(query.shape[3], 1) ** -0.5 if scale is None else scale
    with no_autocast(query.device):
        chunks = chunk_functions(*_in_chunks(query, key, value, g, beta, runs, factor, use_qk_l2norm))
        # 3. The states that enter them, over all ranks. 4. The outputs.
        entering, leaving = _borders(chunks, initial, runs, cp_group, output_final_state)
        outputs = (chunks.own + chunks.read @ entering).transpose(2, 3).flatten(1, 2)
        outputs = large_tensors.index_select(outputs, runs.blocks.index, 1).to(value.dtype)
    if leaving is None:
        return outputs, None
    return outputs, all_reduce(_final_terms(leaving, runs, sequences), cp_group).flatten(0, 1)


@dataclass(frozen=True)
class ChunkFunctions:
    """Chunks as functions of the state S that enters them: it leaves as transition S + state; out = own + read S."""

    transition: Float[Tensor, "b m h k k"]
    state: Float[Tensor, "b m h k v"]
    read: Float[Tensor, "b m h l k"]
    own: Float[Tensor, "b m h l v"]


def chunk_functions(
    query: Float[Tensor, "b m h l k"],
    key: Float[Tensor, "b m h l k"],
    value: Float[Tensor, "b m h l v"],
    g: Float[Tensor, "b m h l c"],
    beta: Float[Tensor, "b m h l 1"],
) -> ChunkFunctions:
    """Each chunk of l tokens as a function of the state that enters it; c is 1, or k with a decay per channel.

    Cost: the multiplications of `gated_delta_rule`, in products of matrices.
    """
    # 1. Logarithms of decays: from token j to token l, from before the chunk to l, and from j to the chunk's end.
    between = _log_decays(g, torch.zeros(g.shape[3], dtype=torch.long, device=g.device))  # b m h l j c
    through, after = g[..., :1, :] + between[..., 0, :], between[..., -1, :, :]
    # 2. Each token writes beta (v - what it finds under its key). It finds the writings of earlier tokens, decayed:
    #    a triangular system, solved for the part that the values give and the part that the entering state gives.
    found = beta * _decayed_products(key, key, between)
    written = torch.cat([beta * value, beta * through.exp() * key], -1)
    written = torch.linalg.solve_triangular(found, written, upper=False, unitriangular=True)
    values, keys = written.split([value.shape[-1], key.shape[-1]], -1)
    # 3. The state that leaves, and the outputs.
    scores, kept = _decayed_products(query, key, between), (after.exp() * key).transpose(-1, -2)
    decay = through[..., -1, :].exp().expand(*key.shape[:3], key.shape[-1])
    return ChunkFunctions(
        transition=torch.diag_embed(decay) - kept @ keys,
        state=kept @ values,
        read=through.exp() * query - scores @ keys,
        own=scores @ values,
    )


def _decayed_products(
    x: Float[Tensor, "b m h l k"], y: Float[Tensor, "b m h j k"], between: Float[Tensor, "b m h l j c"]
) -> Float[Tensor, "b m h l j"]:
    """The sum over channels of exp(between) x y; 0 where j is later than l."""
    if between.shape[-1] == 1:
        return (x @ y.transpose(-1, -2)) * between[..., 0].exp()
    return torch.einsum("bmhlk,bmhjk,bmhljk->bmhlj", x, y, between.exp())


def _in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    runs: Runs,
    scale: float,
    use_qk_l2norm: bool,
) -> tuple[Tensor, ...]:
    """The arguments of `chunk_functions`, in float32 or wider; padding is zeros and changes no state."""
    wide, per_key = accumulator(value.dtype), value.shape[2] // key.shape[2]
    query, key, value, g, beta = (x.to(wide) for x in (query, key, value, g, beta))
    if use_qk_l2norm:
        query, key = (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt() for x in (query, key))
    if per_key > 1:
        query, key = (x.repeat_interleave(per_key, 2) for x in (query, key))
    g = g if g.ndim == 4 else g[..., None]
    tensors = query * scale, key, value, g, beta[..., None]
    return tuple(blocks_of(x, runs.blocks).transpose(2, 3) for x in tensors)


def _borders(
    chunks: ChunkFunctions, initial: Tensor | None, runs: Runs, group: ProcessGroup, output_final_state: bool
) -> tuple[Float[Tensor, "b m h k v"], Float[Tensor, "b r h k v"] | None]:
    """The state that enters each chunk, and the state that leaves each run if it is asked for."""
    start, every = _starts(chunks, initial, runs), torch.arange(len(runs.last), device=runs.last.device)
    # 1. The states as if none entered a run from another rank.
    entering, left = _recurrence(chunks.transition, chunks.state, start, runs)
    if group.size() == 1:
        return entering, _at_the_end(left, start, runs, every) if output_final_state else None
    # 2. The transition from the start of each run to each border.
    identity = torch.eye(start.shape[3], dtype=start.dtype, device=start.device).expand(
        *start.shape[:1], 1, *start.shape[2:4], -1
    )
    transition, through = _recurrence(chunks.transition, None, identity, runs)
    # 3. The states that enter runs from other ranks.
    chain = runs.chain
    sent = _at_the_end(left, start, runs, chain.sent), _at_the_end(through, identity, runs, chain.sent)
    received = with_zeros(PassedStates.apply(*sent, chain, group))
    # 4. Add their part: the rule is linear in the state. Runs that receive none read the row of zeros.
    row = torch.full_like(every, len(chain.received))
    row[chain.received] = torch.arange(len(chain.received), device=row.device)
    entering = entering + transition @ large_tensors.index_select(received, row[runs.blocks.segment], 1)
    if not output_final_state:
        return entering, None
    leaving, through = _at_the_end(left, start, runs, every), _at_the_end(through, identity, runs, every)
    return entering, leaving + through @ large_tensors.index_select(received, row, 1)


def _starts(chunks: ChunkFunctions, initial: Tensor | None, runs: Runs) -> Float[Tensor, "b r h k v"]:
    """The initial states of the runs that begin their sequence, and 0 for the others; r is 1 if all are 0."""
    if initial is None:
        return torch.zeros_like(chunks.state[:, :1])
    of_run = large_tensors.index_select(initial, runs.sequence, 1)
    return torch.where(runs.begins[:, None, None, None], of_run, 0.0)


def _recurrence(
    transition: Float[Tensor, "b m h k k"],
    state: Float[Tensor, "b m h k v"] | None,
    start: Float[Tensor, "b r h k v"],
    runs: Runs,
) -> tuple[Float[Tensor, "b m h k v"], Float[Tensor, "b m h k v"]]:
    """The states before and after each block; each run begins with its `start`, or with the one of all runs."""
    segment, blocks = runs.blocks.segment, transition.shape[1]
    starts = (
        start.expand(-1, blocks, -1, -1, -1) if start.shape[1] == 1 else large_tensors.index_select(start, segment, 1)
    )
    before, after = [starts[:, 0]], []
    for m in range(blocks):
        if m:
            before.append(torch.where(runs.is_first[m], starts[:, m], after[-1]))
        after.append(transition[:, m] @ before[m] if state is None else transition[:, m] @ before[m] + state[:, m])
    return torch.stack(before, 1), torch.stack(after, 1)


def _at_the_end(
    after: Float[Tensor, "b m h k v"], start: Float[Tensor, "b r h k v"], runs: Runs, chosen: Int64[Tensor, " g"]
) -> Float[Tensor, "b g h k v"]:
    """The state after each chosen run; a run without tokens leaves its start."""
    last = runs.last[chosen]
    start = start if start.shape[1] == 1 else large_tensors.index_select(start, chosen, 1)
    return torch.where((last < 0)[:, None, None, None], start, large_tensors.index_select(after, last.clamp(min=0), 1))


def _final_terms(leaving: Float[Tensor, "b r h k v"], runs: Runs, sequences: int) -> Float[Tensor, "b q h k v"]:
    """The final states of the sequences that end on this rank, and 0 for the others."""
    ended = torch.where(runs.ends[:, None, None, None], leaving, 0.0)
    return ended.new_zeros(len(ended), sequences, *ended.shape[2:]).index_add(1, runs.sequence, ended)


def _final_without_tokens(
    initial: Tensor | None, sequences: int, key: Tensor, value: Tensor, group: ProcessGroup
) -> Float[Tensor, "n h k v"]:
    """The final states of sequences without tokens: the initial ones, or 0."""
    if initial is not None:
        # One rank passes them on: the gradient of initial_state is a term, and the terms of all ranks are summed.
        is_first = torch.tensor(group.rank() == 0, device=initial.device)
        return all_reduce(torch.where(is_first, initial.flatten(0, 1), 0.0), group)
    shape = sequences, value.shape[2], key.shape[3], value.shape[3]
    return value.new_zeros(shape, dtype=accumulator(value.dtype))
