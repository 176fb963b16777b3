"""One block by plain operations on any device: what no fused operation takes, float64 on CUDA first of all.

Scores of ROWS queries are held at a time, in float32 or wider, so that memory does not grow with pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torch_impl.collectives import accumulator, uncast

Heads = Float[Tensor, "b h s p"]
KVHeads = Float[Tensor, "b hk keys p"]
ROWS = 512


def forward(
    q: Heads, k: KVHeads, v: KVHeads, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Heads, Float[Tensor, "b h s"]]:
    """Output and lse of one block; causal is from the top left. A query without a key has output 0 and lse -inf."""
    wide_q, wide_k, wide_v = _by_group(q, k), k.to(accumulator(k.dtype)), v.to(accumulator(v.dtype))
    outs, sums = [], []
    with uncast(q.device):
        for rows in _slices(q.shape[2]):
            scores = _scores(wide_q[:, :, :, rows], wide_k, _seen(q, k, mask, is_causal, rows), scale)
            lse = scores.logsumexp(-1)
            weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
            outs.append(torch.einsum("bkgij,bkjp->bkgip", weights, wide_v))
            sums.append(lse)
    return torch.cat(outs, 3).flatten(1, 2).to(q.dtype), torch.cat(sums, 3).flatten(1, 2)


def backward(
    cotangent: Heads,
    q: Heads,
    k: KVHeads,
    v: KVHeads,
    out: Heads,
    lse: Float[Tensor, "b h s"],
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Heads, KVHeads, KVHeads]:
    """Gradients of one block, by the global out and lse; none of a query whose lse is infinite."""
    wide_q, wide_k, wide_v = _by_group(q, k), k.to(accumulator(k.dtype)), v.to(accumulator(v.dtype))
    above, total = _by_group(cotangent, k), lse.unflatten(1, (k.shape[1], -1))
    inner = (above * _by_group(out, k)).sum(-1)
    dq, dk, dv = torch.zeros_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    with uncast(q.device):
        for rows in _slices(q.shape[2]):
            own_q, own_above = wide_q[:, :, :, rows], above[:, :, :, rows]
            scores = _scores(own_q, wide_k, _seen(q, k, mask, is_causal, rows), scale)
            weights = (scores - total[:, :, :, rows, None]).exp()
            dv += torch.einsum("bkgij,bkgip->bkjp", weights, own_above)
            towards = torch.einsum("bkgip,bkjp->bkgij", own_above, wide_v) - inner[:, :, :, rows, None]
            ds = scale * weights * towards
            dq[:, :, :, rows] = torch.einsum("bkgij,bkjp->bkgip", ds, wide_k)
            dk += torch.einsum("bkgij,bkgip->bkjp", ds, own_q)
    return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _slices(size: int) -> Iterator[slice]:
    return (slice(start, min(start + ROWS, size)) for start in range(0, size, ROWS))


def _by_group(x: Heads, k: KVHeads) -> Float[Tensor, "b hk g s p"]:
    """Query heads by the KV head that they read, in the accumulator's dtype."""
    return x.to(accumulator(x.dtype)).unflatten(1, (k.shape[1], -1))


def _scores(
    q: Float[Tensor, "b hk g i p"], k: KVHeads, seen: Bool[Tensor, "*a i2 j"] | None, scale: float
) -> Float[Tensor, "b hk g i j"]:
    scores = scale * torch.einsum("bkgip,bkjp->bkgij", q, k)
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def _seen(
    q: Heads, k: KVHeads, mask: Bool[Tensor, "m 1 i j"] | None, is_causal: bool, rows: slice
) -> Bool[Tensor, "*a i2 j"] | None:
    """Which keys the queries of `rows` see; None: all."""
    if mask is not None:
        return (mask if mask.shape[2] == 1 else mask[:, :, rows])[:, :, None]
    if not is_causal:
        return None
    row, key = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    return row[rows, None] >= key
