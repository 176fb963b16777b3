"""The norm of a sharded gradient, and clipping by it: the same on every rank, each parameter counted once.

    ||g||_p = (sum_i |g_i|^p)^(1/p),     p = inf: max_i |g_i|,     g <- g * min(1, max_norm / (||g||_p + 1e-6))

i runs over the elements of the full gradient. A DTensor says which axes of its mesh shard a gradient; over those the
ranks' sums are added, and over the others, which replicate it, they are not. Parameters of one model may be on several
meshes, as experts beside dense layers are, and the stages of a pipeline have different parameters.

Sums over ranks are in float64, a number for each way of being sharded; those of a shard are in float32 or wider, as in
torch, and in float64 where p is not 1, 2 or inf, since |g|^p leaves float32's range soon.
"""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torch_impl.collectives import accumulator
from torch_impl.contract import Group, Rejected, Sharded, TypeProblem, contract

EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_, so that a zero gradient stays zero
ShardingGroups = Callable[[Tensor], Sequence[ProcessGroup]]


@dataclass(frozen=True)
class _NumberOrInfinity:
    """A number from `low` on, or above it, infinity included; NaN is rejected."""

    above: bool
    remedy: str

    def problem(self, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return TypeProblem(f"={value!r} is a {type(value).__name__} and no number; {self.remedy}")
        number: Any = value  # numbers.Real declares no order
        if not (number > 0 if self.above else number >= 0):
            rule = "be positive" if self.above else "be at least 0"
            return f"={value} must {rule}; {self.remedy}"
        return None


NormType = Annotated[float, _NumberOrInfinity(above=True, remedy="pass 1.0, 2.0 or math.inf")]
MaxNorm = Annotated[
    float, _NumberOrInfinity(above=False, remedy="pass a number such as 1.0, math.inf for the norm alone")
]


@contract
def gradient_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: NormType = 2.0,
    *,
    pp: Group[ProcessGroup, "pp"] | None = None,
    sharding_groups: ShardingGroups | None = None,
) -> Sharded[Tensor, ""]:
    """The norm of all gradients together, the same on every rank; a parameter without a gradient counts as 0.

    A gradient that is sharded over several axes is summed over them, one that is replicated is counted once, as its
    DTensor says; a parameter that is passed twice is counted once. `sharding_groups(parameter)` are the groups that
    shard a parameter which is no DTensor, such as a Megatron layer's; without it, it is replicated. Where the ranks of
    `pp` have different parameters, they are added; of a parameter that two stages share pass one copy only
    (`pipelining.tied_weights.distinct_parameters`). Every rank of a stage passes the same parameters in the same order,
    and a replicated parameter has a gradient on all its ranks or on none: that is not compared.

    Cost:   1 all_reduce over each group that shards some parameter, of one float64 for each way in which parameters are
            sharded over it, and 1 over pp. Reads each gradient once, in float32 or wider.
    Errors: TypeError for what is no tensor or group; ValueError for a norm_type that is not positive, and for a
            gradient that is a partial sum, sparse or of integers.
    """
    shards = _distinct_shards("parameters", parameters, sharding_groups)
    return _norm(shards, float(norm_type), pp)


