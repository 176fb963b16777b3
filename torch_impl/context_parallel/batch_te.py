"""Batches for Transformer Engine: packed rows as one stream that is sharded over cp.

Rank r of cp holds its DualChunkSwap shard of sequence 0, then of sequence 1, and so on. The batch has the offsets of
the full stream; a kernel for one rank's stream takes `cu_seqlens_padded // cp_size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives import large_tensors
from torch_impl.context_parallel.adapters.transformer_engine import local_index
from torch_impl.context_parallel.batch_layout import BatchLayout
from torch_impl.context_parallel.kinds import Batch, CpMesh, require_tensor
from torch_impl.context_parallel.thd import PREFIXES, TABLES, by_chunk, require_layout, stream
from torch_impl.contract import Rejected, contract
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.divisibility import multiple_of, offsets_of, validate_offsets, without_fill

IDS = ("input_ids", "labels", "position_ids")  # int64 in the result, for any integer dtype in the batch


@overload
def make_cp_batch_for_te(
    cp_mesh: CpMesh | None,
    batch: Batch,
    qkv_format: Any = ...,
    padding_token_id: int = ...,
    num_chunks: int = ...,
    seq_lens_padding_value: int = ...,
) -> dict[str, Any]: ...
@overload
def make_cp_batch_for_te(
    cp_mesh: CpMesh | None,
    batch: Batch,
    qkv_format: Any = ...,
    padding_token_id: int = ...,
    num_chunks: int = ...,
    seq_lens_padding_value: int = ...,
    return_local_indices: bool = ...,
    *,
    return_layout: bool = ...,
) -> Any: ...
@contract("context_parallel.te")
def make_cp_batch_for_te(
    cp_mesh: CpMesh | None,
    batch: Batch,
    qkv_format: Any = "thd",
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
    return_local_indices: bool = False,
    *,
    return_layout: bool = False,
) -> Any:
    """This cp rank's shard of a batch of packed rows, as one stream or as `num_chunks` stacked streams.

        input_ids  "b s cp=R" or "b s d cp=R"   ->   "t/cp:packed" or "t/cp:packed d",   t = b s
        with m chunks                           ->   "m t/cp:packed" or "m t/cp:packed d",   t = b s / m

    labels, position_ids, padding_mask (True for padding) and all other tensors by token are sharded in the same way.
    The mask is computed from the lengths and replaces a `padding_mask` in the batch. `cu_seqlens` (real offsets),
    `cu_seqlens_padded` and `max_seqlen` describe the full stream, in int32. The keys are the same at every cp size and
    without a mesh. `batch` is as for `process_input_for_thd`; the only `qkv_format` is "thd".

    With `return_local_indices` this rank's positions in the stream of all rows, [t/cp] or with chunks [m t/cp], are
    returned after the batch. With `return_layout` its BatchLayout is returned last; a batch with `prefix_of` needs it.

    >>> batch = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[2, 3, 4, 5]])}
    >>> batch |= {"seq_lens": torch.tensor([[4]]), "seq_lens_padded": torch.tensor([[4]])}
    >>> make_cp_batch_for_te(None, batch)["input_ids"].shape
    torch.Size([4])

    Cost:   no collective; one copy of the shard for each key, one host copy of the lengths.
    Errors: ValueError for an unknown qkv_format, a mesh of several dims, or, on two or more ranks, a slot that is not a
            multiple of 2 * cp; TypeError if cp_mesh is not a mesh; otherwise as `split_batch_into_thd_chunks`.
    """
    _check_format(qkv_format)
    result, layout = te_batch(cp_mesh, batch, num_chunks, seq_lens_padding_value)
    require_layout(batch, return_layout)
    parts: list[Any] = [result]
    if return_local_indices:
        parts.append(layout.tokens.local_index.view(layout.local_shape))
    if return_layout:
        parts.append(layout)
    return tuple(parts) if len(parts) > 1 else result


def te_batch(
    cp_mesh: DeviceMesh | None, batch: dict[str, Any], num_chunks: int, seq_lens_padding_value: int
) -> tuple[dict[str, Any], BatchLayout]:
    """The core of `make_cp_batch_for_te`: the batch and its layout."""
    cp_size, cp_rank = _place(cp_mesh)
    # 1. Make all rows one stream, in slots that cp can shard. The slots are on the host: this waits for no device.
    full = stream(batch, num_chunks, seq_lens_padding_value)
    offsets = torch.from_numpy(full.slots.sums[0])
    validate_offsets(offsets, full.slots.total, cp_size, axis="cp", multiple=_multiple(cp_size))
    # 2. Shard with one layout for all chunks: the rank's shard of the stream is its shards of the chunks in order.
    batch_layout = full.batch_layout(cp_size, cp_rank, None if cp_mesh is None else cp_mesh.get_group())
    layout = batch_layout.tokens
    shards = _shard_tokens(full.tokens, layout)
    # 3. Then split into chunks; values that are not by token are split by rows.
    if full.chunks > 1:
        unsharded = {name: full.stacked(name, value) for name, value in full.constants.items()}
        shards = {name: by_chunk(name, x, full.chunks) for name, x in shards.items()}
    else:
        unsharded = full.constants
    return {**shards, **unsharded, **full.tables(), **_layout_fields(layout)}, batch_layout


@overload
def _shard_thd_chunk_for_te(
    batch: Batch, cp_mesh: CpMesh | None, qkv_format: Any, seq_lens_padding_value: int, padding_token_id: int
) -> dict[str, Any]: ...
@overload
def _shard_thd_chunk_for_te(
    batch: Batch,
    cp_mesh: CpMesh | None,
    qkv_format: Any,
    seq_lens_padding_value: int,
    padding_token_id: int,
    *,
    return_layout: Literal[True],
) -> tuple[dict[str, Any], BatchLayout]: ...
@contract("context_parallel.te")
def _shard_thd_chunk_for_te(
    batch: Batch,
    cp_mesh: CpMesh | None,
    qkv_format: Any,
    seq_lens_padding_value: int,
    padding_token_id: int,
    *,
    return_layout: bool = False,
) -> dict[str, Any] | tuple[dict[str, Any], BatchLayout]:
    """This cp rank's shard of one stream, a result of `process_input_for_thd` or one row of stacked chunks.

        input_ids  "t cp=R"   ->   "t/cp:packed"

    The stream is sharded by `cu_seqlens_padded`, or by `cu_seqlens` if there are no padded offsets; fill at their end
    is stripped. A missing padding mask is computed from the two offsets. Every tensor with one entry per token is
    sharded. With `return_layout` the BatchLayout of the stream [t] is returned after the batch; it carries the batch's
    `prefix_of`, and a batch with `prefix_of` needs it.

    Cost:   no collective; one copy of the shard for each key, one host copy of the offsets.
    Errors: ValueError without cu_seqlens or input_ids, for an unknown qkv_format, offsets that do not end at the
            stream's end, prefixes without `return_layout` or that are not earlier sequences, or, on two or more ranks,
            a slot that is not a multiple of 2 * cp; TypeError if batch is not a dict, cp_mesh is not a mesh, offsets
            or prefixes are not integers, or input_ids or max_seqlen are not Tensors.
    """
    # 1. Check the dict's keys and that their values are tensors, which the contract cannot.
    _check_format(qkv_format)
    for name in ("cu_seqlens", "input_ids"):
        if name not in batch:
            raise Rejected(f"batch has no {name!r}; pass a result of process_input_for_thd")
    for name in ("input_ids", "max_seqlen"):
        if name in batch:
            require_tensor(name, batch[name])
    require_layout(batch, return_layout)
    # 2. Build the layout from the offsets, validated on the host, and move its arrays to the tokens' device.
    cp_size, cp_rank = _place(cp_mesh)
    real = _offsets_without_fill(batch, "cu_seqlens")
    padded = _offsets_without_fill(batch, "cu_seqlens_padded") if "cu_seqlens_padded" in batch else real
    total, device = len(batch["input_ids"]), batch["input_ids"].device
    # Drop the fill after the last sequence, as for the offsets.
    prefixes = batch[PREFIXES][: len(padded) - 1] if PREFIXES in batch else None
    layout = TokenLayout.packed(padded, real, cp_size=cp_size, cp_rank=cp_rank, total=total, prefix_of=prefixes).on(
        device
    )
    # 3. Shard tensors by token, recompute the offsets, and pass everything else on.
    tokens = {name: x for name, x in batch.items() if _is_by_token(name, x, total)}
    unsharded = {name: x for name, x in batch.items() if name not in (*tokens, *TABLES)}
    if prefixes is not None:
        unsharded[PREFIXES] = prefixes
    longest = batch.get("max_seqlen", torch.tensor(max(padded.diff().tolist(), default=0)))
    tables = {"cu_seqlens": layout.cu_real, "cu_seqlens_padded": layout.cu_padded, "max_seqlen": longest.to(device)}
    result = {
        **_shard_tokens(tokens, layout),
        **unsharded,
        **{name: x.to(torch.int32) for name, x in tables.items()},
        **_layout_fields(layout),
    }
    group = None if cp_mesh is None else cp_mesh.get_group()
    return (result, BatchLayout(layout, (total,), group, is_stream=True)) if return_layout else result


def _shard_tokens(tokens: Mapping[str, Tensor], layout: TokenLayout) -> dict[str, Tensor]:
    """Shard every tensor by token with one index; missing positions and padding mask come from the layout."""
    index = local_index(layout)
    derived = {name: getattr(layout, name) for name in ("position_ids", "padding_mask") if name not in tokens}
    shards = {}
    for name, x in {**tokens, **derived}.items():
        # Positions of several kinds are [k, 1, t]. Embeddings may be passed as input_ids, and stay floating.
        share = large_tensors.index_select(x, index, 2 if name == "position_ids" and x.ndim == 3 else 0)
        shards[name] = share.long() if name in IDS and not share.is_floating_point() else share
    return shards


def _offsets_without_fill(batch: Mapping[str, Any], name: str) -> Tensor:
    return without_fill(offsets_of(name, batch[name]))


def _layout_fields(layout: TokenLayout) -> dict[str, Any]:
    return {"qkv_format": "thd", "cp_size": layout.cp_size, "cp_rank": layout.cp_rank}


def _is_by_token(name: str, value: Any, total: int) -> bool:
    if not isinstance(value, Tensor) or name in (*TABLES, PREFIXES) or not value.ndim:
        return False
    return value.shape[2 if name == "position_ids" and value.ndim == 3 else 0] == total


def _place(cp_mesh: DeviceMesh | None) -> tuple[int, int]:
    """The number of cp ranks, and this rank; (1, 0) without a mesh."""
    return (1, 0) if cp_mesh is None else (cp_mesh.size(), cp_mesh.get_group().rank())


def _multiple(cp_size: int) -> int:
    """The number that every slot's length must be a multiple of; a single rank takes any length."""
    return multiple_of("dual_chunk_swap", cp_size) if cp_size > 1 else 1


def _check_format(qkv_format: str) -> None:
    if qkv_format != "thd":
        raise Rejected(f"qkv_format={qkv_format!r} is not supported; pass 'thd'")
