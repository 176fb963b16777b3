"""CUDA's attention kernels on a CPU: stand-ins with torch's signatures that reject the inputs the kernels reject."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ROWS_OF_LSE, COLUMNS_OF_BIAS = 32, 16
Grouped = tuple[Tensor, Tensor, Tensor]


class CudaKernels(TorchDispatchMode):
    """A mode in which operations that only CUDA has are computed here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Arguments that equal their defaults do not arrive.
        return STAND_INS.get(func, func)(*args, **(kwargs or {}))


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale):
    """Half precision; the query heads of a KV head are consecutive; causal from the bottom right."""
    assert q.dtype in (torch.float16, torch.bfloat16) and not (dropout_p or return_debug_mask)
    out, lse = _forward(q, k, v, _bottom_right(q, k, is_causal), scale)
    return out, lse, None, None, q.shape[2], k.shape[2], *2 * [torch.zeros((), dtype=torch.int64)], None


def flash_backward(
    cotangent, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale
):
    """The backward of `flash`; the lengths of one batch are the lengths of its longest sequence."""
    assert (cum_q, cum_k, max_q, max_k, dropout_p) == (None, None, q.shape[2], k.shape[2], 0.0)
    assert seed.dtype == offset.dtype == torch.int64 and not seed.ndim and not offset.ndim
    return _backward(cotangent, q, k, v, out, lse, _bottom_right(q, k, is_causal), scale)


def efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale):
    """Equally many heads of q, k and v; causal from the top left; lse is padded to rows of 32, with any values."""
    assert q.shape[1] == k.shape[1] == v.shape[1] and not dropout_p
    out, lse = _forward(q, k, v, _top_left(q, k, bias, is_causal), scale)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % ROWS_OF_LSE), value=torch.nan)
    return out, lse if compute_log_sumexp else lse[..., :0], *2 * [torch.zeros((), dtype=torch.int64)]


def efficient_backward(
    cotangent, q, k, v, bias, out, lse, seed, offset, dropout_p, needs_gradient, is_causal=False, *, scale
):
    """The backward of `efficient`; padded rows of lse are infinite, so that their weights are 0."""
    assert q.shape[1] == k.shape[1] == v.shape[1] and not dropout_p
    assert lse.shape[-1] % ROWS_OF_LSE == 0 and bool((lse[..., q.shape[2] :] == torch.inf).all())
    assert lse.shape[-1] - q.shape[2] < ROWS_OF_LSE
    assert seed.dtype == offset.dtype == torch.int64 and not seed.ndim and not offset.ndim
    gradients = _backward(cotangent, q, k, v, out, lse[..., : q.shape[2]], _top_left(q, k, bias, is_causal), scale)
    assert not needs_gradient[3]
    return *(x if is_needed else None for x, is_needed in zip(gradients, needs_gradient, strict=False)), None


STAND_INS = {
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}


def _bottom_right(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    seen = torch.zeros(q.shape[2], k.shape[2], device=q.device)
    return seen.masked_fill(~torch.ones_like(seen).tril(k.shape[2] - q.shape[2]).bool(), -torch.inf if is_causal else 0)


def _top_left(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
    seen = torch.zeros(q.shape[2], k.shape[2], device=q.device)
    if is_causal:
        seen = seen.masked_fill(~torch.ones_like(seen).tril().bool(), -torch.inf)
    if bias is None:
        return seen
    assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype
    # Each row of the mask is aligned in memory, also where one row serves all queries.
    assert bias.stride(-1) == 1 and not any(stride % COLUMNS_OF_BIAS for stride in bias.stride()[:-1])
    return seen + bias


def _heads(q: Tensor, k: Tensor, v: Tensor) -> Grouped:
    """Heads in float32, each query head with its KV head."""
    repeats = q.shape[1] // k.shape[1]
    return q.float(), *(x.float().repeat_interleave(repeats, 1) for x in (k, v))


def _forward(q: Tensor, k: Tensor, v: Tensor, addend: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide_q, wide_k, wide_v = _heads(q, k, v)
    scores = wide_q @ wide_k.mT * scale + addend
    return (scores.softmax(-1) @ wide_v).to(q.dtype), scores.logsumexp(-1)


def _backward(
    cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, addend: Tensor, scale: float
) -> Grouped:
    wide_q, wide_k, wide_v = _heads(q, k, v)
    weights = (wide_q @ wide_k.mT * scale + addend - lse[..., None]).exp()
    wide = cotangent.float()
    ds = weights * (wide @ wide_v.mT - (wide * out.float()).sum(-1, keepdim=True)) * scale
    by_head = ds.mT @ wide_q, weights.mT @ wide
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for x in by_head)
    return (ds @ wide_k).to(q.dtype), dk, dv
