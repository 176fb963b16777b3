"""Private attributes of torch that pipelining uses. Each is looked up by name; a missing one is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, _utils, schedules

from torch_impl.pipelining.order import Order

SCHEDULES = getattr(schedules, "_PipelineSchedule", object)  # the base of torch's schedules


def of_torch(owner: Any, name: str) -> Any:
    """Look up an attribute of torch. Errors: RuntimeError with its name and torch's version if it is missing."""
    if not hasattr(owner, name):
        where = getattr(owner, "__qualname__", getattr(owner, "__name__", type(owner).__name__))
        raise RuntimeError(f"pipelining: torch {torch.__version__} has no {where}.{name}; use torch 2.11 to 2.13")
    return getattr(owner, name)


def schedule_of_order(
    order: Order,
    has_communication: bool,
    stages: list[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable | None,
    scale: bool,
) -> Any:
    """torch's schedule runtime for any order, which also decides the rank of each stage."""
    runtime = of_torch(schedules, "_PipelineScheduleRuntime")
    parse = of_torch(of_torch(schedules, "_Action"), "from_str")
    prepare = of_torch(runtime, "_prepare_schedule_with_comms")
    schedule = runtime(stages, n_microbatches, loss_fn=loss_fn, scale_grads=scale)
    # str(action) is the notation that torch parses.
    actions = {rank: [parse(str(action)) for action in row if action] for rank, row in enumerate(order)}
    schedule.pipeline_order = actions
    prepare(schedule, actions, format="compute_comms" if has_communication else "compute_only")
    return schedule


def open_in_separate_buffers(stages: Sequence[PipelineStage]) -> None:
    """Give each opening message of a pipeline its own tensor of shape [1], and drop messages from a rank to itself.

    torch 2.11 receives two messages into one tensor at once, sends a 0-d tensor to a tensor of shape [1], and sends
    between stages of one rank, which gloo rejects.
    """
    for stage in stages:
        writable: Any = stage
        messages = of_torch(stage, "_get_init_p2p_neighbors_ops")
        writable._get_init_p2p_neighbors_ops = partial(_in_separate_buffers, messages, stage.group_rank)


def _in_separate_buffers(messages: Callable[[], Sequence[Any]], rank: int) -> Sequence[Any]:
    remote = [message for message in messages() if message.group_peer != rank]
    for message in remote:
        message.tensor = message.tensor.reshape(1).clone()
    return remote


def reduce_each_time(stage: PipelineStage) -> None:
    """Make a stage reduce its FSDP units' gradients after each micro-batch's backward; in place.

    By default torch reduces at the end of a step only. That reduction still runs, but only scales. Use this with full
    backwards only: parameters are gathered again after a reduction, and torch's two backward halves need one gathering.
    """
    backward, reduce = of_torch(stage, "backward_maybe_with_nosync"), of_torch(stage, "perform_reduce_grad")

    def backward_and_reduce(backward_type: str, *args: Any, **kwargs: Any) -> Any:
        result = backward(backward_type, *args, **kwargs)
        reduce(1)
        return result

    writable: Any = stage
    writable.backward_maybe_with_nosync = backward_and_reduce


def set_static_shapes(
    stage: PipelineStage, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], key: Any
) -> None:
    """Set the shapes of a stage's inputs and outputs; `key` identifies them.

    A later run that infers shapes is an error. When the stage sets up its buffers again, it keeps the gradients.
    """
    writable: Any = stage
    if hasattr(stage, "_user_meta"):
        _set_metas(writable, inputs, outputs)
    else:
        _set_metas_of_2_11(writable, inputs, outputs)
    writable.static_key = key


def _set_metas_of_2_11(stage: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """torch 2.11 does not infer metas that are set; it also compares strides, which are not set here."""
    of_torch(stage, "inputs_meta")
    of_torch(stage, "_outputs_meta")
    stage.inputs_meta, stage._outputs_meta = tuple(inputs), tuple(outputs)
    if not hasattr(stage, "static_key"):
        for name in ("_validate_fwd_input", "_validate_fwd_outputs"):
            setattr(stage, name, partial(_without_strides, of_torch(stage, name)))


def _without_strides(check: Callable[..., None], tensors: Sequence[torch.Tensor], *keywords: Any) -> None:
    # Empty tensors are contiguous, like the static ones that torch compares them with.
    check(tuple(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors), *keywords)


def _set_metas(stage: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    extract, metas = of_torch(_utils, "extract_tensor_metas"), stage._user_meta
    metas.inputs, metas.outputs = extract(tuple(inputs)), extract(tuple(outputs))
    metas.input_grads = metas.output_grads = None
    if not hasattr(stage, "static_key"):
        prepare = of_torch(stage, "_prepare_forward_infra")
        of_torch(stage, "_post_metadata_inference_cleanup")
        stage._prepare_forward_infra = lambda *args, **kwargs: _require_static(stage, prepare, *args, **kwargs)
        stage._post_metadata_inference_cleanup = lambda: None  # torch's cleanup would drop FSDP's gradients


def _require_static(stage: Any, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if stage._inference_mode is not of_torch(of_torch(_utils, "InferenceMode"), "STATIC"):
        raise RuntimeError(
            f"pipelining: stage {stage.stage_index} has static shapes and would infer them, since others have none; "
            "set them for all stages on every rank"
        )
    return prepare(*args, **kwargs)


def forget_shapes(schedule: Any, stages: Sequence[PipelineStage]) -> None:
    """Make a schedule set up its stages again in the next step."""
    for stage in stages:
        writable: Any = stage
        if hasattr(stage, "_stage_meta"):  # torch 2.11 has none: `set_static_shapes` sets its shapes
            writable._stage_meta = type(writable._stage_meta)()
            of_torch(stage, "_inference_mode")
            writable._inference_mode = None
        for name in ("args_recv_info", "grad_recv_info"):
            of_torch(stage, name).clear()
        writable.grad_send_info = None
    # Schedules of one stage and of several have different names for the flags.
    names = [name for name in vars(schedule) if name.endswith(("_forward_initialized", "_backward_initialized"))]
    if len(names) != 2:
        of_torch(schedule, "_stages_forward_initialized")
    for name in names:
        setattr(schedule, name, False)


def stages_of(schedule: Any) -> list[Any]:
    """The stages that a schedule runs on this rank."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [of_torch(schedule, "_stage")]


def output_dtype_of(module: torch.nn.Module) -> torch.dtype:
    """The dtype of a stage's output: its FSDP policy's, else its first floating parameter's, else bfloat16."""
    # An FSDP unit casts its output to the policy's dtype; other modules compute in their parameters' dtype.
    policy = None
    if isinstance(module, FSDPModule):
        policy = of_torch(of_torch(module, "_get_fsdp_state")(), "_mp_policy")
    first = next((p.dtype for p in module.parameters() if p.dtype.is_floating_point), torch.bfloat16)
    return (policy and (policy.output_dtype or policy.param_dtype)) or first
