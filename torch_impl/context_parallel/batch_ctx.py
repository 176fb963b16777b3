"""Dense batches: rows are padded to a length that cp can shard, sharded inside a context, and full outside it.

Rank r of cp holds chunks r and 2 cp - 1 - r of 2 cp equal chunks of every row (DualChunkSwap).

The columns of an attention mask would have to be sharded with the keys. Instead the mask is read once, on the full
batch, and dropped: padding on the right becomes a padding mask, because causal attention never sees it, and any other
mask is rejected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal, overload

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives.lengths import dim_from_front
from torch_impl.context_parallel.batch_layout import BatchLayout
from torch_impl.context_parallel.batch_te import te_batch
from torch_impl.context_parallel.kinds import Batch, NamedMesh, OneTensor, SeqDims, require_tensor
from torch_impl.context_parallel.thd import PREFIXES, require_layout, slots_of_lengths
from torch_impl.context_parallel.train_context import SequenceContext
from torch_impl.contract import Instance, Rejected, contract
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.divisibility import first, multiple_of

FUNCTION = "context_parallel.batch"
BY_TOKEN = ("input_ids", "inputs_embeds", "labels", "position_ids", "loss_mask", "padding_mask")
FILLS = {"labels": -100, "padding_mask": True}  # input_ids are padded by the caller's id, all else by 0
PRIMARY = ("input_ids", "inputs_embeds")
BUFFERS = "extra_seq_buffers"  # the argument that has the sequence dims of further entries, by its usual name
NONE = -1000  # marks an unused slot in a table of lengths


@dataclass(frozen=True)
class BatchContext:
    """A factory of the context that shards the batch; it can be called any number of times.

    `layout.unshard(x, dim, group, trim=True)` returns a full result without the padding.
    """

    context: SequenceContext
    layout: TokenLayout
    original_length: int
    padded_length: int
    batch_layout: BatchLayout

    def __call__(self) -> AbstractContextManager[Any]:
        return self.context


Factory = Callable[[], AbstractContextManager[Any]]
TrueOrFalse = Annotated[Any, Instance(bool, "pass True or False")]


@overload
def make_cp_batch_and_ctx(
    device_mesh: NamedMesh | None,
    batch: Batch,
    loss_mask: OneTensor | None = ...,
    use_te: Any = ...,
    padding_token_id: int = ...,
    num_chunks: int = ...,
    seq_lens_padding_value: int = ...,
    extra_seq_buffers: SeqDims | None = ...,
) -> tuple[Factory, dict[str, Any]]: ...
@overload
def make_cp_batch_and_ctx(
    device_mesh: NamedMesh | None,
    batch: Batch,
    loss_mask: OneTensor | None = ...,
    use_te: Any = ...,
    padding_token_id: int = ...,
    num_chunks: int = ...,
    seq_lens_padding_value: int = ...,
    extra_seq_buffers: SeqDims | None = ...,
    *,
    return_layout: Literal[True],
) -> tuple[Factory, dict[str, Any], BatchLayout]: ...
@contract(FUNCTION)
def make_cp_batch_and_ctx(
    device_mesh: NamedMesh | None,
    batch: Batch,
    loss_mask: OneTensor | None = None,
    use_te: TrueOrFalse = False,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
    extra_seq_buffers: SeqDims | None = None,
    *,
    return_layout: bool = False,
) -> tuple[Factory, dict[str, Any]] | tuple[Factory, dict[str, Any], BatchLayout]:
    """Pad a batch, and make a factory of the context that shards it for one training step: `with factory():`.

        input_ids  "b s"   ->   inside  "b s/cp:dual_chunk_swap",   s padded to a multiple of 2 * cp

    Returns (factory, batch). On one rank, or on a mesh without `cp`, the batch is returned unchanged. With `use_te` the
    batch comes from `make_cp_batch_for_te`. Otherwise it is a new dict of new tensors, padded on the right: ids by
    `padding_token_id`, labels by -100, masks and floats by 0, and positions continue. All tensors [b, s, ...] are
    sharded on entering the context and full again on leaving it; a tensor that requires a gradient is sharded here and
    stays sharded. `loss_mask` joins the batch, and the caller's tensor is sharded and restored with it. Labels must be
    shifted before this call: inside, the next token may be on another rank.

    `num_chunks` and `seq_lens_padding_value` are for `use_te` only. `extra_seq_buffers` names entries of the batch with
    the sequence at another dim, {"teacher_logits": 0}: they are padded by 0 and sharded too; not for `use_te`. With
    `return_layout` the batch's BatchLayout is returned last, at every cp size.

    `attention_mask` is dropped if it is all ones or padding on the right. Padding becomes `padding_mask` (True), and
    attention inside must then be causal.

    Cost:   no collective; two copies of each tensor, and one host read of the mask and positions.
    Errors: ValueError for a mesh of several ranks without names (its cp dim is unknown), left padding, holes, packing
            ids, mask entries other than 0 and 1, a mask or a tensor by token of a wrong shape, input_ids that are not
            [b, s], a batch without input_ids and inputs_embeds, or extra buffers that are not in it or have another
            length; TypeError if batch is not a dict, device_mesh is not a mesh, extra_seq_buffers is not a dict of
            dims, or an entry by token is not a Tensor.
            RuntimeWarning for positions that restart inside a row without a mask: those sequences see each other.
    """
    cp_mesh, seq_dims = _cp_mesh(device_mesh), extra_seq_buffers or {}
    factory: Factory = nullcontext
    if use_te:
        if seq_dims:
            raise Rejected("extra_seq_buffers are for dense rows; with use_te=True put them [b, s, ...]")
        packed = batch if loss_mask is None else {**batch, "loss_mask": loss_mask}
        result, layout = te_batch(cp_mesh, packed, num_chunks, seq_lens_padding_value)
        require_layout(batch, return_layout)
    elif PREFIXES in batch:
        raise Rejected(f"batch has {PREFIXES!r}, and a dense row is one sequence; pass use_te=True")
    elif cp_mesh is None or cp_mesh.size() == 1:
        if seq_dims:  # reject a wrong name or dim on one rank too
            _extra_dims(batch, seq_dims, _shape(batch)[1])
        # If no layout is asked for, nothing else in the batch is read.
        if not return_layout:
            return nullcontext, batch
        result, layout = batch, _layout_of_one_rank(cp_mesh, batch)
    else:
        factory, result = _shard_inside(cp_mesh, batch, loss_mask, padding_token_id, seq_dims)
        layout = factory.batch_layout
    return (factory, result, layout) if return_layout else (factory, result)


@contract(FUNCTION)
def _build_position_ids(batch: Batch, device: torch.device | str) -> dict[str, Any]:
    """Add `position_ids` 0, 1, 2, ... for each row, "b s", to the batch, unless it has them; returns the same dict.

    With `seq_lens_padded` positions restart in each slot. The new tensor is on `device`.

    Cost:   no collective; with seq_lens_padded one host copy of the lengths.
    Errors: ValueError without input_ids [b, s] and inputs_embeds [b, s, d], or for slots that do not fit the rows;
            TypeError if batch is not a dict, or one of these entries is not a Tensor.
    """
    return with_position_ids(batch, device)


def with_position_ids(batch: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    """The core of `_build_position_ids`."""
    if batch.get("position_ids") is not None:
        return batch
    rows, size = _shape(batch)
    if "seq_lens_padded" in batch:
        padded = require_tensor("seq_lens_padded", batch["seq_lens_padded"])
        padded = torch.where(padded < 0, NONE, padded)
        slots = slots_of_lengths(padded, padded, rows, size, NONE)
        layout = TokenLayout.packed(torch.from_numpy(slots.sums[0]), cp_size=1, cp_rank=0)
        batch["position_ids"] = layout.position_ids.view(rows, size).to(device)
    else:
        batch["position_ids"] = torch.arange(size, device=device).repeat(rows, 1)
    return batch


def _layout_of_one_rank(cp_mesh: DeviceMesh | None, batch: dict[str, Any]) -> BatchLayout:
    """The layout of a batch that is neither sharded nor padded."""
    shape = _shape(batch)
    tokens = TokenLayout.dense("dual_chunk_swap", shape[1], cp_size=1, cp_rank=0, device=_device(batch))
    return BatchLayout(tokens, shape, None if cp_mesh is None else cp_mesh.get_group())


def _shard_inside(
    cp_mesh: DeviceMesh,
    batch: dict[str, Any],
    loss_mask: Tensor | None,
    padding_token_id: int,
    seq_dims: dict[str, int],
) -> tuple[BatchContext, dict[str, Any]]:
    """The padded batch, and the context that shards it."""
    # 1. Pad the rows to a length that cp can shard. Positions that restart without a mask mean packed rows, which this
    #    path cannot keep apart; they are legal, so it only warns.
    cp_size, group = cp_mesh.size(), cp_mesh.get_group()
    multiple = multiple_of("dual_chunk_swap", cp_size)
    rows = padded_rows(batch, loss_mask, multiple, {"input_ids": padding_token_id}, seq_dims)
    if rows.restarts:
        warnings.warn(
            f"{FUNCTION}: position_ids restart inside a row without a mask, so its documents attend to each other; "
            "pass use_te=True with seq_lens",
            RuntimeWarning,
            stacklevel=4,
        )
    size, padded = rows.shape[1], rows.entries
    layout = TokenLayout.dense(
        "dual_chunk_swap",
        rows.length,
        cp_size=cp_size,
        cp_rank=group.rank(),
        device=_device(batch),
        real_length=size,
    )
    # 2. Collect the buffers that the context shards in place, outside autograd. Tensors that require a gradient are
    #    sharded here instead.
    buffers: list[tuple[Tensor, int, Tensor | None]] = []
    for name, dim in rows.dims.items():
        if padded[name].requires_grad:
            padded[name] = layout.shard(padded[name], dim)
        else:
            buffers.append((padded[name], dim, None))
    # 3. The caller's loss_mask is not padded: inside it is a shard of the padded copy, and on leaving it is restored.
    if loss_mask is not None:
        buffers.append((loss_mask, 1, padded["loss_mask"]))
    tensors, buffer_dims, full_values = zip(*buffers, strict=True) if buffers else ((), (), ())
    reason = "would see the padding of a dropped attention_mask" if rows.masked else None
    context = SequenceContext(
        group, layout, None, tensors, buffer_dims, [False] * len(tensors), full_values, causal_only=reason
    )
    return BatchContext(context, layout, size, rows.length, BatchLayout(layout, rows.shape, group)), padded


@dataclass(frozen=True)
class PaddedRows:
    """Dense rows of `shape` [b, s], padded on the right to `length` tokens.

    `dims` are the sequence dims of the entries by token. `masked` says whether an attention mask with padding was
    dropped, `restarts` whether the caller's positions restart inside a row without such a mask.
    """

    entries: dict[str, Any]
    dims: dict[str, int]
    shape: tuple[int, int]
    length: int
    masked: bool
    restarts: bool


def padded_rows(
    batch: dict[str, Any],
    loss_mask: Tensor | None,
    multiple: int,
    fills: Mapping[str, float | int],
    seq_dims: Mapping[str, int],
    argument: str = BUFFERS,
) -> PaddedRows:
    """A new batch of new tensors, padded to a `multiple` of positions, with positions and without attention mask.

    An entry is padded by its value in `fills`, labels by -100, masks by True, all others by 0. `seq_dims` are the
    sequence dims of entries that are not [b, s, ...]; `argument` is the name of `seq_dims` in the caller, for errors.

    Errors: Rejected as `make_cp_batch_and_ctx`.
    """
    shape = _shape(batch)
    more = -shape[1] % multiple
    extra = _extra_dims(batch, seq_dims, shape[1], argument)
    full, masked = _full_batch(batch, loss_mask, shape, more, _device(batch))
    found = {name: extra[name] if name in extra else _dim(name, x, shape) for name, x in full.items()}
    dims = {name: dim for name, dim in found.items() if dim is not None}
    fills = {**FILLS, **fills}
    padded = {name: _pad_right(name, full[name], dim, shape, more, fills.get(name, 0)) for name, dim in dims.items()}
    # Positions that were added here do not restart.
    has_positions = batch.get("position_ids") is not None or "seq_lens_padded" in batch
    is_restarting = has_positions and batch.get("attention_mask") is None and restarts(full["position_ids"])
    return PaddedRows({**full, **padded}, dims, shape, shape[1] + more, masked, is_restarting)


def _extra_dims(
    batch: dict[str, Any], seq_dims: Mapping[str, int], size: int, argument: str = BUFFERS
) -> dict[str, int]:
    """The sequence dims of the extra entries, counted from the front; ValueError unless each has length `size`."""
    dims = {}
    for name, dim in seq_dims.items():
        if name not in batch:
            raise Rejected(f"{argument} names {name!r}; the batch has {', '.join(batch)}")
        x = require_tensor(name, batch[name])
        dims[name] = dim_from_front(f"{argument}[{name!r}]", dim, x)
        if x.shape[dims[name]] != size:
            length = f"{name} has {x.shape[dims[name]]} positions along dim {dim}, the rows have {size}"
            raise Rejected(f"{length}; name the dim of its sequence")
    return dims


def _full_batch(
    batch: dict[str, Any], loss_mask: Tensor | None, shape: tuple[int, int], more: int, device: torch.device
) -> tuple[dict[str, Any], bool]:
    """The batch with positions and padding mask, without attention mask; and whether that mask had padding."""
    # 1. Check that there is one loss mask, and that every tensor by token has the shape of the tokens.
    full = {name: x for name, x in batch.items() if name != "attention_mask" and x is not None}
    if loss_mask is not None:
        if full.get("loss_mask", loss_mask) is not loss_mask:
            raise Rejected("loss_mask is given and another is in the batch; leave one out")
        full["loss_mask"] = loss_mask
    for name in BY_TOKEN:
        if name in full and _dim(name, require_tensor(name, full[name]), shape) is None:
            tokens = f"the batch has {list(shape)} tokens"
            raise Rejected(f"{name} is {list(full[name].shape)}, {tokens}; give one for each")
    # 2. Read the mask, and add positions.
    mask = batch.get("attention_mask")
    padding_mask = None if mask is None else padding_of(require_tensor("attention_mask", mask), shape)
    with_position_ids(full, device)
    # 3. Add the padding mask if there is or will be padding.
    if mask is not None or more or "padding_mask" in full:
        padding = full.get("padding_mask", torch.zeros(shape, dtype=torch.bool, device=device))
        full["padding_mask"] = padding if padding_mask is None else padding | padding_mask
    return full, padding_mask is not None


def _pad_right(name: str, x: Tensor, dim: int, shape: tuple[int, int], more: int, fill: float | int) -> Tensor:
    """A new tensor with `more` positions of `fill` on the right of `dim`."""
    # Positions continue from the last one of each row, and a single row for all is expanded to every row.
    if name == "position_ids":
        steps = torch.arange(1, more + 1, device=x.device)
        last = x[..., -1:] if shape[1] else x.new_full((*x.shape[:-1], 1), -1)
        return torch.cat([x, last + steps], -1).expand(*x.shape[:-2], shape[0], -1).contiguous()
    # F.pad counts dims from the last. Copy even without padding, because the context changes the tensor in place.
    trailing = [0, 0] * (x.ndim - 1 - dim)
    return F.pad(x, [*trailing, 0, more], value=fill) if more else x.clone()


def _dim(name: str, x: Any, shape: tuple[int, int]) -> int | None:
    """The sequence dim of a tensor by token, or None for any other value."""
    if not isinstance(x, Tensor):
        return None
    if name == "position_ids":
        fits = x.shape[-1:] == shape[1:] and x.ndim in (2, 3) and x.shape[-2] in (1, shape[0])
        return x.ndim - 1 if fits else None
    return 1 if x.shape[:2] == shape else None


def _shape(batch: dict[str, Any]) -> tuple[int, int]:
    """The number of rows, and the number of tokens in a row."""
    for name, min_dims in (("input_ids", 2), ("inputs_embeds", 3)):
        if batch.get(name) is not None:
            shape = require_tensor(name, batch[name]).shape
            if len(shape) < min_dims:
                dims = "[b, s, d]" if min_dims > 2 else "[b, s]"
                raise Rejected(f"{name} is {list(shape)}; it is {dims}, one row for each sequence")
            return shape[0], shape[1]
    present = ", ".join(name for name, value in batch.items() if value is not None) or "nothing"
    raise Rejected(f"batch has neither input_ids nor inputs_embeds; it has {present}; add one of the two")


def _device(batch: dict[str, Any]) -> torch.device:
    """The device of the tokens."""
    return next(batch[name] for name in PRIMARY if batch.get(name) is not None).device


def _cp_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The submesh of the dim named cp, or None if there is none. Errors: ValueError for several ranks without names."""
    if device_mesh is not None and not device_mesh.mesh_dim_names and device_mesh.size() > 1:
        raise Rejected(
            f"the mesh of {device_mesh.size()} ranks has no names, so that none of its dims shards the "
            'sequence; pass one with mesh_dim_names=("cp",)'
        )
    has_cp = device_mesh is not None and "cp" in (device_mesh.mesh_dim_names or ())
    return device_mesh["cp"] if device_mesh is not None and has_cp else None


