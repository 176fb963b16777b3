"""What both strategies are made with, and how they read their mixer: group, sizes, layout, parameters at each use."""

from __future__ import annotations

import math
from copy import deepcopy
from operator import attrgetter
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives.arguments import checked_group
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.columns import MambaSizes
from torch_impl.layouts.remembered import remembered
from torch_impl.layouts.token_layout import dense_layout
from torch_impl.mamba.arguments import check_dims, check_stream, checked_sizes
from torch_impl.mamba.mix import SsmParameters

Order = str | TokenLayout
PACKED = {"contiguous": "contiguous", "dual_chunk_swap": "packed"}  # how each order cuts a packed stream


class MixerStrategy:
    """A Mamba2 mixer's parameters over cp ranks, as each rank uses them. It owns none.

    `mixer` holds conv1d, dt_bias, A_log and D, which are whole on each rank when they are read. What a rank's tokens or
    heads give is the gradient there: the full one is the SUM over cp.

    Errors: TypeError for sizes that are no integers, a cp_group that is neither ProcessGroup nor 1-D DeviceMesh, a
            layout that is neither name nor TokenLayout; ValueError for sizes below 1, num_heads that n_groups does
            not divide, parameters of other sizes, another layout.
    """

    name: ClassVar[str]

    def __init__(
        self,
        cp_group: ProcessGroup | DeviceMesh,
        num_heads: int,
        head_dim: int,
        n_groups: int,
        d_state: int,
        mixer: nn.Module,
        *,
        layout: Order = "dual_chunk_swap",
    ) -> None:
        self.cp_group = checked_group_of(self.name, cp_group)
        self.cp_size, self.cp_rank = self.cp_group.size(), self.cp_group.rank()
        self.sizes = checked_sizes(self.name, num_heads, head_dim, n_groups, d_state)
        if reason := self._unshareable():
            raise ValueError(f"mamba.{self.name}: {reason}")
        check_parameters(self.name, mixer, self.sizes)
        self.mixer, self.layout = mixer, checked_order(self.name, layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> MixerStrategy:
        """For the copy of the mixer that `memo` has, or a new one; groups and layouts are shared."""
        copy = memo[id(self)] = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__, mixer=deepcopy(self.mixer, memo))
        return copy

    def get_conv1d_weight(self) -> Float[Tensor, "c k"]:
        """[channels, k] of this rank's x|B|C."""
        return self._slice_conv_param(whole(self.name, self.mixer, "conv1d.weight")).flatten(1)

    def get_conv1d_bias(self) -> Float[Tensor, " c"] | None:
        """[channels] of this rank's x|B|C, or None."""
        bias = whole(self.name, self.mixer, "conv1d.bias")
        return None if bias is None else self._slice_conv_param(bias)

    def get_dt_bias(self) -> Float[Tensor, " h"]:
        """[heads] of this rank."""
        return self._slice_vector_param(whole(self.name, self.mixer, "dt_bias"))

    def get_A_log(self) -> Float[Tensor, " h"]:
        """[heads] of this rank."""
        return self._slice_vector_param(whole(self.name, self.mixer, "A_log"))

    def get_D(self) -> Float[Tensor, " h"]:
        """[heads] of this rank; or [heads * head_dim], where D has one number per channel."""
        return self._slice_vector_param(whole(self.name, self.mixer, "D"))

    def ssm_parameters(self) -> SsmParameters:
        """What a rank mixes with."""
        conv = self.get_conv1d_weight(), self.get_conv1d_bias()
        return SsmParameters(*conv, self.get_dt_bias(), self.get_A_log(), self.get_D())

    def _slice_vector_param(self, param: Shaped[Tensor, " h"]) -> Shaped[Tensor, " l"]:
        """This rank's part of a vector over heads: all of it, where a strategy says nothing else."""
        return param

    def _slice_conv_param(self, param: Shaped[Tensor, "*a"]) -> Shaped[Tensor, "*b"]:
        """This rank's channels of the convolution's weight or bias: all, where a strategy says nothing else."""
        return param

    def _unshareable(self) -> str | None:
        """Why cp ranks cannot have these sizes, or None."""
        return None

    def _tokens(
        self, x: Tensor, cu_seqlens: Tensor | None, ranks: int, layout: TokenLayout | None = None
    ) -> TokenLayout:
        """Where the tokens of this batch live, of which x holds one of so many equal shares."""
        order = self.layout if layout is None else layout
        check_dims(self.name, x)
        if cu_seqlens is not None or not isinstance(order, TokenLayout):
            check_stream(self.name, x, cu_seqlens)
        return token_layout(self.name, order, x.shape[-2] * ranks, cu_seqlens, self.cp_group, x.device)

    def _check_width(self, projected: Tensor) -> None:
        self._check_columns("projected_states", projected, self.sizes.width, "in_proj has")

    def _check_columns(self, name: str, x: Tensor, columns: int, whose: str) -> None:
        """Floating-point numbers in so many columns."""
        if not isinstance(x, Tensor):
            raise TypeError(f"mamba.{self.name}: {name} is a {type(x).__name__}; pass a Tensor")
        if not x.is_floating_point():
            kind = str(x.dtype).removeprefix("torch.")
            raise TypeError(f"mamba.{self.name}: {name} is {kind}; pass floating-point numbers")
        if not x.ndim or x.shape[-1] != columns:
            raise ValueError(f"mamba.{self.name}: {name} is {list(x.shape)}; {whose} {columns} columns")

    @property
    def chunk_size(self) -> int:
        """Of the scan; another mixer than ours may not say."""
        return getattr(self.mixer, "chunk_size", 256)

    @property
    def dt_limit(self) -> tuple[float, float]:
        """Between which steps are held; another mixer than ours may not say."""
        return getattr(self.mixer, "dt_limit", (0.0, math.inf))


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


