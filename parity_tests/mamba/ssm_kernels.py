"""mamba-ssm's scan and causal-conv1d's convolution, token by token, with the kernels' rejections."""

from __future__ import annotations

import torch
from torch import Tensor


def scan(x, dt, A, B, C, chunk_size, D=None, initial_states=None, seq_idx=None, return_final_states=False):
    """`mamba_chunk_scan_combined`: the initial state is sequence 0's; D is [h] or [h, p]."""
    assert all(part.is_contiguous() for part in (x, dt, B, C)) and chunk_size > 0
    assert A.dtype == torch.float32 and x.dtype == B.dtype == C.dtype
    assert D is None or tuple(D.shape) in (x.shape[2:3], x.shape[2:])
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and not bool(seq_idx[:, 0].any()))
    heads_per_group = x.shape[2] // B.shape[2]
    B, C = (part.float().repeat_interleave(heads_per_group, 2) for part in (B, C))
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[3]) if initial_states is None else initial_states
    state, last, rows = state.float(), torch.zeros(len(x), dtype=torch.int32, device=x.device), []
    for t in range(x.shape[1]):
        sequence = last if seq_idx is None else seq_idx[:, t]
        state = torch.where((sequence == last)[:, None, None, None], state, 0.0)
        step, token = dt[:, t].float(), x[:, t].float()
        written = (step[..., None] * token)[..., None] * B[:, t, :, None]
        state = (step * A).exp()[..., None, None] * state + written
        skipped = 0.0 if D is None else token * (D[:, None] if D.ndim == 1 else D)
        rows.append((state * C[:, t, :, None]).sum(-1) + skipped)
        last = sequence
    y = torch.stack(rows, 1).to(x.dtype)
    return (y, state) if return_final_states else y


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation=None):
    """`causal_conv1d_fn` for x of [b, c, s] with channels last in memory; the other arguments are contiguous."""
    assert x.stride(1) == 1 and x.stride(2) == x.shape[1] and x.stride(0) == x.shape[1] * x.shape[2]
    assert weight.is_contiguous() and (bias is None or bias.dtype == weight.dtype)
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
    taps, total = weight.shape[1], torch.zeros_like(x, dtype=torch.float32)
    for back in range(min(taps, x.shape[2])):
        before = torch.nn.functional.pad(x, (back, 0))[..., : x.shape[2]].float()
        if seq_idx is not None:
            same = torch.nn.functional.pad(seq_idx, (back, 0), value=-1)[:, : x.shape[2]] == seq_idx
            before = torch.where(same[:, None], before, 0.0)
        total = total + before * weight[:, taps - 1 - back, None].float()
    total = total if bias is None else total + bias.float()[:, None]
    return (torch.nn.functional.silu(total) if activation == "silu" else total).to(x.dtype)
