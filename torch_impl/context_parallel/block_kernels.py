"""Attention of one block, with the log of the softmax's sum (lse): CUDA's kernels that return it, and plain operations.

Flash attention supports half precision without a mask, from compute capability 8.0 on. Memory-efficient attention
supports more, but no grouped heads; it pads its lse to a multiple of 32 rows, aligns its causal mask to the top left,
and takes additive masks. Plain operations, which run on any device, do the rest: a softcap anywhere, and on CUDA
float64, bfloat16 on older devices, and head widths that tensor cores cannot load.

Plain operations hold the scores of ROWS queries at a time, in float32 or wider, so that memory does not grow with the
number of pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torch_impl.collectives import accumulator, no_autocast

Heads = Float[Tensor, "b h s p"]
KVHeads = Float[Tensor, "b hk keys p"]  # keys of another rank: `keys` may differ from `s`
_aten = torch.ops.aten
FLASH, FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_backward
EFFICIENT, EFFICIENT_BACKWARD = (
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_efficient_attention_backward,
)
# Limits of the kernels, checked here because the kernels report some of them unclearly and others not at all.
HALF = (torch.float16, torch.bfloat16)
LSE_ROWS, BIAS_COLUMNS = 32, 16
LARGEST_FLASH_WIDTH = 256
AMPERE = (8, 0)


def cuda_forward(
    q: Heads, k: KVHeads, v: KVHeads, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Heads, Tensor]:
    """The output and lse of one block; the causal mask is aligned to the top left."""
    capability = _capability(q)
    if _flash_supports(q, k, mask, is_causal, capability):
        out, lse, *_ = FLASH(q, k, v, 0.0, is_causal, False, scale=scale)
        return out, lse
    if not _efficient_supports(q, capability):
        return plain_forward(q, k, v, mask, is_causal, scale)
    kv_of_every_head = [_repeat_kv(x, q.shape[1]) for x in (k, v)]
    out, lse, *_ = EFFICIENT(q, *kv_of_every_head, _bias(q, mask), True, 0.0, is_causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def cuda_backward(
    cotangent: Heads,
    q: Heads,
    k: KVHeads,
    v: KVHeads,
    out: Heads,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Heads, KVHeads, KVHeads]:
    """Gradients of one block, from the output and lse over all blocks."""
    capability = _capability(q)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset of dropout, which is off
    if _flash_supports(q, k, mask, is_causal, capability):
        arguments = cotangent, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, unused, unused
        return FLASH_BACKWARD(*arguments, scale=scale)
    if not _efficient_supports(q, capability):
        return plain_backward(cotangent, q, k, v, out, lse, mask, is_causal, scale)
    kv_of_every_head, bias = [_repeat_kv(x, q.shape[1]) for x in (k, v)], _bias(q, mask)
    # Give padding rows an lse of infinity, so that their weights are exp(-inf) = 0.
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=torch.inf)
    arguments = cotangent, q, *kv_of_every_head, bias, out, lse, unused, unused, 0.0, [True, True, True, False]
    dq, dk, dv, _ = EFFICIENT_BACKWARD(*arguments, is_causal, scale=scale)
    # Keys were repeated for each query head of their group: sum their gradients over the group.
    heads = k.shape[1], -1
    return dq, dk.unflatten(1, heads).sum(2), dv.unflatten(1, heads).sum(2)


def _capability(x: Tensor) -> tuple[int, int]:
    """The compute capability of the device, (major, minor); the meta device counts as an A100."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else AMPERE


def _flash_supports(q: Heads, k: KVHeads, mask: Tensor | None, is_causal: bool, capability: tuple[int, int]) -> bool:
    """Whether the flash kernel supports these inputs.

    Its causal mask is aligned to the bottom right, which is the top left only for equally many queries and keys. Widths
    above 192 and up to 224 have no backward on devices with little shared memory: capability 8.6 to 8.9 and 12.
    """
    width = q.shape[-1]
    square = not is_causal or q.shape[2] == k.shape[2]
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    fits = width % 8 == 0 and width <= LARGEST_FLASH_WIDTH and not (is_small and 192 < width <= 224)
    return q.dtype in HALF and mask is None and square and fits and capability >= AMPERE


def _efficient_supports(q: Heads, capability: tuple[int, int]) -> bool:
    """Whether memory-efficient attention supports q: rows of a multiple of 16 bytes, bfloat16 from Ampere on."""
    is_supported = q.dtype in (torch.float16, torch.float32) or (q.dtype == torch.bfloat16 and capability >= AMPERE)
    return is_supported and q.shape[-1] * q.dtype.itemsize % 16 == 0


