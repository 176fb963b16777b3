"""Exceptions for failures of a run. Each cause has its own type, so that Hypothesis counts causes, not messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from traceback import format_exception
from typing import Any

from shardproof.declare.case import CaseSpec
from shardproof.endings.raised import chain, message_of
from shardproof.engines.ledger import Ledger

# Follows the name of a missing attribute of a process group, as in mesh["tp"].get_group().
GROUP_HINT = "mesh[axis] is a process group; mesh.device_mesh[axis] is torch's DeviceMesh"
CANNOT_RUN = "lockstep cannot run this"  # marks lockstep's own errors: torch's C++ passes on only the message
WRAPPED = "failed to run forward"  # torch wraps a pipeline stage's exception in an exception with this message


def raised_by_function(error: BaseException) -> BaseException:
    """The exception that the function raised, without torch's wrapper around a pipeline stage's exception."""
    for each in chain(error):
        if type(each) is not RuntimeError or WRAPPED not in message_of(each) or each.__cause__ is None:
            return each
    return error


class RankFault(Exception):
    """Raised on a rank by the harness itself: the function's result does not match its declaration."""


class NotRun(Exception):
    """The machine lacks something that the run needs; reported and counted as not run, never as passed."""


class RankFailure(Exception):
    """A rank failed, or the ranks could not go on together.

    `rank` caused the failure. `op` is its operation, and `source` is the line that issued the operation. `others` has a
    sentence for each other rank, and may end with a piece of advice. `ledger` has the calls issued so far.
    """

    cause = "failed"

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        op: str | None = None,
        source: str | None = None,
        case: CaseSpec | None = None,
        others: Sequence[str] = (),
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.op, self.source = rank, op, source
        self.case, self.others, self.ledger = case, tuple(others), ledger

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle keeps only an exception's type and positional arguments; the fields are keyword arguments.
        fields = {name: getattr(self, name) for name in ("rank", "op", "source", "case", "others", "ledger")}
        notes = {"__notes__": [self.traceback]} if self.traceback else None  # a cause is not pickled
        return partial(type(self), **fields), self.args, notes

    @property
    def traceback(self) -> str | None:
        """The full traceback of the rank's exception, with frames of libraries; None if no rank raised."""
        if self.__cause__ is not None:
            return "".join(format_exception(self.__cause__)).rstrip()
        return "\n".join(getattr(self, "__notes__", ())).rstrip() or None

    def __str__(self) -> str:
        return "\n".join([f"{self.cause}: {self.args[0]}", *(f"  {line}" for line in self._of_others())])

    def _of_others(self) -> list[str]:
        """A line for each rank that the message does not mention; one line for all ranks that failed the same way."""
        same = [line for line in self.others if _without_rank(line) == _without_rank(self.args[0])]
        lines = [line for line in self.others if line not in same and line not in self.args[0]]
        if len(same) > 1:
            ranks = ", ".join(line.split()[1] for line in same)
            return [f"ranks {ranks} do the same", *lines]
        return [f"rank {line.split()[1]} does the same" for line in same] + lines


def _without_rank(line: str) -> str:
    """A line without its rank: `raised KeyError: 'w'` for `rank 1 raised KeyError: 'w'`."""
    return re.sub(r"^rank \d+ ", "", line)


class Raised(RankFailure):
    """A rank's own exception."""

    cause = "raised"


class Died(RankFailure):
    """A rank's process ended without an exception."""

    cause = "died"


class CollectiveMismatch(RankFailure):
    """Ranks issued collectives or messages that do not match. A wrong value has the verdict `mismatch`."""

    cause = "collective mismatch"


class Deadlock(RankFailure):
    """No rank can continue; the message says where each rank waits."""

    cause = "deadlock"


class Stalled(RankFailure):
    """No rank has made progress for too long."""

    cause = "stalled"


class Shared(RankFailure):
    """Two ranks of lockstep used the same process group or storage, which separate processes could not share."""

    cause = "shared"


class Unwaited(RankFailure):
    """An asynchronous collective was never waited for."""

    cause = "unwaited"


class Modified(RankFailure):
    """The function changed a buffer that it must not change."""

    cause = "modified"
