"""A schedule for the stages of this rank, by name or from a file; everything is refused before torch is asked."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from torch_impl.pipelining._torch_compat import of_torch, open_in_own_buffers, schedule_of_order
from torch_impl.pipelining.arguments import check_int, check_positive, check_switch
from torch_impl.pipelining.csv_schedule import ARGUMENT, CsvSchedule, read_csv
from torch_impl.pipelining.named_schedules import Rule, microbatches_fault, rule_of, stages_fault
from torch_impl.pipelining.order import Action
from torch_impl.pipelining.partition import stage_to_rank
from torch_impl.pipelining.shapes import refuse_other_sizes
from torch_impl.pipelining.tied_weights import sum_ties_after_each_step

logger = logging.getLogger(__name__)
NAME = "build_pipeline_schedule"
BY_NAME = "pipeline_parallel_schedule"


def build_pipeline_schedule(
    pipeline_parallel_schedule_csv: str | None,
    pipeline_parallel_schedule: str | None,
    microbatch_size: int,
    local_batch_size: int,
    stages: list[PipelineStage],
    loss_fn: Callable | None,
    scale_grads: bool = False,
) -> Any:
    """torch's schedule over `stages`, those of this rank, for local_batch_size / microbatch_size micro-batches.

    A file decides where both are given; the name must then fit it. `loss_fn=None` builds a schedule that only runs
    forward. Gradients are summed over micro-batches; `scale_grads_by_divisor` divides them, once.

        schedule                                stages per rank   placement   n micro-batches
        GPipe                                   1                 loop        n >= 1
        1F1B                                    1                 loop        n >= p
        LoopedBFS                               any               loop        n >= 1
        Interleaved1F1B, InterleavedZeroBubble  any               loop        n % max(1, n // p) == 0
        ZBVZeroBubble                           2                 v           n >= 1
        DualPipeV                               2                 v           n >= 2 p

    Cost:   none; what a step sends are the activations and their gradients between neighbouring stages, and the
            gradients of parameters that two stages share.
    Errors: ValueError on every rank, before anything is sent, for sizes that do not divide, a schedule that there is
            not, stages, placement or micro-batches that it cannot have, a file with a fault (row and column from 1);
            FileNotFoundError for a file that is not there; TypeError for other kinds.
    """
    n, rule, read = check_schedule_arguments(
        pipeline_parallel_schedule_csv,
        pipeline_parallel_schedule,
        microbatch_size,
        local_batch_size,
        next((stage.group_size for stage in _listed(stages) if isinstance(stage, PipelineStage)), None),
        loss_fn,
        scale_grads,
    )
    stages = _checked_stages(stages)
    ranks, count = stages[0].group_size, stages[0].num_stages
    if read:
        _check_file(pipeline_parallel_schedule_csv, read, stages)
    if rule is not None:
        _check_rule(rule, ranks, count, n, read)
    placed = read.stage_to_rank if read else stage_to_rank(ranks, count, rule.style)  # pyright: ignore[reportOptionalMemberAccess]
    _check_placement(stages, placed, read, rule)
    _tell(read, rule, ranks, count, n, loss_fn, scale_grads)
    if read:
        schedule = schedule_of_order(_reducing(read), read.says_all, stages, n, loss_fn, scale_grads)
    else:
        schedule = _by_name(rule, stages, n, loss_fn, scale_grads)  # pyright: ignore[reportArgumentType]
    open_in_own_buffers(stages)
    sum_ties_after_each_step(schedule, stages)
    refuse_other_sizes(schedule, stages, local_batch_size)
    return schedule


def check_schedule_arguments(
    csv: Any, name: Any, microbatch_size: int, local_batch_size: int, ranks: int | None, loss_fn: Any, scale_grads: bool
) -> tuple[int, Rule | None, CsvSchedule | None]:
    """Micro-batches, rule and file: all that can be refused before there are stages. Errors: as the schedule's."""
    n = _checked_microbatches(microbatch_size, local_batch_size)
    check_switch(NAME, "scale_grads", scale_grads)
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(
            f"pipelining.{NAME}: loss_fn={loss_fn!r} is a {type(loss_fn).__name__}; pass a function or None"
        )
    if csv is None and name is None:
        raise ValueError(f"pipelining.{NAME}: {ARGUMENT}=None and {BY_NAME}=None; pass one of them")
    rule = None if name is None else rule_of(NAME, BY_NAME, name)
    if csv is not None:
        if not isinstance(csv, (str, os.PathLike)):
            raise TypeError(f"pipelining.{NAME}: {ARGUMENT}={csv!r} is a {type(csv).__name__}; pass a path")
        return n, rule, read_csv(csv, pp_size=ranks, n_microbatches=n)
    fault = microbatches_fault(rule, n, ranks) if rule and ranks else None
    if fault and rule:
        raise ValueError(
            f"pipelining.{NAME}: local_batch_size={local_batch_size}, microbatch_size={microbatch_size}: "
            f"{BY_NAME}={rule.name!r}: n_microbatches={n} {fault}"
        )
    return n, rule, None


def _by_name(rule: Rule, stages: list[PipelineStage], n: int, loss_fn: Callable | None, scale_grads: bool) -> Any:
    made: Any = get_schedule_class(rule.name)
    given = stages[0] if rule.is_single else stages
    return made(given, n_microbatches=n, loss_fn=loss_fn, scale_grads=scale_grads)


def _checked_microbatches(microbatch_size: int, local_batch_size: int) -> int:
    check_positive(NAME, "microbatch_size", microbatch_size)
    check_positive(NAME, "local_batch_size", local_batch_size)
    if local_batch_size % microbatch_size:
        divisors = [str(size) for size in range(1, local_batch_size + 1) if local_batch_size % size == 0]
        listed = f"{', '.join(divisors[:-1])} or {divisors[-1]}" if divisors[1:] else divisors[0]
        raise ValueError(
            f"pipelining.{NAME}: microbatch_size={microbatch_size} does not divide "
            f"local_batch_size={local_batch_size}; use {listed}"
        )
    return local_batch_size // microbatch_size


def _listed(stages: object) -> Sequence[object]:
    return stages if isinstance(stages, (list, tuple)) else ()


def _checked_stages(stages: object) -> list[PipelineStage]:
    """Stages of one pipeline, ascending. Errors: TypeError; ValueError."""
    if not isinstance(stages, (list, tuple)):
        raise TypeError(f"pipelining.{NAME}: stages is a {type(stages).__name__}; pass a list of PipelineStage")
    if not stages:
        raise ValueError(f"pipelining.{NAME}: stages is empty; pass the stages of this rank")
    for index, stage in enumerate(stages):
        if not isinstance(stage, PipelineStage):
            raise TypeError(f"pipelining.{NAME}: stages[{index}] is a {type(stage).__name__}; pass a PipelineStage")
    counts = sorted({stage.num_stages for stage in stages})
    ranks = sorted({stage.group_size for stage in stages})
    if len(counts) > 1 or len(ranks) > 1:
        raise ValueError(
            f"pipelining.{NAME}: stages are of pipelines with {counts} stages over {ranks} ranks; pass those of one"
        )
    return sorted(stages, key=lambda stage: stage.stage_index)


def _check_file(path: Any, read: CsvSchedule, stages: list[PipelineStage]) -> None:
    """A file must hold as many stages as there are, and gather those that are sharded."""
    if len(read.stage_to_rank) != stages[0].num_stages:
        raise ValueError(
            f"pipelining.{NAME}: {ARGUMENT}={os.fspath(path)!r} has {len(read.stage_to_rank)} stages, the model "
            f"{stages[0].num_stages}; cut the model into as many as the file has"
        )
    gathered = {action.stage for row in read.order for action in row if action and action.kind == "UNSHARD"}
    for stage in stages:
        if read.says_all and isinstance(stage.submod, FSDPModule) and stage.stage_index not in gathered:
            raise ValueError(
                f"pipelining.{NAME}: {ARGUMENT}={os.fspath(path)!r} has no '{stage.stage_index}UNSHARD', but stage "
                f"{stage.stage_index} is sharded; add it, or leave all communication to torch"
            )


def _check_rule(rule: Rule, ranks: int, count: int, n: int, read: CsvSchedule | None) -> None:
    """What a named schedule asks of stages and micro-batches, or of the file that it is said to be."""
    if read:
        faults = [stages_fault(rule, each) for each in read.stages_per_rank]
        styled = (
            None
            if count % ranks == 0 and read.stage_to_rank == stage_to_rank(ranks, count, rule.style)
            else (f"{rule.name} places stages as {rule.style!r}, the file as {read.stage_to_rank}")
        )
        fault = next(filter(None, [*faults, styled, microbatches_fault(rule, n, ranks)]), None)
        if fault:
            raise ValueError(
                f"pipelining.{NAME}: {BY_NAME}={rule.name!r} does not fit {ARGUMENT}: {fault}, or pass None"
            )
        return
    if count % ranks:
        raise ValueError(
            f"pipelining.{NAME}: {BY_NAME}={rule.name!r} with {count} stages over {ranks} ranks; "
            f"use a multiple of {ranks}"
        )
    fault = stages_fault(rule, count // ranks)
    if fault:
        raise ValueError(
            f"pipelining.{NAME}: {BY_NAME}={rule.name!r} with {count // ranks} stages on each rank: {fault}"
        )


def _check_placement(
    stages: list[PipelineStage], placed: list[int], read: CsvSchedule | None, rule: Rule | None
) -> None:
    rank = stages[0].group_rank
    held = [stage.stage_index for stage in stages]
    due = [stage for stage, other in enumerate(placed) if other == rank]
    if held != due:
        by = ARGUMENT if read else f"{BY_NAME}={rule.name!r} ({rule.style!r} placement)"  # pyright: ignore[reportOptionalMemberAccess]
        raise ValueError(
            f"pipelining.{NAME}: stages on rank {rank} of {stages[0].group_size} are {held}, but {by} places {due} "
            f"there; build the stages by stage_ids_this_rank"
        )


def _tell(
    read: CsvSchedule | None, rule: Rule | None, ranks: int, count: int, n: int, loss_fn: object, scale: bool
) -> None:
    name = "from a file" if read else rule.name  # pyright: ignore[reportOptionalMemberAccess]
    forward = "" if loss_fn else ", forward only (no loss_fn)"
    logger.info("schedule %s: %d ranks, %d stages, %d micro-batches%s", name, ranks, count, n, forward)
    if n < count:
        logger.warning("%d micro-batches are fewer than the %d stages: ranks will wait; use at least as many", n, count)
    if scale:
        warnings.warn(
            f"pipelining.{NAME}: scale_grads=True divides what has been accumulated at each step, which is wrong for "
            f"more than one step between zero_grad; use scale_grads_by_divisor once",
            UserWarning,
            stacklevel=3,
        )


def _reducing(read: CsvSchedule) -> list[list[Action | None]]:
    """An order that says all reduces each stage's gradient once; where a file does not say when, after its last one."""
    if not read.says_all:
        return read.order
    return [_reducing_row(row) for row in read.order]


def _reducing_row(row: list[Action | None]) -> list[Action | None]:
    parts = [(at, part) for at, action in enumerate(row) if action for part in action.parts]
    last = {part.stage: at for at, part in parts if part.kind in "BW"}
    told = {part.stage for _, part in parts if part.kind == "REDUCE_GRAD"}
    whole: list[Action | None] = []
    for at, action in enumerate(row):
        whole += [action, *(Action(stage, "REDUCE_GRAD") for stage in last if last[stage] == at and stage not in told)]
    return whole


def scale_grads_by_divisor(stages: list[PipelineStage], divisor: int) -> None:
    """Divide the gradients of these stages in place, each once, also where stages share a parameter.

    Once for each step of the optimiser, after the last backward: with losses that are means, n micro-batches and k
    steps of the schedule the divisor is n * k. (A schedule's own `scale_grads=True` divides at each of its steps what
    has been accumulated, so that two equal steps come to 1 + 1 / n means, and not to 2.)

    Cost:   none between ranks; a DTensor's shard is divided where it lies.
    Errors: TypeError for what is no stage, or a divisor that is no int; ValueError for a divisor below 1.
    """
    if not isinstance(stages, (list, tuple)):
        raise TypeError(
            f"pipelining.scale_grads_by_divisor: stages is a {type(stages).__name__}; pass a list of PipelineStage"
        )
    for index, stage in enumerate(stages):
        if not callable(getattr(stage, "scale_grads", None)) or not isinstance(
            getattr(stage, "submod", None), nn.Module
        ):
            raise TypeError(
                f"pipelining.scale_grads_by_divisor: stages[{index}] is a {type(stage).__name__}; pass a PipelineStage"
            )
    check_int("scale_grads_by_divisor", "divisor", divisor)
    if divisor < 1:
        raise ValueError(
            f"pipelining.scale_grads_by_divisor: divisor={divisor} must be a positive int "
            "(microbatches x accumulation steps)"
        )
    parameters = {id(parameter): parameter for stage in stages for parameter in stage.submod.parameters()}
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)


@contextlib.contextmanager
def executed_actions(stages: Sequence[PipelineStage]) -> Iterator[list[Action]]:
    """The actions of these stages that run inside the block, in a list that grows.

    `timeline.events` of a rank have the same actions in the same order, or the schedule is not what was simulated.
    """
    actions: list[Action] = []
    with contextlib.ExitStack() as stack:
        for stage in stages:
            stack.enter_context(_noted(stage, actions))
        yield actions


@contextlib.contextmanager
def _noted(stage: PipelineStage, actions: list[Action]) -> Iterator[None]:
    def forward(original: Callable, chunk: int, *args: Any, **kwargs: Any) -> Any:
        actions.append(Action(stage.stage_index, "F", chunk))
        return original(chunk, *args, **kwargs)

    def backward(original: Callable, chunk: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        actions.append(Action(stage.stage_index, "B" if full_backward else "I", chunk))
        return original(chunk, *args, full_backward=full_backward, **kwargs)

    def weights(original: Callable, chunk: int, *args: Any, **kwargs: Any) -> Any:
        actions.append(Action(stage.stage_index, "W", chunk))
        return original(chunk, *args, **kwargs)

    names = {"forward_one_chunk": forward, "backward_one_chunk": backward, "backward_weight_one_chunk": weights}
    outer = {name: vars(stage)[name] for name in names if name in vars(stage)}  # of a block around this one
    for name, note in names.items():
        original = of_torch(stage, name)
        setattr(stage, name, lambda *args, _note=note, _original=original, **kwargs: _note(_original, *args, **kwargs))
    try:
        yield
    finally:
        for name in names:
            delattr(stage, name)
        vars(stage).update(outer)
