"""Fully sharded data parallelism with torch's `fully_shard`, after tensor parallelism.

Between steps a rank stores 1/n of every parameter, its gradient and its optimizer state, with n = dp_shard * cp * ep. A
block's parameters are gathered while it computes; experts are gathered over dp_shard x cp, and not over ep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from torch_impl.contract import Mesh, Module, NonNegativeInt, Number, Rejected, TypeProblem, check, contract, type_name
from torch_impl.contract.kinds import Instance
from torch_impl.parallelizer._torch_compat import map_tensors
from torch_impl.parallelizer.blocks import checkpoint_blocks, compile_blocks, prefetch_blocks, save_products, units
from torch_impl.parallelizer.expert_sharding import fsdp_dims, shard_experts
from torch_impl.parallelizer.expert_validation import validate_experts
from torch_impl.parallelizer.memory_budget import budget_in_force
from torch_impl.parallelizer.mesh_axes import MeshAxes, mesh_axes
from torch_impl.parallelizer.mixed_dtypes import units_of_rarer_dtypes
from torch_impl.parallelizer.registry import imported_plan, registered_strategy
from torch_impl.parallelizer.sequence_parallel import check_lengths, sequence_styles, shard_sequences
from torch_impl.parallelizer.tp_plan import PlanEntry, PlanKind, shard_modules, validate_styles, warn_of_norms

DEFAULT_BACKEND = "inductor"
SCOPES = ("all", "language", "vision", "audio", "multimodal")
BUDGET = "memory_budget"
SCOPE_WORDS = f"'all' alone, or some of {', '.join(map(repr, SCOPES[1:]))}"


def scope_names(value: str | Sequence[str]) -> list[str]:
    """The names of a list, or of a text with commas between them."""
    return [name.strip() for name in (value.split(",") if isinstance(value, str) else value)]


class PolicyKind:
    """A MixedPrecisionPolicy whose dtypes are floating."""

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, MixedPrecisionPolicy):
            return TypeProblem(f" is {type_name(value)}; pass a MixedPrecisionPolicy or None")
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(value, field)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                return TypeProblem(f".{field} is {dtype!r}; pass a floating dtype or None")
        return None


class PlanOrPathKind(PlanKind):
    """A plan, or the import path of one."""

    def problem(self, value: Any) -> str | None:
        return None if isinstance(value, str) else super().problem(value)


class CheckpointingKind:
    """The part of a block that is recomputed: nothing, everything, a selection, or all beyond a memory budget."""

    def problem(self, value: Any) -> str | None:
        if isinstance(value, bool) or value in ("full", "selective", BUDGET):
            return None
        choices = f"pass True or False, 'full', 'selective' or {BUDGET!r}"
        if isinstance(value, str):
            return f"={value!r} is not known; {choices}"
        return TypeProblem(f"={value!r} is {type_name(value)}; {choices}")


class ScopesKind:
    """The parts of a model that are recomputed: "all", or some of its parts, in a list or separated by commas."""

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, str | list | tuple) or not all(isinstance(each, str) for each in value):
            return TypeProblem(f"={value!r} is {type_name(value)}; pass {SCOPE_WORDS}")
        names = scope_names(value)
        unknown = [name for name in names if name not in SCOPES]
        if unknown:
            return f"={value!r} has {unknown[0]!r}; pass {SCOPE_WORDS}"
        if not names or ("all" in names and len(names) > 1):
            return f"={value!r}; pass {SCOPE_WORDS}"
        return None


class SelectiveKind:
    """The selection of a selective checkpoint: 'op' for the policy here, n for each n-th block, or another policy."""

    def problem(self, value: Any) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool):
            return None if value >= 1 else f"={value} must be at least 1"
        if value == "op" or callable(value):
            return None
        choices = "'op', n for each n-th block, or a policy of torch.utils.checkpoint"
        return TypeProblem(f"={value!r} is {type_name(value)}; pass {choices}")


class ShareKind:
    """A share of the activations, from 0 to 1."""

    def problem(self, value: Any) -> str | None:
        remedy = " from 0 (only a block's inputs are saved) to 1 (as without a budget)"
        if problem := Number(remedy=remedy).problem(value):
            return problem
        return None if 0 <= value <= 1 else f"={value} is not in [0, 1]; pass a number{remedy}"


class BackendKind:
    """The name of a torch.compile backend."""

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, str):
            return Instance(str, "pass the name of a backend of torch.compile").problem(value)
        # Do not look up torch's default: listing the backends loads the compiler.
        if value != DEFAULT_BACKEND and value not in (backends := torch.compiler.list_backends(exclude_tags=())):
            nearest = get_close_matches(value, backends, n=1, cutoff=0.0)
            return f"={value!r} is not a backend of torch.compile; nearest: {', '.join(map(repr, nearest))}"
        return None


PlanOrPath = Annotated[Mapping[str, ParallelStyle] | str, PlanOrPathKind()]
Checkpointing = Annotated[bool | str, CheckpointingKind()]
Scopes = Annotated[str | Sequence[str], ScopesKind()]
Selective = Annotated[str | int | Callable[..., Any], SelectiveKind()]
Share = Annotated[float, ShareKind()]
Backend = Annotated[str, BackendKind()]
Policy = Annotated[MixedPrecisionPolicy, PolicyKind()]
Offload = Annotated[OffloadPolicy, Instance(OffloadPolicy, "pass a CPUOffloadPolicy or None", shows_value=False)]


@contract
def fsdp2_strategy_parallelize(
    model: Module,
    device_mesh: Mesh,
    mp_policy: Policy | None = None,
    tp_shard_plan: PlanOrPath | None = None,
    offload_policy: Offload | None = None,
    *,
    activation_checkpointing: Checkpointing = False,
    reshard_after_forward: bool | None = None,
    sequence_parallel: bool = False,
    enable_async_tensor_parallel: bool = False,
    selective_ac_option: Selective = "op",
    activation_checkpointing_scope: Scopes = "all",
    memory_budget: Share | None = None,
    enable_compile: bool = False,
    compile_backend: Backend = DEFAULT_BACKEND,
    fsdp2_forward_prefetch_depth: NonNegativeInt | None = None,
    fsdp2_backward_prefetch_depth: NonNegativeInt | None = None,
    dp_replicate_mesh_name: str | None = None,
    dp_shard_cp_mesh_name: str | None = None,
    tp_mesh_name: str | None = None,
) -> nn.Module:
    """Parallelize a model over a mesh, in place: tensor plan, activation checkpointing, FSDP. Returns the model.

        ids  "b/dp/ep s"   ->   logits  "b/dp/ep s v"         the same on each tp rank
        parameter "o i"   ->   "o/dp/ep i", or sharded over tp by its style and then "/dp/ep" on its first dim
        experts "e f d"   ->   "e/ep f d/dp", and f over tp

    Axes are identified by name: see `mesh_axes`. With replicas (`dp_replicate`) parameters are sharded within a
    replica. Ranks of `ep` have different tokens and different experts; `shard_experts` then replaces the plan's entries
    for experts. Every gradient, experts included, is the mean over dp_replicate x dp_shard x cp x ep, so a rank's loss
    must be dp * cp * ep * sum(its token losses) / N, where N is the number of tokens in the full step; accumulation
    needs no further division.

    `mp_policy=None` computes in bfloat16 and reduces in float32; a model with float64 parameters stays float64.
    `output_dtype` applies to the model's output, not to each block's. Buffers keep their dtype. Each element
    of a list of layers is a unit, and the model is a unit with the rest, frozen vision and audio parts included
    (`units`). Modules whose trained parameters have another dtype than most of their unit are units of their own, and
    compute in that dtype.
    `reshard_after_forward=None` keeps only the last block gathered between forward and backward; in a pipeline pass
    False, or each micro-batch gathers again. `offload_policy` puts shards in host memory, pinned if the mesh has an
    accelerator. Tied parameters stay tied.

    tp_shard_plan          a dict, or "package.module:name" of a dict or of a function that takes the model or nothing
    activation_checkpointing   True or "full": backward recomputes each block. "selective": `selective_ac_option`
        decides: "op" saves matrix products and attention, n recomputes each n-th block, or pass a torch policy.
        "memory_budget": the compiler decides, which needs `enable_compile`
    activation_checkpointing_scope   the blocks that are recomputed: "all", or some of "language", "vision", "audio" and
        "multimodal" (vision and audio)
    memory_budget          the share of a compiled block's activations that is saved, from 0, its inputs alone, to 1;
        None: a half
    sequence_parallel      between layers a block has s/tp positions: see `sequence_parallel`
    enable_async_tensor_parallel   a layer's products overlap with the gather and the scatter of its sequence. One rank
        of tp has the whole sequence, so that neither switch changes anything there
    enable_compile         compile each block with `compile_backend`, inside FSDP and around recomputation
    fsdp2_forward_prefetch_depth, fsdp2_backward_prefetch_depth   gather this many blocks ahead; None: torch's order
    dp_replicate_mesh_name, dp_shard_cp_mesh_name, tp_mesh_name   the mesh's own names for the axes of these roles;
        None: the names in the tables, and size 1 if the mesh has no such axis

    Cost:   for a unit of parameters w, with first dims rounded up to multiples of n:
            forward 1 all_gather of |w|/n of `param_dtype` per rank; backward the same again if it was freed, and
            1 reduce_scatter of |w| of `reduce_dtype`; with replicas 1 all_reduce of |w|/n.
            `set_requires_gradient_sync(False)` leaves out reduction. On construction, see `apply_plan`.
            With ep n = dp_shard * cp * ep; the experts of a layer are a unit of their own with n = dp_shard * cp, and
            have the collectives of `shard_experts`.
    Errors: before anything is changed. TypeError for a model, mesh, policy, plan or switch of a wrong type.
            ValueError for a mesh whose axes are unknown, mixed or have no names; a mesh name that is not an axis; a
            backend that torch does not have, or that has no memory budget; a memory budget without its mode; a model
            that is already parallel, has a scalar parameter, or parameters of two dtypes in one module; a plan that
            `check_plan` rejects; a model without experts that ep can shard.
    Source: arXiv 2304.11277 (FSDP), 1909.08053 (tensor parallelism), 1604.06174 (checkpointing), 2006.16668 (experts).
    """
    # 1. Validate everything, before anything is changed or sent.
    names = {"replicate": dp_replicate_mesh_name, "shard": dp_shard_cp_mesh_name, "tp": tp_mesh_name}
    axes, styles = validate_target(model, device_mesh, _plan_of(model, tp_shard_plan), own_names=names)
    ep, tp = None if axes.ep is None else axes.size(axes.ep), axes.size(axes.tp)
    experts = validate_experts(model, ep, tp, is_stage=axes.has_stages)
    styles = {name: entry for name, entry in styles.items() if name not in experts}
    rarer = units_of_rarer_dtypes(model, experts.values())
    budget = budget_in_force(memory_budget, activation_checkpointing == BUDGET, enable_compile, compile_backend)
    policy, offload = _policy(model, mp_policy), _offload(device_mesh, offload_policy)
    mesh = axes.fsdp_mesh
    if enable_async_tensor_parallel and not sequence_parallel:
        raise Rejected("enable_async_tensor_parallel=True overlaps gathers of sequences; pass sequence_parallel=True")
    has_sequences = sequence_parallel and axes.tp_mesh is not None and axes.size(axes.tp) > 1
    plan_styles, gathering = styles, []
    if has_sequences:
        plan_styles, gathering = sequence_styles(model, styles, experts, enable_async_tensor_parallel)
    # 2. Apply tensor and expert parallelism first: FSDP then shards their DTensors again.
    if axes.tp_mesh is not None:
        shard_modules(model, plan_styles, axes.tp_mesh)
        if has_sequences:
            for block in shard_sequences(model, styles, gathering, axes.tp_mesh, plan_styles):
                untangle_views(block)
    untangle_views(model)
    shard_experts(experts, axes)
    # 3. Checkpoint inside FSDP, so that a block is gathered once for recomputation and backward. Compile around
    #    checkpointing, so that the compiler sees both forwards.
    scopes = scope_names(activation_checkpointing_scope)
    if activation_checkpointing and budget is None:
        checkpoint_blocks(model, *_scope(activation_checkpointing, selective_ac_option), scopes)
    if enable_compile:
        compile_blocks(model, compile_backend, budget, scopes)
    if experts:
        _fully_shard_experts(model, list(experts.values()), axes.edp_mesh, policy, offload, reshard_after_forward)
    _fully_shard(model, rarer, mesh, policy, offload, reshard_after_forward)
    if has_sequences and (tp_mesh := axes.tp_mesh) is not None:
        check_lengths(model, tp_mesh)
    prefetch_blocks(model, fsdp2_forward_prefetch_depth, fsdp2_backward_prefetch_depth)
    return model


@contract
def get_parallelization_strategy(model: Module) -> Callable[..., nn.Module]:
    """The function that parallelizes models of this class: a registered one, else `fsdp2_strategy_parallelize`.

    A registered function can call `fsdp2_strategy_parallelize`, which never looks at the registry.

    Cost:   no collective.
    Errors: TypeError if model is not a Module.
    """
    return registered_strategy(model) or fsdp2_strategy_parallelize


def _plan_of(model: nn.Module, plan: Mapping[str, ParallelStyle] | str | None) -> Mapping[str, ParallelStyle] | None:
    """The plan, imported if it is a path. Errors: as `imported_plan` and the contract of a plan."""
    if not isinstance(plan, str):
        return plan
    imported = imported_plan(plan, model)
    check(PlanKind(), f"tp_shard_plan={plan!r}", imported)
    return imported


def _scope(checkpointing: bool | str, option: Any) -> tuple[int, Any]:
    """(n, policy): recompute each n-th block, and save the results that the policy selects."""
    if checkpointing != "selective":
        return 1, None
    return (option, None) if isinstance(option, int) else (1, save_products if option == "op" else option)


def validate_target(
    model: nn.Module,
    device_mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle] | None,
    *,
    is_sharded: bool = True,
    own_names: Mapping[str, str | None] | None = None,
) -> tuple[MeshAxes, dict[str, PlanEntry]]:
    """Validate model, mesh and plan; returns the mesh's axes and the style of each module in the plan.

    Nothing is changed or sent. Without a tensor-parallel axis a plan shards nothing. `is_sharded` is False if data
    parallelism replicates parameters.
    Errors: ValueError as `mesh_axes` and `check_plan`, and for a model that is already parallel.
    """
    axes = mesh_axes(device_mesh, own_names)
    _check_not_parallel(model)
    if is_sharded:
        check_dims(model)
    if axes.tp_mesh is None:
        return axes, {}
    tp = axes.size(axes.tp)
    styles = validate_styles(model, plan or {}, tp, axes.shard_size if is_sharded else 1)
    warn_of_norms(model, styles, tp)
    return axes, styles


def untangle_views(model: nn.Module) -> None:
    """Make the model return no views, in place and without a copy. Call it before FSDP wraps the model.

    The head of a tensor-parallel model returns a view of DTensor's gathered output, and a model may return views of its
    own. FSDP attaches its backward to the tensors that the root returns, and an in-place operation on a view
    (`logits.div_(temperature)`) would silently detach it.
    """
    model.register_forward_hook(_untangle)


def _untangle(module: nn.Module, arguments: Any, output: Any) -> Any:
    return map_tensors(lambda x: _Untangled.apply(x) if x._is_view() and x.requires_grad else x, output)


class _Untangled(torch.autograd.Function):
    """Another tensor with the same memory and version counter, so that autograd still detects in-place edits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


