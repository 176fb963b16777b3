"""The state space recurrence of Mamba2 in chunks: matrix products inside each, a small recurrence between them.

All decays are exponentials of sums of logarithms, of which none is positive: nothing overflows and nothing is a
quotient. Where a sequence ends inside a chunk, the matrix of decays is 0 across the border.
mamba-ssm's kernels compute the same where `mamba_ssm_kernels` finds them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator, uncast
from torch_impl.mamba.mamba_ssm_kernels import scan_kernel, scanned

NEVER = float("-inf")  # the logarithm of no decay at all


def chunked_scan(
    x: Float[Tensor, "b s h p"],
    dt: Float[Tensor, "b s h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b s g n"],
    C: Float[Tensor, "b s g n"],
    D: Float[Tensor, "*e"] | None = None,
    *,
    chunk_size: int = 256,
    seq_idx: Int[Tensor, "b s"] | None = None,
    initial_states: Float[Tensor, "b h p n"] | None = None,
) -> tuple[Float[Tensor, "b s h p"], Float[Tensor, "b h p n"]]:
    """y[t] = S[t] C[t] + D x[t] and the last S;  S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T.

        x  "b s h p"     dt  "b s h"     B, C  "b s g n"     seq_idx  "b s"     ->   "b s h p", "b h p n"

    Head i reads group i * g // h; dt is positive and A negative; D is [h] or [h, p]. `seq_idx` names the sequence of
    each token, in ascending order: S is 0 before each but the first, which begins with `initial_states`. Any s and
    any chunk_size. y has x's dtype, the state is in float32 or wider, and so is all between, under autocast too.
    A token that is not finite spoils all of its chunk, whichever sequence: what is masked is multiplied by 0.

    Cost:   no collective. Per row and head 2 * s * chunk_size * (n + p) multiplications inside the chunks and
            (s / chunk_size)^2 * p * n between them. Saves the inputs, s * chunk_size decays per row and head, and
            the state at each border of chunks.
    Errors: ValueError for shapes that do not fit, or chunk_size below 1.
    Source: arXiv 2405.21060, section 6.
    """
    _check(x, dt, A, B, C, chunk_size, seq_idx, initial_states)
    if kernel := scan_kernel(x, B, C):
        return scanned(kernel, x, dt, A, B, C, D, chunk_size, seq_idx, initial_states)
    wide = accumulator(x.dtype)
    each = x.shape[2] // B.shape[2]  # heads of one group
    entering = x.new_zeros(len(x), *x.shape[2:], B.shape[3], dtype=wide)
    entering = entering if initial_states is None else initial_states.to(wide)
    if not x.shape[1]:
        return x, entering
    ids = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device) if seq_idx is None else seq_idx
    u, logs = x.to(wide) * dt.to(wide)[..., None], dt.to(wide) * A.to(wide)
    B, C = (part.to(wide).repeat_interleave(each, dim=2) for part in (B, C))
    with uncast(x.device):
        y, final = _chunks(u, logs, B, C, ids, entering, min(chunk_size, x.shape[1]))
    if D is not None:
        y = y + x.to(wide) * D.to(wide).reshape(x.shape[2], -1)
    return y.to(x.dtype), final


def _chunks(
    u: Tensor, logs: Tensor, B: Tensor, C: Tensor, ids: Tensor, entering: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Letters: b batch, c chunk, l and m tokens of a chunk, h heads, p head width, n state."""
    s = u.shape[1]
    u, logs, B, C = (_cut(part, size) for part in (u, logs, B, C))  # b c l h ...; a token of u = 0, log 0 does nothing
    ids = torch.cat([ids, ids[:, -1:].expand(-1, -s % size)], 1).view(u.shape[:3])
    last = torch.cat([ids[:, :1, 0], ids[:, :, -1]], 1)  # the sequence at each border of chunks
    inside = _log_decays(logs, ids)  # b c l m h
    through = logs[:, :, :1] + inside[:, :, :, 0]  # from before the chunk's first token
    y = torch.einsum("bclmh,bcmhp->bclhp", torch.einsum("bclhn,bcmhn->bclmh", C, B) * inside.exp(), u)
    left = torch.einsum("bclhp,bclhn,bclh->bchpn", u, B, inside[:, :, -1].exp())
    between = _log_decays(F.pad(through[:, :, -1], (0, 0, 1, 0)), last).exp()
    states = torch.einsum("befh,bfhpn->behpn", between, torch.cat([entering[:, None], left], 1))
    enters = through.masked_fill((ids[:, :, :1] != last[:, :-1, None])[..., None], NEVER).exp()
    y = y + torch.einsum("bclhn,bchpn,bclh->bclhp", C, states[:, :-1], enters)
    return y.flatten(1, 2)[:, :s], states[:, -1]


def _log_decays(logs: Float[Tensor, "*a l h"], ids: Int[Tensor, "*a l"]) -> Float[Tensor, "*a l m h"]:
    """The sum of logs over m < k <= l; -inf where m is later than l, or in another sequence.

    Each is summed by itself: no other sequence is in it, and no difference of long sums makes it coarse.
    """
    reaches = (ids[..., :, None] == ids[..., None, :]).tril()
    terms = torch.where(reaches.tril(-1)[..., None], logs[..., :, None, :], 0.0)
    return terms.cumsum(-3).masked_fill(~reaches[..., None], NEVER)


def _cut(x: Tensor, size: int) -> Tensor:
    """[b s h ...] -> [b c l h ...], filled with zeros to whole chunks."""
    fill = -x.shape[1] % size
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, fill)) if fill else x
    return padded.unflatten(1, (-1, size))


def _check(x, dt, A, B, C, chunk_size: int, seq_idx: Tensor | None, initial_states: Tensor | None) -> None:
    function = "mamba.chunked_scan"
    if chunk_size < 1:
        raise ValueError(f"{function}: chunk_size={chunk_size} is not a number of tokens; it is 1 or more")
    if x.ndim != 4 or dt.shape != x.shape[:3] or A.shape != x.shape[2:3]:
        shapes = f"x is {list(x.shape)}, dt is {list(dt.shape)}, A is {list(A.shape)}"
        raise ValueError(f"{function}: {shapes}; they are [b, s, h, p], [b, s, h], [h]")
    if B.ndim != 4 or B.shape != C.shape or B.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"{function}: B is {list(B.shape)}, C is {list(C.shape)}; both are [b, s, g, n], x is {list(x.shape)}"
        )
    if not B.shape[2] or x.shape[2] % B.shape[2]:
        raise ValueError(f"{function}: num_heads={x.shape[2]} must be divisible by n_groups={B.shape[2]}")
    if seq_idx is not None and seq_idx.shape != x.shape[:2]:
        raise ValueError(f"{function}: seq_idx is {list(seq_idx.shape)}; x has {list(x.shape[:2])} tokens")
    states = (len(x), *x.shape[2:], B.shape[3])
    if initial_states is not None and initial_states.shape != states:
        raise ValueError(f"{function}: initial_states is {list(initial_states.shape)}; it is {list(states)}")
