"""z, x, B, C and dt exchanged and put in order one by one, by the functions of the page: the readable way.

It gives what one fused exchange gives, to the bit.
"""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.kernels import rows_at
from torch_impl.layouts import (
    TokenLayout,
    _deinterleave_packed_seqs,
    _redo_attention_load_balancing,
    _reinterleave_packed_seqs,
    _undo_attention_load_balancing,
)
from torch_impl.mamba.all_to_all import _all_to_all_cp2hp, _all_to_all_hp2cp


def sequential(
    parts: tuple[Shaped[Tensor, "b s _"], ...], cu_seqlens: Tensor | None, tokens: TokenLayout, group: ProcessGroup
) -> Shaped[Tensor, "b t v"]:
    """All tokens, in order, of this rank's columns of each part."""
    return torch.cat([_one(part, cu_seqlens, tokens, group) for part in parts], -1)


def _one(part: Tensor, cu_seqlens: Tensor | None, tokens: TokenLayout, group: ProcessGroup) -> Tensor:
    if tokens.kind == "packed" and cu_seqlens is not None:
        arrived = _all_to_all_cp2hp(part[0], group, 1)
        majored = _deinterleave_packed_seqs(arrived, cu_seqlens // tokens.cp_size, tokens.cp_size)
        return _undo_attention_load_balancing(majored, tokens.cp_size, cu_seqlens)[None]
    arrived = _all_to_all_cp2hp(part, group, len(part))
    if tokens.kind == "dual_chunk_swap":
        return _undo_attention_load_balancing(arrived, tokens.cp_size)
    return rows_at(arrived, tokens.inverse.to(part.device), 1)


def own_tokens(
    x: Shaped[Tensor, "b t i"], cu_seqlens: Tensor | None, tokens: TokenLayout, group: ProcessGroup
) -> Shaped[Tensor, "b s j"]:
    """This rank's tokens of all columns, of all tokens of its columns in order."""
    if tokens.kind == "packed" and cu_seqlens is not None:
        majored = _redo_attention_load_balancing(x[0], tokens.cp_size, cu_seqlens)
        rows = _reinterleave_packed_seqs(majored, cu_seqlens // tokens.cp_size, tokens.cp_size)
        return _all_to_all_hp2cp(rows, group, 1)[None]
    if tokens.kind == "dual_chunk_swap":
        rows = _redo_attention_load_balancing(x, tokens.cp_size)
    else:
        rows = rows_at(x, tokens.index.flatten().to(x.device), 1)
    return _all_to_all_hp2cp(rows, group, len(x))