def _check_not_parallel(model: nn.Module) -> None:
    """ValueError if data parallelism was already applied to the model or to any part of it."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule | DistributedDataParallel):
            label = repr(name) if name else type(model).__name__
            if isinstance(module, FSDPModule):
                raise ValueError(f"model: {label} is already an FSDPModule; parallelize a model once")
            raise ValueError(f"model: {label} is a DistributedDataParallel; pass the module inside it")


def check_dims(model: nn.Module) -> None:
    """ValueError for a parameter without a dim that FSDP could shard."""
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise ValueError(f"model: parameter {name!r} is a scalar, which FSDP cannot shard; make it [1]")


def _policy(model: nn.Module, mp_policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """The user's policy, or the default: bfloat16 with float32 sums, and float64 for a float64 model."""
    if mp_policy is not None:
        return mp_policy
    # float64 models are never cast.
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _offload(device_mesh: DeviceMesh, offload_policy: OffloadPolicy | None) -> OffloadPolicy:
    """The user's policy, without pinned memory if the mesh has no accelerator."""
    if isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory and device_mesh.device_type == "cpu":
        return replace(offload_policy, pin_memory=False)
    return OffloadPolicy() if offload_policy is None else offload_policy


def _fully_shard_experts(
    model: nn.Module,
    experts: list[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool | None,
) -> None:
    """Make each layer's experts a unit over edp, inside their block's unit, which then leaves them out."""
    # Do not cast inputs: gates may be wider than the weights.
    policy = replace(policy, output_dtype=None, cast_forward_inputs=False)
    last_unit = _last_unit(model)
    for module in experts:
        untangle_views(module)
        frees = module not in last_unit if reshard_after_forward is None else reshard_after_forward
        dims = {id(module.get_parameter(leaf)): Shard(dim) for leaf, dim in fsdp_dims(module, mesh.shape[-1]).items()}
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=frees,
            shard_placement_fn=lambda stack, dims=dims: dims[id(stack)],
        )


