"""The state space recurrence of Mamba2 in chunks: matrix products inside chunks, a small recurrence between them.

Every decay is the exponential of a sum of logarithms that are at most 0: nothing overflows, and there are no quotients.
If a sequence ends inside a chunk, the matrix of decays is 0 across the border.
mamba-ssm's kernel computes the same if `mamba_ssm_kernels` finds it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator, no_autocast
from torch_impl.contract import PositiveInt, Rejected, Sharded, ShardedInt, contract
from torch_impl.mamba.mamba_ssm_kernels import kernel_scan, scan_kernel

NEVER = float("-inf")  # the logarithm of a decay to zero: nothing passes


@contract
def chunked_scan(
    x: Sharded[Tensor, "b s h p"],
    dt: Sharded[Tensor, "b s h"],
    A: Sharded[Tensor, "h"],
    B: Sharded[Tensor, "b s g n"],
    C: Sharded[Tensor, "b s g n"],
    D: Sharded[Tensor, "..."] | None = None,
    *,
    chunk_size: PositiveInt = 256,
    seq_idx: ShardedInt[Tensor, "b s"] | None = None,
    initial_states: Sharded[Tensor, "b h p n"] | None = None,
) -> tuple[Sharded[Tensor, "b s h p"], Sharded[Tensor, "b h p n"]]:
    """y[t] = S[t] C[t] + D x[t] and the last S;  S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T.

    Head i reads group i * g // h; dt is positive and A negative; D is [h] or [h, p]. `seq_idx` has the sequence index
    of each token, in ascending order. The first sequence starts with `initial_states`, all others with S = 0. Any s and
    any chunk_size. y has x's dtype; the state and all intermediates are float32 or wider, even under autocast. A token
    that is not finite makes its entire chunk not finite, in every sequence, since masks multiply by 0.

    Cost:   no collective. Per row and head 2 * s * chunk_size * (n + p) multiplications inside the chunks and
            (s / chunk_size)^2 * p * n between them. Saves the inputs, s * chunk_size decays per row and head, and
            the state at each border between chunks.
    Errors: ValueError for shapes that do not fit, or chunk_size below 1; TypeError for an unsupported dtype.
    Source: arXiv 2405.21060, section 6.
    """
    if not B.shape[2] or x.shape[2] % B.shape[2]:
        raise Rejected(f"num_heads={x.shape[2]} must be divisible by n_groups={B.shape[2]}")
    h, p = x.shape[2:]
    if D is not None and D.numel() not in (h, h * p):
        raise Rejected(f"D is {list(D.shape)}; pass [h] or [h, p], [{h}] or [{h}, {p}]")
    return scan(x, dt, A, B, C, D, chunk_size, seq_idx, initial_states)


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
) -> tuple[Float[Tensor, "b s h p"], Float[Tensor, "b h p n"]]:
    """`chunked_scan` for validated arguments."""
    if kernel := scan_kernel(x, B, C):
        return kernel_scan(kernel, x, dt, A, B, C, D, chunk_size, seq_idx, initial_states)
    wide = accumulator(x.dtype)
    heads_per_group = x.shape[2] // B.shape[2]
    entering = x.new_zeros(len(x), *x.shape[2:], B.shape[3], dtype=wide)
    entering = entering if initial_states is None else initial_states.to(wide)
    if not x.shape[1]:
        return x, entering
    ids = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device) if seq_idx is None else seq_idx
    tokens, dt = x.to(wide), dt.to(wide)  # once each: two casts would add up two rounded gradients
    u, logs = tokens * dt[..., None], dt * A.to(wide)
    B, C = (part.to(wide).repeat_interleave(heads_per_group, dim=2) for part in (B, C))
    # Under autocast, products of float32 tensors would run in 16 bits.
    with no_autocast(x.device):
        y, final = _chunks(u, logs, B, C, ids, entering, min(chunk_size, x.shape[1]))
    if D is not None:
        y = y + tokens * D.to(wide).reshape(x.shape[2], -1)
    return y.to(x.dtype), final


def _chunks(
    u: Tensor, logs: Tensor, B: Tensor, C: Tensor, ids: Tensor, entering: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """(y without D, the final state), from chunks of `size` tokens.

    Letters: b batch, c chunk, l and m tokens of a chunk, h heads, p head width, n state; e and f count chunks.
    """
    # 1. Split into chunks, b c l h ...; padding tokens have u = 0 and log 0, and change no state.
    s = u.shape[1]
    u, logs, B, C = (_chunks_of(part, size) for part in (u, logs, B, C))
    ids = torch.cat([ids, ids[:, -1:].expand(-1, -s % size)], 1).view(u.shape[:3])
    border_ids = torch.cat([ids[:, :1, 0], ids[:, :, -1]], 1)  # the sequence at each border between chunks
    # 2. The output inside each chunk: token l reads the states that tokens m of the same chunk write.
    inside = _log_decays(logs, ids)  # b c l m h
    y = torch.einsum("bclmh,bcmhp->bclhp", torch.einsum("bclhn,bcmhn->bclmh", C, B) * inside.exp(), u)
    # 3. The state at the end of each chunk, as if no state entered it.
    chunk_states = torch.einsum("bclhp,bclhn,bclh->bchpn", u, B, inside[:, :, -1].exp())
    # 4. The recurrence between chunks, as one product with the decays from border f to border e.
    through = logs[:, :, :1] + inside[:, :, :, 0]  # from before the chunk's first token
    between = _log_decays(F.pad(through[:, :, -1], (0, 0, 1, 0)), border_ids).exp()
    states = torch.einsum("befh,bfhpn->behpn", between, torch.cat([entering[:, None], chunk_states], 1))
    # 5. Add the output of the state that enters each chunk, up to the first border between sequences.
    enters = through.masked_fill((ids[:, :, :1] != border_ids[:, :-1, None])[..., None], NEVER).exp()
    y = y + torch.einsum("bclhn,bchpn,bclh->bclhp", C, states[:, :-1], enters)
    return y.flatten(1, 2)[:, :s], states[:, -1]


def _log_decays(logs: Float[Tensor, "*a l h"], ids: Int[Tensor, "*#a l"]) -> Float[Tensor, "*a l m h"]:
    """The sum of logs over m < k <= l; -inf if m is later than l or in another sequence.

    Each sum is added up from its own terms: no other sequence enters it, and no difference of long sums loses digits.
    """
    reaches = (ids[..., :, None] == ids[..., None, :]).tril()
    terms = torch.where(reaches.tril(-1)[..., None], logs[..., :, None, :], 0.0)
    return terms.cumsum(-3).masked_fill(~reaches[..., None], NEVER)


def _chunks_of(x: Tensor, size: int) -> Tensor:
    """[b s h ...] -> [b c l h ...], padded with zeros to full chunks."""
    fill = -x.shape[1] % size
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, fill)) if fill else x
    return padded.unflatten(1, (-1, size))
