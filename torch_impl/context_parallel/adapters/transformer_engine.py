"""Adapters for Transformer Engine, which is imported only if it is installed and the tensors are on CUDA."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

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


def _extension() -> ModuleType:
    # Import it by name, so that this module can be imported and type-checked without the library.
    try:
        return importlib.import_module(EXTENSION)
    except ImportError as error:
        raise ImportError(
            "context_parallel.te: needs transformer-engine; pip install -e '.[te]' in the clone"
        ) from error