def _fully_shard(
    model: nn.Module,
    rarer: list[list[nn.Module]],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool | None,
) -> None:
    """Shard each unit, inside it the modules of a rarer dtype first, then the root with the rest."""
    # `output_dtype` is for the root only: a block that returned it would pass a wide tensor to the next block.
    block_policy, groups = replace(policy, output_dtype=None), units(model)
    own_policy = replace(block_policy, param_dtype=None, cast_forward_inputs=False)
    last_unit = _last_unit(model)
    for group in rarer:
        frees = group[0] not in last_unit if reshard_after_forward is None else reshard_after_forward
        module = group if len(group) > 1 else group[0]
        fully_shard(module, mesh=mesh, mp_policy=own_policy, offload_policy=offload, reshard_after_forward=frees)
    for group in groups:
        # Backward begins with the last block: if it were freed after forward, it would be gathered again at once.
        frees = group is not groups[-1] if reshard_after_forward is None else reshard_after_forward
        module = group if len(group) > 1 else group[0]
        fully_shard(module, mesh=mesh, mp_policy=block_policy, offload_policy=offload, reshard_after_forward=frees)
    frees = True if reshard_after_forward is None else reshard_after_forward
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=frees)


def _last_unit(model: nn.Module) -> set[nn.Module]:
    """The modules of the last unit, with which the backward begins."""
    *_, last = units(model) or [[]]
    return {inner for module in last for inner in module.modules()}
