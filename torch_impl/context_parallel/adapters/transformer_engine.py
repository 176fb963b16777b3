"""Adapters for Transformer Engine, which is imported only if it is installed and the tensors are on CUDA."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from jaxtyping import Int, Int64
from torch import Tensor

from torch_impl.layouts import TokenLayout

EXTENSION = "transformer_engine_torch"


def local_index(layout: TokenLayout) -> Int64[Tensor, " local"]:
    """The positions that this rank holds, computed by Transformer Engine if possible, else by the layout.

    Both give the same positions. The lengths of `layout` must be valid: for a length that does not divide, Transformer
    Engine has only a device-side assertion, which ends the process or passes silently.
    """
    if layout.cu_padded.is_cuda and layout.cp_size > 1 and importlib.util.find_spec(EXTENSION):
        return partitioned_indices(layout.cu_padded, layout.total, layout.cp_size, layout.cp_rank)
    return layout.local_index


def partitioned_indices(
    cu_seqlens_padded: Int[Tensor, " offsets"], total: int, cp_size: int, cp_rank: int
) -> Int64[Tensor, " local"]:
    """The positions that rank `cp_rank` of `cp_size` holds of `total` tokens, computed by Transformer Engine.

    Errors: ImportError if it is not installed; ValueError for `cu_seqlens_padded` that are not on CUDA.
    """
    extension = _extension()
    if not cu_seqlens_padded.is_cuda:
        raise ValueError(
            f"context_parallel.te: cu_seqlens_padded is on {cu_seqlens_padded.device}, "
            "transformer-engine needs CUDA; use TokenLayout.local_index"
        )
    return extension.thd_get_partitioned_indices(cu_seqlens_padded.int(), total, cp_size, cp_rank).long()


def attention_kwargs(batch: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Transformer Engine's attention for a batch of one chunk from `make_cp_batch_for_te`.

    Under cp the padded offsets also replace the real ones: no release is known to handle real lengths correctly
    (NVIDIA/TransformerEngine #1929, #1930, #3331, #3487), and causal attention never sees padding on the right.

    Cost:   one host read of max_seqlen.
    Errors: ValueError for a batch of several chunks, or with sequences that continue others.
    """
    if "prefix_of" in batch:
        cannot = "batch has 'prefix_of', for which these offsets have no mask"
        raise ValueError(f"context_parallel.te: {cannot}; use context_parallel_attention with the batch's layout")
    if batch["cu_seqlens_padded"].ndim != 1:
        chunks = len(batch["cu_seqlens_padded"])
        raise ValueError(f"context_parallel.te: batch holds {chunks} chunks; pass one of them")
    padded, longest = batch["cu_seqlens_padded"], int(batch["max_seqlen"])
    # The kernel needs max_seqlen as an int: read it on the host.
    real = padded if batch["cp_size"] > 1 else batch["cu_seqlens"]
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def _extension() -> ModuleType:
    # Import it by name, so that this module can be imported and type-checked without the library.
    try:
        return importlib.import_module(EXTENSION)
    except ImportError as error:
        raise ImportError(
            "context_parallel.te: needs transformer-engine; pip install -e '.[te]' in the clone"
        ) from error
