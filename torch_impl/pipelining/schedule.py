"""Build torch's schedule for this rank's stages, by name or from a file; record a rank's actions; scale gradients.

Everything is validated on every rank before torch's constructors run, so that a mistake is an error and not a hang.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from torch_impl.contract import Function, Instance, ListOf, Number, PositiveInt, Rejected, contract
from torch_impl.pipelining._torch_compat import of_torch, open_in_separate_buffers, schedule_of_order
from torch_impl.pipelining.csv_schedule import ARGUMENT, CsvSchedule, read_csv
from torch_impl.pipelining.named_schedules import Rule, microbatches_problem, rule_of, stages_problem
from torch_impl.pipelining.order import Action
from torch_impl.pipelining.partition import ranks_of_stages
from torch_impl.pipelining.shapes import Stages, check_batches_of_each_step
from torch_impl.pipelining.tied_weights import sum_tied_gradients_after_each_step

logger = logging.getLogger(__name__)
NAME = "pipelining.build_pipeline_schedule"
BY_NAME = "pipeline_parallel_schedule"


@contract
def build_pipeline_schedule(
    pipeline_parallel_schedule_csv: str | os.PathLike | None,
    pipeline_parallel_schedule: str | None,
    microbatch_size: PositiveInt,
    local_batch_size: PositiveInt,
    stages: Stages,
    loss_fn: Function | None,
    scale_grads: bool = False,
) -> Any:
    """Build torch's schedule over this rank's `stages`, for local_batch_size / microbatch_size micro-batches.

    If both a file and a name are passed, the file decides and the name must fit it. `loss_fn=None` builds a schedule
    that only runs forward. Gradients are summed over micro-batches; call `scale_grads_by_divisor` once to divide them.

        schedule                                stages per rank   placement   n micro-batches
        GPipe                                   1                 loop        n >= 1
        1F1B                                    1                 loop        n >= p
        LoopedBFS                               any               loop        n >= 1
        Interleaved1F1B, InterleavedZeroBubble  any               loop        n % max(1, n // p) == 0
        ZBVZeroBubble                           2                 v           n >= 1
        DualPipeV                               2                 v           n >= 2 p

    Cost:   none. A step sends activations and their gradients between neighbouring stages, and the gradients of
            parameters that two stages share.
    Errors: ValueError on every rank, before anything is sent, for sizes that do not divide, an unknown schedule,
            stages, a placement or micro-batches that the schedule does not support, or an error in a file (its row and
            column count from 1); FileNotFoundError for a missing file; TypeError for a wrong type.
    """
    choice = choose_schedule(
        pipeline_parallel_schedule_csv,
        pipeline_parallel_schedule,
        microbatch_size,
        local_batch_size,
        stages[0].group_size,
    )
    return build_schedule(choice, stages, loss_fn, scale_grads)


@dataclass(frozen=True)
class ScheduleChoice:
    """A named schedule, or the schedule of a file; if both are given, the file must fit the named one."""

    rule: Rule | None
    file: CsvSchedule | None
    path: str | os.PathLike | None
    n_microbatches: int
    local_batch_size: int

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into input and weight gradients."""
        if self.file is None:
            return self.rule is not None and self.rule.splits_backward
        return any(action is not None and action.kind in ("I", "W") for row in self.file.order for action in row)


def choose_schedule(
    path: str | os.PathLike | None,
    name: str | None,
    microbatch_size: int,
    local_batch_size: int,
    pp_size: int,
) -> ScheduleChoice:
    """Validate a schedule's name or file before stages exist. Errors: see `build_pipeline_schedule`."""
    n = _n_microbatches(microbatch_size, local_batch_size)
    if path is None and name is None:
        raise Rejected(f"{ARGUMENT}=None and {BY_NAME}=None; pass one of them")
    rule = None if name is None else rule_of(BY_NAME, name)
    # The file decides; `_file_problems` compares it with the name once the stages are known.
    if path is not None:
        file = read_csv(path, pp_size=pp_size, n_microbatches=n)
        return ScheduleChoice(rule, file, path, n, local_batch_size)
    problem = microbatches_problem(rule, n, pp_size) if rule else None
    if problem and rule:
        raise Rejected(
            f"local_batch_size={local_batch_size}, microbatch_size={microbatch_size}: "
            f"{BY_NAME}={rule.name!r}: n_microbatches={n} {problem}"
        )
    return ScheduleChoice(rule, None, None, n, local_batch_size)


def build_schedule(
    choice: ScheduleChoice, stages: Sequence[PipelineStage], loss_fn: Callable | None, scale_grads: bool
) -> Any:
    """Build torch's schedule over this rank's stages. Errors: ValueError for stages that do not fit."""
    ordered = sorted(stages, key=lambda stage: stage.stage_index)
    ranks, count, n = ordered[0].group_size, ordered[0].num_stages, choice.n_microbatches
    # 1. Check the stages and their ranks against the file and the named schedule.
    for problem in _stage_problems(choice, ordered):
        raise Rejected(problem)
    _log(choice, ranks, count, loss_fn, scale_grads)
    # 2. Build torch's schedule, by name or from the file's order.
    if choice.file:
        order = _with_reductions(choice.file)
        is_complete = choice.file.has_communication
        schedule = schedule_of_order(order, is_complete, ordered, n, loss_fn, scale_grads)
    else:
        schedule = _by_name(choice.rule, ordered, n, loss_fn, scale_grads)  # pyright: ignore[reportArgumentType]
    # 3. Add safe first messages, tied weights and a check of each step's batch, which torch's schedule lacks.
    open_in_separate_buffers(ordered)
    sum_tied_gradients_after_each_step(schedule, ordered)
    check_batches_of_each_step(schedule, ordered, choice.local_batch_size)
    return schedule


def _by_name(rule: Rule, stages: list[PipelineStage], n: int, loss_fn: Callable | None, scale_grads: bool) -> Any:
    schedule_class: Any = get_schedule_class(rule.name)
    one_or_all = stages[0] if rule.is_single else stages
    return schedule_class(one_or_all, n_microbatches=n, loss_fn=loss_fn, scale_grads=scale_grads)


def _n_microbatches(microbatch_size: int, local_batch_size: int) -> int:
    if local_batch_size % microbatch_size:
        divisors = [str(size) for size in range(1, local_batch_size + 1) if local_batch_size % size == 0]
        choices = f"{', '.join(divisors[:-1])} or {divisors[-1]}" if divisors[1:] else divisors[0]
        raise Rejected(
            f"microbatch_size={microbatch_size} does not divide local_batch_size={local_batch_size}; use {choices}"
        )
    return local_batch_size // microbatch_size


def _stage_problems(choice: ScheduleChoice, stages: list[PipelineStage]) -> Iterator[str]:
    """The reasons why these stages do not fit on this rank. Each check relies on the checks before it."""
    rank, ranks, count = stages[0].group_rank, stages[0].group_size, stages[0].num_stages
    counts, group_sizes = ({getattr(stage, name) for stage in stages} for name in ("num_stages", "group_size"))
    if len(counts) > 1 or len(group_sizes) > 1:
        pipelines = f"pipelines with {sorted(counts)} stages over {sorted(group_sizes)} ranks"
        yield f"stages are of {pipelines}; pass the stages of one pipeline"
    # 1. Check the file or the named schedule, and take the placement from it.
    placed_by = ARGUMENT
    if choice.file:
        yield from _file_problems(choice, choice.file, stages)
        placement = choice.file.stage_to_rank
    else:
        rule: Rule = choice.rule  # pyright: ignore[reportAssignmentType]
        if count % ranks:
            yield f"{BY_NAME}={rule.name!r} with {count} stages over {ranks} ranks; use a multiple of {ranks}"
        if problem := stages_problem(rule, count // ranks):
            yield f"{BY_NAME}={rule.name!r} with {count // ranks} stages on each rank: {problem}"
        placement = ranks_of_stages(ranks, count, rule.style)
        placed_by = f"{BY_NAME}={rule.name!r} ({rule.style!r} placement)"
    # 2. Check that this rank has the stages that are placed on it.
    present = [stage.stage_index for stage in stages]
    expected = [stage for stage, other in enumerate(placement) if other == rank]
    if present != expected:
        yield (
            f"stages on rank {rank} of {ranks} are {present}, but {placed_by} places {expected} there; "
            "build the stages by stage_ids_this_rank"
        )


def _file_problems(choice: ScheduleChoice, file: CsvSchedule, stages: list[PipelineStage]) -> Iterator[str]:
    """The reasons why a file does not fit the model's stages, or the named schedule if there is one."""
    label = f"{ARGUMENT}={os.fspath(choice.path)!r}"  # pyright: ignore[reportArgumentType,reportCallIssue]
    ranks, count, rule = stages[0].group_size, stages[0].num_stages, choice.rule
    if len(file.stage_to_rank) != count:
        yield f"{label} has {len(file.stage_to_rank)} stages, the model {count}; split the model into as many"
    # If the file states communication, torch gathers a sharded stage only where the file says so.
    gathered = {action.stage for row in file.order for action in row if action and action.kind == "UNSHARD"}
    for stage in (stage.stage_index for stage in stages if isinstance(stage.submod, FSDPModule)):
        if file.has_communication and stage not in gathered:
            missing = f"no '{stage}UNSHARD', but stage {stage} is sharded"
            yield f"{label} has {missing}; add it, or leave all communication to torch"
    if rule is None:
        return
    # The file decides the order, but must satisfy the named schedule's rules for stages, ranks and micro-batches.
    misfits = [stages_problem(rule, each) for each in file.stages_per_rank]
    if count % ranks or file.stage_to_rank != ranks_of_stages(ranks, count, rule.style):
        misfits.append(f"{rule.name} places stages as {rule.style!r}, the file as {file.stage_to_rank}")
    for misfit in filter(None, [*misfits, microbatches_problem(rule, choice.n_microbatches, ranks)]):
        yield f"{BY_NAME}={rule.name!r} does not fit {ARGUMENT}: {misfit}, or pass None"


def _log(choice: ScheduleChoice, ranks: int, count: int, loss_fn: object, scale_grads: bool) -> None:
    name, n = "from a file" if choice.file else choice.rule.name, choice.n_microbatches  # pyright: ignore[reportOptionalMemberAccess]
    forward = "" if loss_fn else ", forward only (no loss_fn)"
    logger.info("schedule %s: %d ranks, %d stages, %d micro-batches%s", name, ranks, count, n, forward)
    if n < count:
        logger.warning("%d micro-batches are fewer than the %d stages: ranks will wait; use at least as many", n, count)
    if scale_grads:
        warnings.warn(
            f"{NAME}: scale_grads=True divides the accumulated gradients at each step, which is wrong for more than "
            "one step between zero_grad; use scale_grads_by_divisor once",
            UserWarning,
            stacklevel=5,
        )


def _with_reductions(file: CsvSchedule) -> list[list[Action | None]]:
    """The order of a file. If it states communication, each missing REDUCE_GRAD follows the stage's last backward."""
    if not file.has_communication:
        return file.order
    return [_with_rank_reductions(row) for row in file.order]


def _with_rank_reductions(row: list[Action | None]) -> list[Action | None]:
    parts = [(position, part) for position, action in enumerate(row) if action for part in action.parts]
    # A stage's gradient is complete after its last full backward or weight half.
    last = {part.stage: position for position, part in parts if part.kind in "BW"}
    stated = {part.stage for _, part in parts if part.kind == "REDUCE_GRAD"}
    complete: list[Action | None] = []
    for position, action in enumerate(row):
        missing = [stage for stage in last if last[stage] == position and stage not in stated]
        complete += [action, *(Action(stage, "REDUCE_GRAD") for stage in missing)]
    return complete


@runtime_checkable
class ScalableStage(Protocol):
    """A stage with a module and a method that scales its gradients."""

    submod: nn.Module

    def scale_grads(self, grad_scale_factor: int) -> None: ...


ScalableStages = Annotated[
    list[PipelineStage],
    ListOf(Instance(ScalableStage, "pass a PipelineStage", shows_value=False), "PipelineStage"),
]
Divisor = Annotated[int, Number(1, integer=True, remedy=" (microbatches x accumulation steps)")]


@contract
def scale_grads_by_divisor(stages: ScalableStages, divisor: Divisor) -> None:
    """Divide the gradients of `stages` in place. A parameter that several stages share is divided once.

    Call it once for each optimizer step, after the last backward. If losses are means, the `divisor` is n * k for n
    micro-batches and k steps of the schedule. (A schedule's own `scale_grads=True` divides the accumulated gradient in
    every step of the schedule, so that two equal steps give 1 + 1 / n means, and not 2.)

    Cost:   none between ranks; a DTensor's local shard is divided.
    Errors: TypeError for an element that is not a stage or a divisor that is not an int; ValueError for a divisor
            below 1.
    """
    # Key by identity, so that a shared parameter is divided once.
    parameters = {id(parameter): parameter for stage in stages for parameter in stage.submod.parameters()}
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)


@contextlib.contextmanager
def executed_actions(stages: Sequence[PipelineStage]) -> Iterator[list[Action]]:
    """Record the actions of `stages` that run inside the block, in a list that grows as they run.

    They equal this rank's events in the simulated timeline, in the same order.
    """
    actions: list[Action] = []
    with contextlib.ExitStack() as stack:
        for stage in stages:
            stack.enter_context(_record_actions(stage, actions))
        yield actions


@contextlib.contextmanager
def _record_actions(stage: PipelineStage, actions: list[Action]) -> Iterator[None]:
    """Inside the block, append each forward and backward of the stage to `actions` before it runs."""

    def forward(original: Callable, chunk: int, *args: Any, **kwargs: Any) -> Any:
        actions.append(Action(stage.stage_index, "F", chunk))
        return original(chunk, *args, **kwargs)

    def backward(original: Callable, chunk: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        actions.append(Action(stage.stage_index, "B" if full_backward else "I", chunk))
        return original(chunk, *args, full_backward=full_backward, **kwargs)

    def weights(original: Callable, chunk: int, *args: Any, **kwargs: Any) -> Any:
        actions.append(Action(stage.stage_index, "W", chunk))
        return original(chunk, *args, **kwargs)

    # torch has one method for a full backward and for its input half; an argument distinguishes them.
    names = {"forward_one_chunk": forward, "backward_one_chunk": backward, "backward_weight_one_chunk": weights}
    outer = {name: vars(stage)[name] for name in names if name in vars(stage)}  # set by a block around this one
    for name, record in names.items():
        original = of_torch(stage, name)
        setattr(stage, name, functools.partial(record, original))
    try:
        yield
    finally:
        for name in names:
            # Deleting the instance's attribute restores the class's method.
            delattr(stage, name)
        vars(stage).update(outer)
