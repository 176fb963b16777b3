"""What both strategies are made with, and how they read their mixer: group, sizes, layout, parameters at each use."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, ClassVar

from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.layouts import TokenLayout
from torch_impl.mamba.arguments import check_dims, check_stream, checked_sizes
from torch_impl.mamba.mixer import SsmParameters
from torch_impl.mamba.shared_parameters import check_parameters, whole
from torch_impl.mamba.token_order import Order, checked_group_of, checked_order, token_layout


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
