"""The base class of both context-parallel strategies: group, sizes, token layout, and the mixer's parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar

from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.contract import Rejected, TypeProblem, type_name
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.columns import MambaSizes
from torch_impl.mamba.mix import SsmParameters, check_dims, check_stream, mixer_sizes
from torch_impl.mamba.token_layouts import batch_layout


@dataclass(frozen=True)
class _GroupOrMeshKind:
    """A process group, or a mesh with one dim; to slice parameters, an object with a size and a rank."""

    def problem(self, value: Any) -> str | None:
        if isinstance(value, DeviceMesh):
            axes = value.mesh_dim_names or ()
            return None if value.ndim == 1 else f" is a mesh of {value.ndim} dims {axes}; pass its cp dim"
        if isinstance(value, ProcessGroup) or all(callable(getattr(value, name, None)) for name in ("size", "rank")):
            return None
        return TypeProblem(f" is {type_name(value)}; pass a ProcessGroup or a 1-D DeviceMesh")


GroupOrMesh = Annotated[ProcessGroup | DeviceMesh, _GroupOrMeshKind()]


class MixerStrategy:
    """Base class: gives each cp rank its slices of a Mamba2 mixer's parameters. It has no parameters itself.

    `mixer` has conv1d, dt_bias, A_log and D, which must be replicated when read. A rank differentiates them for its
    tokens or heads: the full gradient is the SUM over cp.

    Errors: ValueError if n_groups does not divide num_heads, for sizes that cp ranks cannot share, or for parameters of
            other sizes.
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
        layout: str | TokenLayout,
    ) -> None:
        self.cp_group = cp_group.get_group() if isinstance(cp_group, DeviceMesh) else cp_group
        self.cp_size, self.cp_rank = self.cp_group.size(), self.cp_group.rank()
        self.sizes = mixer_sizes(num_heads, head_dim, n_groups, d_state)
        if reason := self._indivisible():
            raise Rejected(reason)
        self.mixer, self.layout = mixer, layout
        for problem in _parameter_problems(mixer, self.sizes):
            raise Rejected(problem)

    def __deepcopy__(self, memo: dict[int, Any]) -> MixerStrategy:
        """Copy the strategy and its mixer (or use the mixer's copy in `memo`); share groups and layouts."""
        # Write to `memo` first: the mixer refers to its strategy, so copying it would recurse without end.
        copy = memo[id(self)] = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__, mixer=deepcopy(self.mixer, memo))
        return copy

    def get_conv1d_weight(self) -> Float[Tensor, "c k"]:
        """This rank's channels x|B|C of the convolution's weight, [channels, k]."""
        return self._slice_conv_param(self._parameter("conv1d.weight")).flatten(1)

    def get_conv1d_bias(self) -> Float[Tensor, " c"] | None:
        """This rank's channels x|B|C of the convolution's bias, [channels]; None without a bias."""
        bias = self._parameter("conv1d.bias")
        return None if bias is None else self._slice_conv_param(bias)

    def get_dt_bias(self, dt_bias: Float[Tensor, " h"] | None = None) -> Float[Tensor, " l"]:
        """dt_bias of this rank's heads, [heads].

        Slices `dt_bias` instead if it is passed: a full copy of the parameter, for example in another dtype.
        """
        return self._slice_vector_param(self._parameter("dt_bias") if dt_bias is None else dt_bias)

    def get_A_log(self, A_log: Float[Tensor, " h"] | None = None) -> Float[Tensor, " l"]:
        """A_log of this rank's heads, [heads]; slices `A_log` instead if it is passed."""
        return self._slice_vector_param(self._parameter("A_log") if A_log is None else A_log)

    def get_D(self, D: Float[Tensor, "h *e"] | None = None) -> Float[Tensor, "l *e"]:
        """D of this rank's heads: [heads], or [heads * head_dim] if D has one number per channel.

        Slices `D` instead if it is passed.
        """
        return self._slice_vector_param(self._parameter("D") if D is None else D)

    def ssm_parameters(self) -> SsmParameters:
        """This rank's parameters between the projections."""
        conv = self.get_conv1d_weight(), self.get_conv1d_bias()
        return SsmParameters(*conv, self.get_dt_bias(), self.get_A_log(), self.get_D())

    def _slice_vector_param(self, param: Shaped[Tensor, "h *e"]) -> Shaped[Tensor, "l *e"]:
        """This rank's shard of a vector over heads; all of it unless a strategy shards the heads."""
        return param

    def _slice_conv_param(self, param: Shaped[Tensor, "*a"]) -> Shaped[Tensor, "*b"]:
        """This rank's channels of the convolution's weight or bias; all of them unless a strategy shards the heads."""
        return param

    def _indivisible(self) -> str | None:
        """Why cp ranks cannot share these sizes, or None."""
        return None

    def _parameter(self, name: str) -> Any:
        """The current parameter, since FSDP2 replaces it between steps; the local tensor of a replicated DTensor.

        None for a bias that the mixer does not have.
        """
        from torch.distributed.tensor import DTensor

        parameter = attrgetter(name)(self.mixer)
        if not isinstance(parameter, DTensor):
            return parameter
        if not all(placement.is_replicate() for placement in parameter.placements):
            # Strategies slice full parameters, and would slice a shard a second time.
            raise ValueError(f"mamba.{self.name}: {name} is {parameter.placements}; unshard it first")
        return parameter.to_local()

    def _check_columns(self, name: str, x: Tensor, columns: int, owner: str) -> None:
        if x.shape[-1] != columns:
            raise Rejected(f"{name} is {list(x.shape)}; {owner} {columns} columns")

    def _check_device(self, name: str, x: Tensor, weight: Tensor) -> None:
        if x.device != weight.device:
            raise Rejected(f"{name} is on {x.device} but the weights on {weight.device}; pass one device")

    def _token_layout(
        self, name: str, x: Tensor, cu_seqlens: Tensor | None, ranks: int, layout: str | TokenLayout | None = None
    ) -> TokenLayout:
        """The layout of a batch; x, the argument `name`, is one of its `ranks` equal shards.

        Cost:   one host read of the offsets.
        Errors: ValueError for a layout with other tokens, sequences or ranks, or with unequal shards; for offsets that
                do not rise from 0 to the number of tokens.
        """
        # 1. x is a batch or a stream. A stream needs offsets, unless a TokenLayout has them.
        order = self.layout if layout is None else layout
        check_dims(name, x)
        if cu_seqlens is not None or isinstance(order, str):
            check_stream(name, x, cu_seqlens)
        # 2. The tokens of all ranks.
        return batch_layout(order, x.shape[-2] * ranks, cu_seqlens, self.cp_group, x.device)

    @property
    def chunk_size(self) -> int:
        """The mixer's chunk size of the scan, 256 if it has none."""
        return getattr(self.mixer, "chunk_size", 256)

    @property
    def dt_limit(self) -> tuple[float, float]:
        """The mixer's range for clamping steps; unbounded if it has none."""
        return getattr(self.mixer, "dt_limit", (0.0, math.inf))


