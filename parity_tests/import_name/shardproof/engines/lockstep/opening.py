"""The messages by which torch's pipeline stages open their channels.

torch 2.11 sends a tensor of shape [] to one of shape [1], and receives from both neighbours of a stage into one tensor
at once. Nothing reads the numbers, but lockstep would report both as faults, in a line that no user can mend. Later
versions open this way only for stages that are not a `PipelineStage`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STAGES, MESSAGES = "torch.distributed.pipelining.stage", "_get_init_p2p_neighbors_ops"


@contextmanager
def in_separate_buffers() -> Iterator[None]:
    """Give each message a tensor of its own, of shape [1], if pipelining is imported; restores torch's method."""
    stage: Any = getattr(sys.modules.get(STAGES), "_PipelineStageBase", None)
    original = getattr(stage, MESSAGES, None)
    if original is None:
        yield
        return

    def messages(self: Any) -> list[Any]:
        opening = original(self)
        for message in opening:
            message.tensor = message.tensor.reshape(1).clone()
        return opening

    setattr(stage, MESSAGES, messages)
    try:
        yield
    finally:
        setattr(stage, MESSAGES, original)
