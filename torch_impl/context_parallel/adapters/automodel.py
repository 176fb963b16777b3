"""NeMo Automodel's names for sharding over cp: the positions that a rank holds, and `ContextParallelSharder`.

Each function has Automodel's arguments, in its order. The sharder makes batches by `make_cp_batch_and_ctx`, so that a
batch is returned as a new dict; Automodel writes into the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives import all_gather, large_tensors
from torch_impl.collectives.lengths import dim_from_front
from torch_impl.context_parallel.batch_ctx import PRIMARY, make_cp_batch_and_ctx, padded_rows
from torch_impl.context_parallel.batch_layout import BatchLayout
from torch_impl.context_parallel.kinds import Batch, CpMesh, Fills, NamedMesh, OneTensor, SeqDims, require_tensor
from torch_impl.contract import (
    Device,
    Function,
    NonNegativeInt,
    PositiveInt,
    Rejected,
    ShardedAny,
    ShardedInt,
    contract,
)
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.divisibility import indivisible, multiple_of
from torch_impl.layouts.fill import Fill, fill_of
from torch_impl.layouts.token_layout import DenseKind


@contract
def contiguous_local_indices(
    cp_mesh: CpMesh, padded_seq_len: NonNegativeInt, device: Device | None = None
) -> ShardedInt[Tensor, "s/cp"]:
    """The positions that this rank holds if each rank has one block: r l to (r + 1) l - 1, l = padded_seq_len / cp.

    Errors: ValueError for a length that cp does not divide.
    """
    return _layout("contiguous", cp_mesh, padded_seq_len, device).local_index


@contract
def round_robin_local_indices(
    cp_mesh: CpMesh, padded_seq_len: NonNegativeInt, device: Device | None = None
) -> ShardedInt[Tensor, "s/cp:dual_chunk_swap"]:
    """The positions that this rank holds in DualChunkSwap order: chunks r and 2 cp - 1 - r of 2 cp equal chunks.

    Errors: ValueError for a length that 2 cp does not divide.
    """
    return _layout("dual_chunk_swap", cp_mesh, padded_seq_len, device).local_index


@contract
def shard_token_tensor_by_indices(
    tensor: ShardedAny[Tensor, "..."], local_indices: ShardedInt[Tensor, "l"], seq_dim: int = 1
) -> ShardedAny[Tensor, "..."]:
    """The positions `local_indices` of a full `tensor` along `seq_dim`. Any dtype; differentiable.

        "... s ... cp=R"   ->   "... s/cp:LAYOUT ..."

    Cost:   no collective; one copy of the shard, and one host read of the indices.
    Errors: ValueError for a dim that tensor lacks, and for an index outside the dim.
    """
    dim, index = dim_from_front("seq_dim", seq_dim, tensor), local_indices.to(tensor.device, torch.int64)
    rows = tensor.shape[dim]
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < rows:
        extremes = f"{int(index.min())} to {int(index.max())}"
        raise Rejected(f"local_indices are {extremes}, but tensor has {rows} positions along dim {seq_dim}")
    return large_tensors.index_select(tensor, index, dim)


@contract
def gather_token_tensor_by_indices(
    cp_mesh: CpMesh | None,
    tensor: ShardedAny[Tensor, "..."],
    local_indices: ShardedInt[Tensor, "l"],
    seq_dim: int = 1,
) -> ShardedAny[Tensor, "..."]:
    """Gather the full tensor from shards with the positions `local_indices` along `seq_dim`. Differentiable.

        "... s/cp:LAYOUT ..."   ->   "... s ... cp=R"

    Every rank has the result, and the ranks' cotangents are summed. Each rank has equally many positions. Without a
    mesh, or on one rank, `tensor` is returned.

    Cost:   forward 1 all_gather of the shard, 1 all_gather of the indices, and one host read of these; backward 1
            reduce_scatter, in float32 or wider.
    Errors: ValueError for a dim that tensor lacks, and for another number of indices than of its rows; on all ranks,
            after the indices are exchanged, ValueError unless all indices together are each position once.
    """
    dim = dim_from_front("seq_dim", seq_dim, tensor)
    if cp_mesh is None or cp_mesh.size() == 1:
        return tensor
    if len(local_indices) != tensor.shape[dim]:
        rows = f"tensor has {tensor.shape[dim]} positions along dim {seq_dim}"
        raise Rejected(f"local_indices has {len(local_indices)} and {rows}; pass one for each")
    group = cp_mesh.get_group()
    order = all_gather(local_indices.to(tensor.device, torch.int64), group, out="I")
    positions, inverse = order.sort()
    if not torch.equal(positions, torch.arange(len(order), device=order.device)):
        raise Rejected(f"local_indices of all ranks are not 0 to {len(order) - 1}, each once; pass each rank's own")
    return large_tensors.index_select(all_gather(tensor, group, out="R", dim=dim), inverse, dim)


@contract
def shard_sequence_for_cp_round_robin(
    cp_mesh: CpMesh | None, tensor: ShardedAny[Tensor, "..."], *, seq_dim: int = 1, pad_value: Fill = 0
) -> tuple[ShardedAny[Tensor, "..."], ShardedInt[Tensor, "l"], int]:
    """Pad `tensor` on the right and shard it in DualChunkSwap order: (shard, its positions, padded length).

    The length along `seq_dim` is padded by `pad_value` to a multiple of 2 cp. Without a mesh, or on one
    rank, `tensor` is returned as it is. Differentiable.

    Cost:   no collective; one copy of the shard, and one of tensor if it is padded.
    Errors: ValueError for a dim that tensor lacks, and a `pad_value` that its dtype cannot represent.
    """
    multiple = 1 if cp_mesh is None else multiple_of("dual_chunk_swap", cp_mesh.size())
    return _shard_sequence("dual_chunk_swap", cp_mesh, tensor, seq_dim, pad_value, multiple)


@contract
def shard_sequence_for_cp_contiguous(
    cp_mesh: CpMesh | None,
    tensor: ShardedAny[Tensor, "..."],
    *,
    seq_dim: int = 1,
    pad_value: Fill = 0,
    pad_multiple: PositiveInt = 1,
) -> tuple[ShardedAny[Tensor, "..."], ShardedInt[Tensor, "l"], int]:
    """Pad `tensor` on the right and give each rank one block of it: (shard, its positions, padded length).

    The length along `seq_dim` is padded by `pad_value` to a multiple of cp * max(pad_multiple, 2). Without a
    mesh, or on one rank, `tensor` is returned as it is. Differentiable.

    Cost:   no collective; one copy of the shard, and one of tensor if it is padded.
    Errors: ValueError for a dim that tensor lacks, a `pad_multiple` below 1, and a `pad_value` that its dtype cannot
            represent.
    """
    multiple = _block_multiple(1 if cp_mesh is None else cp_mesh.size(), pad_multiple)
    return _shard_sequence("contiguous", cp_mesh, tensor, seq_dim, pad_value, multiple)


@dataclass(frozen=True)
class ShardLayout:
    """How the last batch was sharded, in the caller's coordinates.

    Dense rows have `original_seq_len` tokens, padded to `padded_seq_len`. Packed rows of `input_row_shape` [b, s] are
    one stream of `padded_seq_len` tokens. `local_token_global_indices` are this rank's positions of a row or of the
    stream. `batch_layout` is the same for a batch that this package has sharded.
    """

    local_token_global_indices: Tensor | None = None
    original_seq_len: int | None = None
    padded_seq_len: int | None = None
    input_row_shape: tuple[int, ...] | None = None
    batch_layout: BatchLayout | None = None


ContextFactory = Callable[[], AbstractContextManager[Any]]


class ContextParallelSharder:
    """Shards a batch over cp, and then shards and gathers any tensor with an entry for each of its tokens.

    With a `batch`, its layout decides: `qkv_format="thd"` packs the rows as `make_cp_batch_for_te` does, anything else
    is dense rows in DualChunkSwap order. A `model` may have a method `prepare_model_inputs_for_cp`, which returns
    entries for the batch and may return its own sharder as `cp_sharder`. `invoke_pre_embed=False` does not call it.

    With `shard_batch`, a function `(cp_mesh, tp_mesh, batch, *, loss_mask, padding_token_id) -> (factory, batch,
    ShardLayout or None)` shards instead. This rank's positions come from the ShardLayout, or if it has none, from
    `local_token_global_indices(cp_mesh, padded_seq_len, device)`.

    Cost:   as `make_cp_batch_and_ctx`.
    Errors: TypeError without batch and shard_batch, and for both; as `make_cp_batch_and_ctx`.
    """

    @contract("ContextParallelSharder")
    def __init__(
        self,
        model: Any = None,
        device_mesh: NamedMesh | None = None,
        batch: Batch | None = None,
        *,
        shard_batch: Function | None = None,
        local_token_global_indices: Function | None = None,
        shard_layout: ShardLayout | None = None,
        padding_token_id: int = 0,
        num_chunks: PositiveInt = 1,
        loss_mask: OneTensor | None = None,
        invoke_pre_embed: bool = True,
        extra_seq_buffers: SeqDims | None = None,
    ) -> None:
        if (batch is None) == (shard_batch is None):
            arguments = "neither batch nor shard_batch" if batch is None else "batch and shard_batch"
            raise Rejected(f"has {arguments}; pass the batch to shard, or a function that shards it", TypeError)
        self.shard_layout, self.loss_mask, self.padding_token_id = shard_layout, loss_mask, padding_token_id
        self.cp_mesh, self.tp_mesh = _axis(device_mesh, "cp"), _axis(device_mesh, "tp")
        self.shard_batch = shard_batch or partial(_shard_batch, device_mesh, num_chunks, extra_seq_buffers)
        self.local_token_global_indices = local_token_global_indices
        if batch is None:
            return
        if invoke_pre_embed and self.cp_mesh is not None and hasattr(model, "prepare_model_inputs_for_cp"):
            prepared = dict(model.prepare_model_inputs_for_cp(batch, num_chunks=num_chunks))
            sharder = prepared.pop("cp_sharder", None)
            batch.update(prepared)
            if sharder is not None:
                self.shard_batch, self.shard_layout = sharder.shard_batch, sharder.shard_layout
                self.local_token_global_indices = sharder.local_token_global_indices

    def shard(self, batch: dict[str, Any]) -> tuple[ContextFactory, dict[str, Any]]:
        """(factory, batch): inside `with factory():` the tokens of `batch` are sharded. Keeps its layout.

        Cost:   as `make_cp_batch_and_ctx`, or as the function given.
        Errors: as there.
        """
        factory, batch, self.shard_layout = self.shard_batch(
            self.cp_mesh, self.tp_mesh, batch, loss_mask=self.loss_mask, padding_token_id=self.padding_token_id
        )
        return factory, batch

    @contract("ContextParallelSharder.shard_token_tensor")
    def shard_token_tensor(
        self, tensor: ShardedAny[Tensor, "..."], seq_dim: int = 1, fill: Fill | None = None
    ) -> ShardedAny[Tensor, "..."]:
        """Shard `tensor` as the batch was: dense rows along `seq_dim`, packed rows from their dims [b, s, ...].

        A tensor of the batch's own length is padded by `fill`; one of the padded length needs none.

        Cost:   no collective; one copy of the shard, and one of tensor if it is padded.
        Errors: ValueError for another length, a padded batch without `fill`, and a `fill` that the dtype cannot
                represent; before `shard`, as `positions`.
        """
        layout = self.shard_layout or ShardLayout()
        fill = None if fill is None else fill_of(tensor, fill, "fill")
        if layout.input_row_shape is not None and layout.batch_layout is not None:
            return layout.batch_layout.shard(tensor)
        if layout.input_row_shape is not None and tensor.shape[:2] == layout.input_row_shape:
            tensor, seq_dim = tensor.flatten(0, 1), 0
        dim = dim_from_front("seq_dim", seq_dim, tensor)
        length, padded = tensor.shape[dim], layout.padded_seq_len
        if padded is not None and length != padded:
            if length != layout.original_seq_len:
                lengths = f"{layout.original_seq_len} positions, padded to {padded}"
                raise Rejected(f"tensor has {length} along dim {seq_dim}, but the batch {lengths}; pass one of these")
            if fill is None:
                raise Rejected(f"the batch is padded from {length} to {padded} positions; pass the fill of tensor")
            tensor = _pad(tensor, dim, padded - length, fill)
        return shard_token_tensor_by_indices(tensor, self.positions(tensor.shape[dim], tensor.device), dim)

    @contract("ContextParallelSharder.gather_token_tensor")
    def gather_token_tensor(
        self, tensor: ShardedAny[Tensor, "..."], seq_dim: int = 1, trim: bool = False
    ) -> ShardedAny[Tensor, "..."]:
        """The full tensor in the order of the batch; with `trim` without padding, packed rows as [b, s, ...].

        Every rank has the result, and the ranks' cotangents are summed.

        Cost:   forward 1 all_gather; backward 1 reduce_scatter, in float32 or wider; as
                `gather_token_tensor_by_indices` for a function that shards.
        Errors: ValueError for a shard of another length, and for `trim` before `shard`; as `positions`.
        """
        layout, dim = self.shard_layout or ShardLayout(), dim_from_front("seq_dim", seq_dim, tensor)
        if layout.input_row_shape is not None and layout.batch_layout is not None:
            rows = layout.batch_layout.gather(tensor)
            return rows if trim else rows.flatten(0, 1)
        ranks = 1 if self.cp_mesh is None else self.cp_mesh.size()
        index = self.positions(ranks * tensor.shape[dim], tensor.device)
        if layout.batch_layout is None or layout.batch_layout.group is None:
            full = gather_token_tensor_by_indices(self.cp_mesh, tensor, index, dim)
        else:  # this package's layout knows the positions of every rank
            full = layout.batch_layout.tokens.unshard(tensor, dim, layout.batch_layout.group)
        if not trim:
            return full
        if layout.input_row_shape is not None:
            return full.unflatten(dim, layout.input_row_shape)
        if layout.original_seq_len is None:
            raise Rejected("trim=True needs a batch's length; call shard(batch) first, or pass trim=False")
        return full.narrow(dim, 0, layout.original_seq_len)

    def positions(self, padded_seq_len: int, device: torch.device | str | None = None) -> Tensor:
        """This rank's positions of `padded_seq_len` on all ranks.

        Errors: ValueError before `shard` without `local_token_global_indices`, and for another length than the batch's.
        """
        layout = self.shard_layout or ShardLayout()
        if layout.local_token_global_indices is not None:
            if layout.padded_seq_len not in (None, padded_seq_len):
                lengths = f"{padded_seq_len} positions on all ranks, the batch {layout.padded_seq_len}"
                raise ValueError(f"ContextParallelSharder: the tensor has {lengths}; pass a tensor of this batch")
            return layout.local_token_global_indices.to(device)
        if self.local_token_global_indices is None:
            raise ValueError("ContextParallelSharder: no batch is sharded yet; call shard(batch) first")
        return self.local_token_global_indices(self.cp_mesh, padded_seq_len, device)


@contract
def shard_batch_load_balanced(
    cp_mesh: CpMesh | None,
    tp_mesh: Any,
    batch: Batch,
    *,
    loss_mask: OneTensor | None = None,
    padding_token_id: int = 0,
    extra_seq_buffers: SeqDims | None = None,
) -> tuple[ContextFactory, dict[str, Any], ShardLayout]:
    """Shard dense rows in DualChunkSwap order inside `with factory():`; returns (factory, batch, layout).

    `cp_mesh` is the mesh of cp alone, `mesh["cp"]`; `tp_mesh` is not read.

    Cost:   as `make_cp_batch_and_ctx`.
    Errors: as there; ValueError if the mesh's dim is not named cp.
    """
    if cp_mesh is not None and cp_mesh.mesh_dim_names != ("cp",):
        raise Rejected(f"cp_mesh has the dims {cp_mesh.mesh_dim_names}; pass mesh['cp']")
    factory, sharded, layout = make_cp_batch_and_ctx(
        cp_mesh,
        batch,
        loss_mask,
        padding_token_id=padding_token_id,
        extra_seq_buffers=extra_seq_buffers,
        return_layout=True,
    )
    return factory, sharded, _shard_layout(layout)


@contract
def shard_batch_contiguous(
    cp_mesh: CpMesh | None,
    tp_mesh: Any,
    batch: Batch,
    *,
    loss_mask: OneTensor | None = None,
    padding_token_id: int = 0,
    pad_multiple: PositiveInt = 1,
    extra_seq_keys: SeqDims | None = None,
    extra_pad_values: Fills | None = None,
    shard_primary: bool = True,
) -> tuple[ContextFactory, dict[str, Any], ShardLayout]:
    """Pad dense rows on the right and give each rank one block of them; returns (nullcontext, batch, layout).

        input_ids  "b s"   ->   "b s/cp",   s padded to a multiple of cp * max(pad_multiple, 2)

    For a model whose attention exchanges keys itself, or `context_parallel_attention(layout="contiguous")`. The batch
    is a new dict; positions, masks and fills are as in `make_cp_batch_and_ctx`. `extra_seq_keys` names entries with the
    sequence at another dim, {"groups": 0}; `extra_pad_values` has a fill for some of them. A key that the batch lacks,
    such as a text's images, is left out. With `shard_primary=False` `input_ids` and `inputs_embeds` stay full and
    unpadded: the model shards them by `shard_sequence_for_cp_contiguous`. Without a mesh, or on one rank, nothing is
    padded; `tp_mesh` is not read.

    Cost:   no collective; two copies of each tensor, and one host read of the mask and positions.
    Errors: as `make_cp_batch_and_ctx`; ValueError for a fill without a key, or one that its dtype cannot represent.
    """
    keys, fills = extra_seq_keys or {}, extra_pad_values or {}
    if unknown := [name for name in fills if name not in keys]:
        raise Rejected(f"extra_pad_values names {unknown[0]!r}; extra_seq_keys has {', '.join(keys) or 'nothing'}")
    fills = {
        name: fill_of(require_tensor(name, batch[name]), fill, f"extra_pad_values[{name!r}]")
        for name, fill in fills.items()
        if name in batch
    }
    group = None if cp_mesh is None else cp_mesh.get_group()
    cp_size, cp_rank = (1, 0) if group is None else (group.size(), group.rank())
    multiple = _block_multiple(cp_size, pad_multiple)
    dims = {name: dim for name, dim in keys.items() if name in batch}
    rows = padded_rows(batch, loss_mask, multiple, {**fills, "input_ids": padding_token_id}, dims, "extra_seq_keys")
    device = rows.entries["position_ids"].device
    tokens = TokenLayout.dense(
        "contiguous", rows.length, cp_size=cp_size, cp_rank=cp_rank, device=device, real_length=rows.shape[1]
    )
    sharded = {name: tokens.shard(rows.entries[name], dim) for name, dim in rows.dims.items()}
    full = {} if shard_primary else {name: batch[name] for name in PRIMARY if name in rows.entries}
    return nullcontext, {**rows.entries, **sharded, **full}, _shard_layout(BatchLayout(tokens, rows.shape, group))


def _shard_batch(
    device_mesh: DeviceMesh | None,
    num_chunks: int,
    extra_seq_buffers: dict[str, int] | None,
    cp_mesh: DeviceMesh | None,
    tp_mesh: DeviceMesh | None,
    batch: dict[str, Any],
    *,
    loss_mask: Tensor | None,
    padding_token_id: int,
) -> tuple[ContextFactory, dict[str, Any], ShardLayout]:
    """A `shard_batch`; the sharder binds its first three arguments."""
    factory, sharded, layout = make_cp_batch_and_ctx(
        device_mesh,
        batch,
        loss_mask,
        use_te=batch.get("qkv_format") == "thd",
        padding_token_id=padding_token_id,
        num_chunks=num_chunks,
        extra_seq_buffers=extra_seq_buffers,
        return_layout=True,
    )
    return factory, sharded, _shard_layout(layout)


def _shard_layout(layout: BatchLayout) -> ShardLayout:
    tokens = layout.tokens
    rows, length = (layout.shape, None) if layout.is_stream else (None, layout.shape[1])
    return ShardLayout(tokens.local_index, length, tokens.total, rows, layout)


def _layout(kind: DenseKind, cp_mesh: DeviceMesh, length: int, device: torch.device | str | None) -> TokenLayout:
    group = cp_mesh.get_group()
    if problem := indivisible("padded_seq_len", length, "cp", group.size(), kind):
        raise Rejected(problem)
    return TokenLayout.dense(kind, length, cp_size=group.size(), cp_rank=group.rank(), device=device)


def _block_multiple(ranks: int, pad_multiple: int) -> int:
    """The multiple that a sequence of blocks is padded to."""
    return 1 if ranks == 1 else ranks * max(pad_multiple, 2)


def _axis(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """The submesh of an axis, or None without it."""
    return mesh[name] if mesh is not None and name in (mesh.mesh_dim_names or ()) else None


def _shard_sequence(
    kind: DenseKind, cp_mesh: DeviceMesh | None, tensor: Tensor, seq_dim: int, pad_value: float, multiple: int
) -> tuple[Tensor, Tensor, int]:
    dim = dim_from_front("seq_dim", seq_dim, tensor)
    if cp_mesh is None or cp_mesh.size() == 1:
        return tensor, torch.arange(tensor.shape[dim], device=tensor.device), tensor.shape[dim]
    padded = _pad(tensor, dim, -tensor.shape[dim] % multiple, fill_of(tensor, pad_value, "pad_value"))
    layout = _layout(kind, cp_mesh, padded.shape[dim], tensor.device)
    return layout.shard(padded, dim), layout.local_index, padded.shape[dim]


def _pad(x: Tensor, dim: int, more: int, fill: float | int) -> Tensor:
    """`x` with `more` positions of `fill` on the right of `dim`."""
    return F.pad(x, [*[0, 0] * (x.ndim - 1 - dim), 0, more], value=fill) if more else x
