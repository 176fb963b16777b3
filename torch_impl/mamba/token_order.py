"""The order in which a strategy's tokens are cut over cp, as a TokenLayout of one batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives.arguments import checked_group
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.remembered import remembered
from torch_impl.layouts.token_layout import dense_layout

Order = str | TokenLayout
PACKED = {"contiguous": "contiguous", "dual_chunk_swap": "packed"}  # how each order cuts a packed stream


def checked_group_of(function: str, cp_group: ProcessGroup | DeviceMesh) -> ProcessGroup:
    """The group itself, or that of a mesh of one dim."""
    if isinstance(cp_group, DeviceMesh):
        if cp_group.ndim != 1:
            names = cp_group.mesh_dim_names or ()
            raise ValueError(f"mamba.{function}: cp_group is a mesh of {cp_group.ndim} dims {names}; pass its cp dim")
        cp_group = cp_group.get_group()
    return checked_group(f"mamba.{function}", "cp_group", cp_group, " or a 1-D DeviceMesh")


def checked_order(function: str, order: Order) -> Order:
    """`order` itself: the name of an order, or the layout of every batch."""
    if not isinstance(order, Order):
        raise TypeError(
            f"mamba.{function}: layout is a {type(order).__name__}; pass contiguous, dual_chunk_swap or a TokenLayout"
        )
    if isinstance(order, str) and order not in PACKED:
        raise ValueError(f"mamba.{function}: layout={order!r} is not contiguous, dual_chunk_swap or a TokenLayout")
    return order


def token_layout(
    function: str, order: Order, total: int, cu_seqlens: Tensor | None, group: ProcessGroup, device: torch.device
) -> TokenLayout:
    """Where the `total` tokens of one batch live.

    Cost:   one host read of the offsets, none for the same unchanged tensor.
    Errors: ValueError for another order, a layout of other tokens, sequences or ranks or of unequal shares, offsets
            that do not rise from 0 to total.
    """
    order = checked_order(function, order)
    if isinstance(order, TokenLayout):
        _check(function, order, total, group)
        if cu_seqlens is not None:
            remembered(lambda: _has_sequences(function, order, cu_seqlens), cu_seqlens, order.cu_padded, (function,))
        return order
    if cu_seqlens is None:
        return dense_layout(order, total, group.size(), group.rank(), device)
    return TokenLayout.packed(cu_seqlens, cp_size=group.size(), cp_rank=group.rank(), kind=PACKED[order], total=total)


def _check(function: str, layout: TokenLayout, total: int, group: ProcessGroup) -> None:
    if (layout.cp_size, layout.cp_rank) != (group.size(), group.rank()):
        raise ValueError(
            f"mamba.{function}: layout is for cp={layout.cp_size} and rank {layout.cp_rank}, "
            f"cp_group has cp={group.size()} and rank {group.rank()}; rebind it"
        )
    if layout.total != total:
        raise ValueError(f"mamba.{function}: layout has {layout.total} tokens, the ranks hold {total}")
    if len(set(layout.counts)) > 1:
        raise ValueError(f"mamba.{function}: layout gives the ranks {layout.counts} tokens; they must be equal")


def _has_sequences(function: str, layout: TokenLayout, cu_seqlens: Tensor) -> bool:
    """True: the offsets are those of the layout, whatever fills them on the right."""
    asked, held = [x for x in cu_seqlens.tolist() if x >= 0], layout.cu_padded.tolist()
    if asked == held:
        return True
    if len(asked) != len(held):
        what = f"cu_seqlens holds {len(asked) - 1} sequences, layout {len(held) - 1}"
    else:
        j = next(j for j, (ours, theirs) in enumerate(zip(asked, held, strict=True)) if ours != theirs)
        what = f"cu_seqlens[{j}] is {asked[j]}, {held[j]} in layout"
    raise ValueError(f"mamba.{function}: {what}; pass the layout of this batch, or its offsets alone")