def check_parameters(function: str, mixer: nn.Module, sizes: MambaSizes) -> None:
    """The mixer has those parameters, of the shapes that these sizes give, and no other sizes of its own."""
    heads, channels = sizes.num_heads, sizes.channels
    shapes = {
        "conv1d.weight": (f"[{channels}, 1, k]", lambda p: p.shape[:-1] in ((channels,), (channels, 1))),
        "conv1d.bias": (f"[{channels}]", lambda p: p.shape == (channels,)),
        "dt_bias": (f"[{heads}]", lambda p: p.shape == (heads,)),
        "A_log": (f"[{heads}]", lambda p: p.shape == (heads,)),
        "D": (f"[{heads}] or [{sizes.inner}]", lambda p: _by_head(p, sizes)),
    }
    for name, (told, fits) in shapes.items():
        try:
            parameter = attrgetter(name)(mixer)
        except AttributeError:
            raise ValueError(f"mamba.{function}: the mixer has no {name}") from None
        if parameter is None and name != "conv1d.bias":
            raise ValueError(f"mamba.{function}: the mixer's {name} is None")
        if parameter is not None and not fits(parameter):
            raise ValueError(f"mamba.{function}: {name} is {list(parameter.shape)}; these sizes give it {told}")
    own = getattr(mixer, "sizes", sizes)
    if isinstance(own, MambaSizes) and own != sizes:
        raise ValueError(f"mamba.{function}: the mixer has {_told(own)}; {_told(sizes)} are given")


def _by_head(D: Tensor, sizes: MambaSizes) -> bool:
    """One number for each head or each of its channels, heads first, in however many dims."""
    counts = (sizes.num_heads, sizes.inner)
    return D.ndim > 0 and D.shape[0] in counts and D.numel() in counts and D.numel() >= D.shape[0]


def _told(sizes: MambaSizes) -> str:
    return f"n_groups={sizes.n_groups} and d_state={sizes.d_state}"


def whole(function: str, mixer: nn.Module, name: str) -> Tensor:
    """The parameter as it is now; the local tensor of a DTensor that is whole on each rank."""
    from torch.distributed.tensor import DTensor

    parameter = attrgetter(name)(mixer)
    if not isinstance(parameter, DTensor):
        return parameter
    if not all(placement.is_replicate() for placement in parameter.placements):
        raise ValueError(f"mamba.{function}: {name} is {parameter.placements}; unshard it first")
    return parameter.to_local()
