"""The Work that a lockstep collective returns: results are written when it is waited for, not before."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from parity_tests.harness.run.lockstep.call import Call
from parity_tests.harness.run.lockstep.exchange import Traffic


class LockstepWork(dist.Work):
    """Waits for one call, or for the calls of a coalesced block together."""

    def __init__(self, traffic: Traffic, calls: Sequence[Call]) -> None:
        super().__init__()
        self._traffic, self.calls = traffic, calls

    def wait(self, timeout: timedelta | None = None) -> bool:
        for call in self.calls:
            self._traffic.wait(call)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._done():
            self._traffic.baton.offer(self.calls[0].row.rank)
        return self._done()

    def is_success(self) -> bool:
        return self._done()

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        self.wait()
        return [output for call in self.calls for output in call.outputs]

    def get_future(self) -> torch.futures.Future:
        """A future that is complete: asking for it waits, since C++ would wait for it without the baton."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future

    def source_rank(self) -> int:
        return self.calls[0].origin

    def _source_rank(self) -> int:
        return self.calls[0].origin

    def _done(self) -> bool:
        return all(call.done for call in self.calls)


class CollectedWork(LockstepWork):
    """A call inside a coalesced block: its wait is that of the block."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True