def _parameter_problems(mixer: nn.Module, sizes: MambaSizes) -> Iterator[str]:
    """Why a mixer does not fit the sizes: missing parameters, other shapes, or other sizes of its own."""
    heads, channels = sizes.num_heads, sizes.channels
    shapes = {
        "conv1d.weight": (f"[{channels}, 1, k]", lambda p: p.shape[:-1] in ((channels,), (channels, 1))),
        "conv1d.bias": (f"[{channels}]", lambda p: p.shape == (channels,)),
        "dt_bias": (f"[{heads}]", lambda p: p.shape == (heads,)),
        "A_log": (f"[{heads}]", lambda p: p.shape == (heads,)),
        "D": (f"[{heads}] or [{sizes.inner}]", lambda p: _has_number_per_head_or_channel(p, sizes)),
    }
    for name, (shape, fits) in shapes.items():
        try:
            parameter = attrgetter(name)(mixer)
        except AttributeError:
            yield f"the mixer has no {name}"
            return
        # The convolution's bias is optional.
        if parameter is None and name != "conv1d.bias":
            yield f"the mixer's {name} is None"
        elif parameter is not None and not fits(parameter):
            yield f"{name} is {list(parameter.shape)}; these sizes require {shape}"
    # Shapes alone do not determine the sizes: two groups of three states look like six groups of one.
    of_mixer = getattr(mixer, "sizes", sizes)
    if isinstance(of_mixer, MambaSizes) and of_mixer != sizes:
        mixer_groups, groups = (f"n_groups={x.n_groups} and d_state={x.d_state}" for x in (of_mixer, sizes))
        yield f"the mixer has {mixer_groups}, the strategy {groups}; pass the sizes of the mixer"


def _has_number_per_head_or_channel(D: Tensor, sizes: MambaSizes) -> bool:
    """Whether D has one number per head or per channel, heads first, in any number of dims."""
    counts = (sizes.num_heads, sizes.inner)
    return D.ndim > 0 and D.shape[0] in counts and D.numel() in counts and D.numel() >= D.shape[0]


def as_rows(x: Tensor) -> Tensor:
    """x as [b, s, w]; a stream [s, w] becomes one row."""
    return x if x.ndim == 3 else x[None]