def padding_of(attention_mask: Shaped[Tensor, "*a"], shape: tuple[int, int]) -> Bool[Tensor, "b s"] | None:
    """Turn an attention mask of `shape` into a padding mask, True at padding on the right; None if it is all ones.

    Cost:   one read by the host.

    Errors: ValueError for left padding, holes, packing ids, entries other than 0 and 1, or a mask of another shape.
    """
    if attention_mask.shape != shape:
        rule = f"the batch has {list(shape)} tokens; give one for each"
        if attention_mask.ndim != 2:
            rule = "under cp it is [b, s]; packed sequences go with use_te=True, where cu_seqlens keep them apart"
        raise Rejected(f"attention_mask is {list(attention_mask.shape)}, {rule}")
    # 1. Compute facts about each row, on the device.
    zeros = attention_mask == 0
    entries = attention_mask.double()
    is_fraction = ((entries != entries.trunc()) | entries.isinf()).any(1)
    real = (~zeros).sum(1)
    leading = zeros.long().cumprod(1).sum(1)
    # 2. Compare with the expected mask, which has the same number of ones in each row, but all at the front.
    is_padding = torch.arange(zeros.shape[1], device=zeros.device) >= real[:, None]
    smallest, largest = attention_mask.aminmax(dim=1) if zeros.shape[1] else (real, real)
    is_odd = (zeros != is_padding).any(1)
    # 3. Copy all facts to the host at once, and report the first wrong row.
    facts = torch.stack([real, leading, is_odd, smallest < 0, largest.long(), is_fraction]).cpu()
    for problem in _mask_problems(facts, zeros.shape[1]):
        raise Rejected(f"attention_mask: {problem}")
    return is_padding if bool((facts[0] < zeros.shape[1]).any()) else None