def _repeat_kv(x: Heads, heads: int) -> Float[Tensor, "b H s p"]:
    """Repeat the KV heads, one for every query head."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _bias(q: Heads, mask: Tensor | None) -> Tensor | None:
    """The mask as an additive bias, with each row aligned in memory for the kernel."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    aligned = torch.zeros(*mask.shape[:-1], columns + -columns % BIAS_COLUMNS, dtype=q.dtype, device=q.device)
    aligned[..., :columns].masked_fill_(~mask, -torch.inf)
    return aligned[..., :columns].expand(len(q), q.shape[1], q.shape[2], -1)


ROWS = 512  # number of queries whose scores are in memory at a time


def plain_forward(
    q: Heads, k: KVHeads, v: KVHeads, mask: Tensor | None, is_causal: bool, scale: float, softcap: float | None = None
) -> tuple[Heads, Float[Tensor, "b h s"]]:
    """The output and lse of one block, causal from the top left. A query without a key has output 0 and lse -inf."""
    wide_q, wide_k, wide_v = _group_heads(q, k), k.to(accumulator(k.dtype)), v.to(accumulator(v.dtype))
    outs, lses = [], []
    with no_autocast(q.device):
        for rows in _slices(q.shape[2]):
            scores = _scores(wide_q[:, :, :, rows], wide_k, _key_mask(q, k, mask, is_causal, rows), scale, softcap)
            lse = scores.logsumexp(-1)
            # For a query without a key, -inf - 0 gives weights of 0; -inf - -inf would be NaN.
            weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
            outs.append(torch.einsum("bkgij,bkjp->bkgip", weights, wide_v))
            lses.append(lse)
    return torch.cat(outs, 3).flatten(1, 2).to(q.dtype), torch.cat(lses, 3).flatten(1, 2)


def plain_backward(
    cotangent: Heads,
    q: Heads,
    k: KVHeads,
    v: KVHeads,
    out: Heads,
    lse: Float[Tensor, "b h s"],
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[Heads, KVHeads, KVHeads]:
    """Gradients of one block, from the output and lse over all blocks; 0 for a query whose lse is +inf."""
    wide_q, wide_k, wide_v = _group_heads(q, k), k.to(accumulator(k.dtype)), v.to(accumulator(v.dtype))
    dout, grouped_lse = _group_heads(cotangent, k), lse.unflatten(1, (k.shape[1], -1))
    # 1. delta[i] = sum_j weights[i, j] dweights[i, j] over the keys of all blocks, which equals dout[i] . out[i].
    delta = (dout * _group_heads(out, k)).sum(-1)
    dq, dk, dv = torch.zeros_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    with no_autocast(q.device):
        for rows in _slices(q.shape[2]):
            # 2. Recompute the weights. With the global lse they are the weights of the softmax over all keys.
            q_rows, dout_rows = wide_q[:, :, :, rows], dout[:, :, :, rows]
            scores = _scores(q_rows, wide_k, _key_mask(q, k, mask, is_causal, rows), scale, softcap)
            weights = (scores - grouped_lse[:, :, :, rows, None]).exp()
            dv += torch.einsum("bkgij,bkgip->bkjp", weights, dout_rows)
            # 3. Backpropagate through the softmax and the scale to q and k.
            centered_dweights = torch.einsum("bkgip,bkjp->bkgij", dout_rows, wide_v) - delta[:, :, :, rows, None]
            ds = scale * weights * centered_dweights
            if softcap is not None:  # tanh' = 1 - tanh ** 2; a hidden key's score is -inf, and its gradient 0
                ds = ds * (1 - (scores / softcap).clamp(min=-1).square())
            dq[:, :, :, rows] = torch.einsum("bkgij,bkjp->bkgip", ds, wide_k)
            dk += torch.einsum("bkgij,bkgip->bkjp", ds, q_rows)
    return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _slices(size: int) -> Iterator[slice]:
    return (slice(start, min(start + ROWS, size)) for start in range(0, size, ROWS))


def _group_heads(x: Heads, k: KVHeads) -> Float[Tensor, "b hk g s p"]:
    """Query heads grouped by their KV head, in the accumulator's dtype."""
    return x.to(accumulator(x.dtype)).unflatten(1, (k.shape[1], -1))


def _scores(
    q: Float[Tensor, "b hk g i p"],
    k: KVHeads,
    key_mask: Bool[Tensor, "*a i2 j"] | None,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "b hk g i j"]:
    scores = scale * torch.einsum("bkgip,bkjp->bkgij", q, k)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return scores if key_mask is None else scores.masked_fill(~key_mask, -torch.inf)


def _key_mask(
    q: Heads, k: KVHeads, mask: Bool[Tensor, "m 1 i j"] | None, is_causal: bool, rows: slice
) -> Bool[Tensor, "*a i2 j"] | None:
    """The mask of the keys that the queries of `rows` see; None if they see all keys."""
    if mask is not None:
        return (mask if mask.shape[2] == 1 else mask[:, :, rows])[:, :, None]
    if not is_causal:
        return None
    row, key = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    return row[rows, None] >= key
