"""What a rank really computed, in the order in which it did, to be held against what was simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage

from torch_impl.pipelining._torch_compat import of_torch
from torch_impl.pipelining.action import Action


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