@contract
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: MaxNorm,
    norm_type: NormType = 2.0,
    error_if_nonfinite: bool = False,
    *,
    pp: Group[ProcessGroup, "pp"] | None = None,
    sharding_groups: ShardingGroups | None = None,
    uncounted: Tensor | Iterable[Tensor] = (),
) -> Sharded[Tensor, ""]:
    """Scale all gradients in place, so that their norm together is at most `max_norm`; returns the norm before.

    The first four arguments are those of `torch.nn.utils.clip_grad_norm_`, which raises where parameters are on several
    meshes; `parameters`, `norm_type`, `pp` and `sharding_groups` are as in `gradient_norm`. `uncounted` are clipped
    too, but counted by another stage: the second copies of weights that two stages share. With a norm of inf or NaN all
    gradients become NaN or 0, as in torch; with `error_if_nonfinite` every rank raises, and no gradient changes.

    Cost:   that of `gradient_norm`, and one read and write of each gradient. No host read, but one with
            `error_if_nonfinite`.
    Errors: those of `gradient_norm`; ValueError for a negative max_norm; RuntimeError for a norm that is not finite,
            with `error_if_nonfinite`.
    """
    shards = _distinct_shards("parameters", parameters, sharding_groups)
    counted = {id(shard.parameter) for shard in shards}
    uncounted_shards = _distinct_shards("uncounted", uncounted, sharding_groups)
    norm = _norm(shards, float(norm_type), pp)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise Rejected(
            f"the norm of order {norm_type} is {norm.item()}, so gradients cannot be "
            "clipped; skip the step, or pass error_if_nonfinite=False",
            RuntimeError,
        )
    scale = (max_norm / (norm + EPSILON)).clamp_max(1.0)
    uncounted_shards = [shard for shard in uncounted_shards if id(shard.parameter) not in counted]
    with torch.no_grad():  # gradients of create_graph=True require one themselves
        for gradients in _alike([*shards, *uncounted_shards]):
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm


@dataclass(frozen=True)
class _Shard:
    """A parameter, this rank's shard of its gradient, and the groups over which both are sharded."""

    parameter: Tensor
    gradient: Tensor | None
    groups: tuple[ProcessGroup, ...]

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Of the groups. DTensor may return either of two equal meshes, whose groups differ, and not the same one on
        every rank; their ranks do not differ."""
        return tuple(tuple(dist.get_process_group_ranks(group)) for group in self.groups)


def _distinct_shards(
    name: str, tensors: Tensor | Iterable[Tensor], sharding_groups: ShardingGroups | None
) -> list[_Shard]:
    """One for each parameter, with a gradient or without: the ranks of a group must agree on what they reduce."""
    parameters = _validate_tensors(name, tensors)
    if sharding_groups is not None and not callable(sharding_groups):
        raise Rejected("sharding_groups is no function; pass one from a parameter to a list of groups", TypeError)
    shards = []
    for label, parameter in {id(each): (label, each) for label, each in parameters}.values():
        gradient = parameter.grad
        like = parameter if gradient is None else gradient
        if isinstance(like, DTensor):
            groups = _groups_of_dtensor(label, like)
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else None
        else:
            groups = () if sharding_groups is None else _validate_groups(label, sharding_groups(parameter))
        if gradient is not None and (gradient.layout != torch.strided or not _has_fractions(gradient.dtype)):
            what = f"{gradient.layout}".removeprefix("torch.").replace("strided", f"{gradient.dtype}")
            raise Rejected(f"the gradient of {label} is {what}; pass dense floating-point gradients")
        shards.append(_Shard(parameter, gradient, tuple(group for group in groups if group.size() > 1)))
    return shards


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _validate_tensors(name: str, tensors: Tensor | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    """The tensors, each with its place in the argument. Errors: TypeError."""
    if isinstance(tensors, Tensor):
        return [(name, tensors)]
    if not isinstance(tensors, Iterable) or isinstance(tensors, str | Mapping):
        remedy = f"a {type(tensors).__name__}; pass tensors, as model.parameters() gives"
        raise Rejected(f"{name} is {remedy}", TypeError)
    labelled = [(f"{name}[{i}]", each) for i, each in enumerate(tensors)]
    for label, each in labelled:
        if not isinstance(each, Tensor):
            raise Rejected(f"{label} is a {type(each).__name__}; pass tensors, as model.parameters() gives", TypeError)
    return labelled


def _validate_groups(label: str, groups: Any) -> tuple[ProcessGroup, ...]:
    """What `sharding_groups` returned for a parameter. Errors: TypeError."""
    if not isinstance(groups, list | tuple) or not all(isinstance(group, ProcessGroup) for group in groups):
        remedy = "return a list of ProcessGroups of which this rank is a member, [] for a replicated parameter"
        raise Rejected(f"sharding_groups of {label} returned {groups!r}; {remedy}", TypeError)
    return tuple(groups)


def _groups_of_dtensor(label: str, x: DTensor) -> tuple[ProcessGroup, ...]:
    """The groups of the axes that shard it."""
    if any(placement.is_partial() for placement in x.placements):
        raise Rejected(
            f"the gradient of {label} is {x.placements}, a sum that is not computed yet; reduce it first, "
            "with parameter.grad = parameter.grad.redistribute(placements=parameter.placements)"
        )
    axes = [axis for axis, placement in enumerate(x.placements) if not placement.is_replicate()]
    return tuple(x.device_mesh.get_group(axis) for axis in axes)


@torch.no_grad()
def _norm(shards: Sequence[_Shard], norm_type: float, pp: ProcessGroup | None) -> Tensor:
    # 1. This rank's sum of |g|^p, or its maximum, over the gradients of each way of being sharded.
    by_sharding: dict[tuple[tuple[int, ...], ...], list[_Shard]] = defaultdict(list)
    for shard in shards:
        by_sharding[shard.ranks].append(shard)
    device = shards[0].parameter.device if shards else _device_of(pp)
    totals = {key: _local_total(alike, norm_type, device) for key, alike in by_sharding.items()}
    # 2. Over the ranks of each group in turn, all that is sharded over it together. The group is that of its first
    #    parameter, so that ranks with the same parameters reduce in the same order.
    groups = {key: group for shard in shards for key, group in zip(shard.ranks, shard.groups, strict=True)}
    for ranks, group in groups.items():
        keys = [key for key in totals if ranks in key]
        reduced = _all_reduced(torch.stack([totals[key] for key in keys]), norm_type, group)
        totals.update(zip(keys, reduced.unbind(), strict=True))
    # 3. All ways of being sharded together, and the stages of a pipeline, which have different parameters.
    total = _combined(torch.stack([torch.zeros((), dtype=torch.float64, device=device), *totals.values()]), norm_type)
    if pp is not None:
        total = _all_reduced(total, norm_type, pp)
    # 4. In the dtype of the widest parameter, float32 or wider, whichever gradients this rank has.
    dtype = torch.float32
    for shard in shards:
        dtype = torch.promote_types(dtype, shard.parameter.dtype.to_real())
    return (total if norm_type == math.inf else total ** (1.0 / norm_type)).to(dtype)


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Where the other ranks have their gradients, for a stage of a pipeline without parameters: on GPUs with NCCL."""
    is_on_gpus = group is not None and "cuda:nccl" in dist.get_backend_config(group)
    return torch.device("cuda" if is_on_gpus else "cpu")