def restarts(position_ids: Tensor) -> bool:
    """Whether positions restart inside a row. Cost: one read by the host."""
    return position_ids.ndim == 2 and bool((position_ids.diff() <= 0).any())


def _mask_problems(facts: Tensor, size: int) -> Iterator[str]:
    """The problems of a mask, found from facts about its rows, with the most specific reason first.

    The facts about a row are: the number of ones, the number of leading zeros, whether a zero comes before a one,
    whether an entry is negative, the largest entry, and whether an entry is not a finite integer.
    """
    leading, is_odd, is_additive, largest, is_fraction = facts[1:]
    for b in first(is_additive > 0):
        yield f"row {b} has a negative entry; pass ones, and zeros for padding"
    for b in first(is_fraction > 0):
        yield f"row {b} has an entry other than 0 and 1; pass ones, and zeros for padding"
    for b in first(largest > 1):
        packed = f"row {b} has {int(largest[b])}, an id of packed sequences"
        yield f"{packed}; pass use_te=True with seq_lens, where cu_seqlens keep them apart"
    for b in first((leading > 0) & (leading < size)):
        yield f"row {b} starts with {int(leading[b])} zeros; left padding is lost under cp; pad on the right"
    for b in first(is_odd > 0):
        yield f"row {b} has zeros between ones; holes are lost under cp; pad on the right"
