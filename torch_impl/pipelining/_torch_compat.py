"""What this folder takes of torch that torch does not promise; each is looked for by name, and its absence is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules

from torch_impl.pipelining.action import Order


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
