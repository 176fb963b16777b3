"""What this folder takes of torch that torch does not promise; each is looked for by name, and its absence is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, _utils, schedules

from torch_impl.pipelining.order import Order


def of_torch(owner: Any, name: str) -> Any:
    """An attribute of torch's. Errors: RuntimeError naming it and the version."""
    if not hasattr(owner, name):
        where = getattr(owner, "__qualname__", getattr(owner, "__name__", type(owner).__name__))
        raise RuntimeError(f"pipelining: torch {torch.__version__} has no {where}.{name}; use torch 2.11 to 2.13")
    return getattr(owner, name)


def schedule_of_order(
    order: Order,
    says_all: bool,
    stages: list[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable | None,
    scale: bool,
) -> Any:
    """torch's runtime for an order of one's own. It places the stages as the order does."""
    runtime = of_torch(schedules, "_PipelineScheduleRuntime")
    read = of_torch(of_torch(schedules, "_Action"), "from_str")
    prepare = of_torch(runtime, "_prepare_schedule_with_comms")
    schedule = runtime(stages, n_microbatches, loss_fn=loss_fn, scale_grads=scale)
    actions = {rank: [read(str(action)) for action in row if action] for rank, row in enumerate(order)}
    schedule.pipeline_order = actions
    prepare(schedule, actions, format="compute_comms" if says_all else "compute_only")
    return schedule


def open_in_own_buffers(stages: Sequence[PipelineStage]) -> None:
    """Give each of the messages that open a pipeline a tensor of its own, [1], and leave out those to oneself.

    torch 2.11 receives two into one tensor at once, sends a number without a dim to one of shape [1], and has stages of
    one rank greet each other, which gloo refuses.
    """
    for stage in stages:
        made: Any = stage
        messages = of_torch(stage, "_get_init_p2p_neighbors_ops")
        made._get_init_p2p_neighbors_ops = partial(_in_own_buffers, messages, stage.group_rank)


def _in_own_buffers(messages: Callable[[], Sequence[Any]], rank: int) -> Sequence[Any]:
    found = [each for each in messages() if each.group_peer != rank]
    for each in found:
        each.tensor = each.tensor.reshape(1).clone()
    return found


def set_static_shapes(
    stage: PipelineStage, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], key: Any
) -> None:
    """Give a stage the shapes of what enters and leaves it; `key` says which they are.

    From then on it refuses to infer shapes by running, and a new start of its buffers leaves gradients alone.
    """
    stage_of: Any = stage
    if hasattr(stage, "_user_meta"):
        _tell(stage_of, inputs, outputs)
    else:
        _tell_as_in_2_11(stage_of, inputs, outputs)
    stage_of.static_key = key


def _tell_as_in_2_11(stage: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """A stage of torch 2.11 that has these does not infer them; it checks strides too, which nobody is told."""
    of_torch(stage, "inputs_meta")
    of_torch(stage, "_outputs_meta")
    stage.inputs_meta, stage._outputs_meta = tuple(inputs), tuple(outputs)
    if not hasattr(stage, "static_key"):
        stage._validate_fwd_outputs = partial(_without_strides, of_torch(stage, "_validate_fwd_outputs"))


def _without_strides(check: Callable[..., None], given: Sequence[torch.Tensor]) -> None:
    check(tuple(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in given))


def _tell(stage: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    extract, told = of_torch(_utils, "extract_tensor_metas"), stage._user_meta
    told.inputs, told.outputs = extract(tuple(inputs)), extract(tuple(outputs))
    told.input_grads = told.output_grads = None
    if not hasattr(stage, "static_key"):
        prepare = of_torch(stage, "_prepare_forward_infra")
        of_torch(stage, "_post_metadata_inference_cleanup")
        stage._prepare_forward_infra = lambda *args, **kwargs: _checked_static(stage, prepare, *args, **kwargs)
        stage._post_metadata_inference_cleanup = lambda: None  # nothing was inferred; torch's drops FSDP's gradients


def _checked_static(stage: Any, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if stage._inference_mode is not of_torch(of_torch(_utils, "InferenceMode"), "STATIC"):
        raise RuntimeError(
            f"pipelining: stage {stage.stage_index} has static shapes and would infer them, since others have none; "
            "set them for all stages on every rank"
        )
    return prepare(*args, **kwargs)


def forget_shapes(schedule: Any, stages: Sequence[PipelineStage]) -> None:
    """Have a schedule set up its stages anew at the next step."""
    for stage in stages:
        made: Any = stage
        if hasattr(stage, "_stage_meta"):  # torch 2.11 has none: shapes are what `set_static_shapes` left
            made._stage_meta = type(made._stage_meta)()
            of_torch(stage, "_inference_mode")
            made._inference_mode = None
        for name in ("args_recv_info", "grad_recv_info"):
            of_torch(stage, name).clear()
        made.grad_send_info = None
    names = [name for name in vars(schedule) if name.endswith(("_forward_initialized", "_backward_initialized"))]
    if len(names) != 2:
        of_torch(schedule, "_stages_forward_initialized")
    for name in names:
        setattr(schedule, name, False)


def stages_of(schedule: Any) -> list[Any]:
    """The stages that a schedule runs on this rank."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [of_torch(schedule, "_stage")]


def emitted_dtype(module: torch.nn.Module) -> torch.dtype:
    """The dtype of what a stage hands on: its FSDP policy's, else that of its first floating parameter."""
    policy = None
    if isinstance(module, FSDPModule):
        policy = of_torch(of_torch(module, "_get_fsdp_state")(), "_mp_policy")
    own = next((p.dtype for p in module.parameters() if p.dtype.is_floating_point), torch.bfloat16)
    return (policy and (policy.output_dtype or policy.param_dtype)) or own
