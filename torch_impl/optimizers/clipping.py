"""The norm of a sharded gradient, and clipping by it. Every rank gets the same norm, with each parameter counted once.

    ||g||_p = (sum_i |g_i|^p)^(1/p),     p = inf: max_i |g_i|,     g <- g * min(1, max_norm / (||g||_p + 1e-6))

i runs over the elements of the full gradient. The DTensor's placements say which mesh axes shard a gradient: the ranks'
sums are added over these axes and not over the axes that replicate it. One model's parameters may be on several meshes
(experts beside dense layers), and the stages of a pipeline have different parameters.

Ranks add their sums in float64, one number for each sharding. A shard is summed in float32 or wider, as in torch, and
in float64 if p is not 1, 2 or inf, because |g|^p soon leaves the range of float32.
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
from torch_impl.contract.kinds import too_large

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_; it keeps a zero gradient zero
ShardingGroups = Callable[[Tensor], Sequence[ProcessGroup]]


@dataclass(frozen=True)
class _NumberOrInfinity:
    """A number that is at least 0, or above 0 with `above`. Infinity is allowed, NaN is not."""

    above: bool
    remedy: str

    def problem(self, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return TypeProblem(f"={value!r} is a {type(value).__name__}, not a number; {self.remedy}")
        number: Any = value  # numbers.Real declares no order
        if not (number > 0 if self.above else number >= 0):
            rule = "be positive" if self.above else "be at least 0"
            return f"={value} must {rule}; {self.remedy}"
        return too_large(value)


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
    """The norm of all gradients together, the same on every rank. A parameter without a gradient counts as 0.

    A DTensor gradient is summed over the axes that shard it and counted once over the axes that replicate it; a
    parameter passed twice counts once. `sharding_groups(parameter)` returns the groups that shard a parameter which is
    not a DTensor, such as a Megatron layer's; without it, such a parameter is replicated. The stages of `pp` have
    different parameters, which are added; pass only one copy of a parameter that two stages share
    (`pipelining.tied_weights.distinct_parameters`). Every rank of a stage must pass the same parameters in the same
    order, and a replicated parameter must have a gradient on all its ranks or on none. Neither is checked.

    Cost:   1 all_reduce over each group that shards a parameter, with one float64 for each sharding that includes the
            group, and 1 over pp. Reads each gradient once, in float32 or wider.
    Errors: TypeError for an argument that is not a tensor or a group; ValueError for a norm_type that is not positive,
            and for a gradient that is a partial sum, sparse or of integers.
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
    """Scale all gradients in place so that their total norm is at most `max_norm`; returns the norm before scaling.

    The first four arguments have the meaning that they have in `torch.nn.utils.clip_grad_norm_`, which raises if
    parameters are on several meshes; `parameters`, `norm_type`, `pp` and `sharding_groups` are as in `gradient_norm`.
    `uncounted` parameters are clipped but not counted, because another stage counts them: the second copies of weights
    that two stages share. If the norm is inf or NaN, all gradients become NaN or 0, as in torch; with
    `error_if_nonfinite` every rank raises instead, and no gradient changes.

    Cost:   as `gradient_norm`, and one read and write of each gradient. One host read with `error_if_nonfinite`, none
            otherwise.
    Errors: as `gradient_norm`; ValueError for a negative max_norm; RuntimeError for a norm that is not finite, with
            `error_if_nonfinite`.
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
        """The global ranks of each group. They identify a sharding, and the groups do not: given two equal meshes,
        DTensor may return one on this rank and the other on the next. Their groups differ, their ranks are the same."""
        return tuple(tuple(dist.get_process_group_ranks(group)) for group in self.groups)


def _distinct_shards(
    name: str, tensors: Tensor | Iterable[Tensor], sharding_groups: ShardingGroups | None
) -> list[_Shard]:
    """One shard for each parameter, with or without a gradient, so that the ranks of a group reduce the same list."""
    parameters = _validate_tensors(name, tensors)
    if sharding_groups is not None and not callable(sharding_groups):
        raise Rejected(
            "sharding_groups is not a function; pass a function from a parameter to a list of groups", TypeError
        )
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
    """The tensors, each labelled by its place in the argument. Errors: TypeError."""
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
    """The groups that `sharding_groups` returned for a parameter, as a tuple. Errors: TypeError."""
    if not isinstance(groups, list | tuple) or not all(isinstance(group, ProcessGroup) for group in groups):
        remedy = "return a list of ProcessGroups that contain this rank, [] for a replicated parameter"
        raise Rejected(f"sharding_groups of {label} returned {groups!r}; {remedy}", TypeError)
    return tuple(groups)


def _groups_of_dtensor(label: str, x: DTensor) -> tuple[ProcessGroup, ...]:
    """The groups of the mesh axes that shard a DTensor."""
    if any(placement.is_partial() for placement in x.placements):
        raise Rejected(
            f"the gradient of {label} is {x.placements}, a sum that is not computed yet; reduce it first, "
            "with parameter.grad = parameter.grad.redistribute(placements=parameter.placements)"
        )
    axes = [axis for axis, placement in enumerate(x.placements) if not placement.is_replicate()]
    return tuple(x.device_mesh.get_group(axis) for axis in axes)


@torch.no_grad()
def _norm(shards: Sequence[_Shard], norm_type: float, pp: ProcessGroup | None) -> Tensor:
    # 1. This rank's sum of |g|^p, or its maximum, over all gradients with the same sharding.
    by_sharding: dict[tuple[tuple[int, ...], ...], list[_Shard]] = defaultdict(list)
    for shard in shards:
        by_sharding[shard.ranks].append(shard)
    device = shards[0].parameter.device if shards else _device_of(pp)
    totals = {key: _local_total(alike, norm_type, device) for key, alike in by_sharding.items()}
    # 2. Reduce over each group in turn, in one call, the totals of all shardings that include it. Groups are in the
    #    order of their first parameter, so that ranks with the same parameters reduce in the same order.
    groups = {key: group for shard in shards for key, group in zip(shard.ranks, shard.groups, strict=True)}
    for ranks, group in groups.items():
        keys = [key for key in totals if ranks in key]
        reduced = _all_reduced(torch.stack([totals[key] for key in keys]), norm_type, group)
        totals.update(zip(keys, reduced.unbind(), strict=True))
    # 3. Combine all shardings, then the stages of a pipeline, which have different parameters.
    total = _combined(torch.stack([torch.zeros((), dtype=torch.float64, device=device), *totals.values()]), norm_type)
    if pp is not None:
        total = _all_reduced(total, norm_type, pp)
    # 4. The result's dtype is the widest parameter's, float32 at least, whether or not this rank has its gradient.
    dtype = torch.float32
    for shard in shards:
        dtype = torch.promote_types(dtype, shard.parameter.dtype.to_real())
    return (total if norm_type == math.inf else total ** (1.0 / norm_type)).to(dtype)


def _device_of(group: ProcessGroup | None) -> torch.device:
    """The device of the other ranks' gradients, for a pipeline stage without parameters: the GPU under NCCL."""
    is_on_gpus = group is not None and "cuda:nccl" in dist.get_backend_config(group)
    return torch.device("cuda" if is_on_gpus else "cpu")


def _local_total(shards: Sequence[_Shard], norm_type: float, device: torch.device) -> Tensor:
    """sum |g|^p of this rank's shards in float64, or max |g| if p is inf."""
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
    """The gradients that have elements, grouped by device and dtype, as torch's foreach functions require."""
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
    # A float maximum drops another rank's NaN, on gloo at least. Nonnegative floats have the order of their bits as
    # integers, in which NaN is above inf.
    bits = totals.masked_fill(totals.isnan(), math.nan).view(torch.int64)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float64)