def _local_total(shards: Sequence[_Shard], norm_type: float, device: torch.device) -> Tensor:
    """sum |g|^p, for inf max |g|, of this rank's shards, in float64."""
    totals = [torch.zeros((), dtype=torch.float64, device=device)]
    for gradients in _alike(shards):
        dtype = accumulator(gradients[0].dtype)
        if norm_type not in (1.0, 2.0, math.inf):
            dtype = torch.promote_types(dtype, torch.float64)
        norms = torch._foreach_norm(gradients, norm_type, dtype=dtype)
        wide = torch.stack(norms).to(device, torch.float64)
        totals.append(_combined(wide if norm_type == math.inf else wide**norm_type, norm_type))
    return _combined(torch.stack(totals), norm_type)


def _alike(shards: Sequence[_Shard]) -> list[list[Tensor]]:
    """The gradients that have elements, those of one device and dtype together, as torch's foreach functions want."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in (shard.gradient for shard in shards):
        if gradient is not None and gradient.numel():
            groups[gradient.device, gradient.dtype].append(gradient)
    return list(groups.values())


def _combined(totals: Tensor, norm_type: float) -> Tensor:
    return totals.amax() if norm_type == math.inf else totals.sum()


def _all_reduced(totals: Tensor, norm_type: float, group: ProcessGroup) -> Tensor:
    if norm_type != math.inf:
        dist.all_reduce(totals, group=group)
        return totals
    # A maximum of floats drops a NaN of another rank, on gloo at least. Floats that are not negative are ordered as
    # their bits are, and NaN is above inf.
    bits = totals.masked_fill(totals.isnan(), math.nan).view(torch.int64)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float64)
