"""How a run fails: one exception type for each cause, so that Hypothesis counts causes and not messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from traceback import format_exception
from typing import Any

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.run.ledger import Ledger

# After the name of an attribute that a process group has not, as in mesh["tp"].get_group().
GROUP_HINT = "mesh[axis] is a process group; mesh.device_mesh[axis] is torch's DeviceMesh"
CANNOT_RUN = "lockstep cannot run this"  # in its own errors; torch's C++ hands on the message alone
WRAPPED = "failed to run forward"  # in the message of torch's exception around that of a pipeline's stage


def raised_by_function(error: BaseException) -> BaseException:
    """The exception that the function raised: torch wraps that of a pipeline's stage in one that does not name it."""
    while type(error) is RuntimeError and WRAPPED in str(error) and error.__cause__ is not None:
        error = error.__cause__
    return error


def message_of(error: BaseException) -> str:
    """The message of an exception, also where making it raises another."""
    try:
        return str(error)
    except Exception as second:
        return f"<its message raises {type(second).__name__}>"


class RankFault(Exception):
    """Raised on a rank by the harness itself: what the function returned does not fit its declaration."""


class NotRun(Exception):
    """The machine lacks what was asked for; counted and reported as not run, never as passed."""


class RankFailure(Exception):
    """A rank failed, or the ranks could not go on together.

    `rank` is the rank whose cause it is, `op` and `source` what it was doing and where, `others` a sentence for
    each other rank, `ledger` what had been issued by then.
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
        # An exception is pickled as its type and its positional arguments, and this one has others.
        fields = {name: getattr(self, name) for name in ("rank", "op", "source", "case", "others", "ledger")}
        return partial(type(self), **fields), self.args

    @property
    def traceback(self) -> str | None:
        """The full traceback of what the rank raised, frames of libraries included; None where no rank raised."""
        if self.__cause__ is not None:
            return "".join(format_exception(self.__cause__)).rstrip()
        return "\n".join(getattr(self, "__notes__", ())).rstrip() or None

    def __str__(self) -> str:
        return "\n".join([f"{self.cause}: {self.args[0]}", *(f"  {line}" for line in self._of_others())])

    def _of_others(self) -> list[str]:
        """A line for each other rank that the message does not mention; one for all of which it says the same."""
        same = [line for line in self.others if _without_rank(line) == _without_rank(self.args[0])]
        lines = [line for line in self.others if line not in same and line not in self.args[0]]
        if len(same) > 1:
            ranks = ", ".join(line.split()[1] for line in same)
            return [f"ranks {ranks} do the same", *lines]
        return [f"rank {line.split()[1]} does the same" for line in same] + lines


def _without_rank(line: str) -> str:
    """`raised KeyError: 'w'` of `rank 1 raised KeyError: 'w'`."""
    return re.sub(r"^rank \d+ ", "", line)


class Raised(RankFailure):
    """A rank's own exception."""

    cause = "raised"


class Died(RankFailure):
    """A rank's process ended without an exception."""

    cause = "died"


class CollectiveMismatch(RankFailure):
    """Ranks issued collectives or messages that do not fit together. A wrong value is a mismatch, see report."""

    cause = "collective mismatch"


class Deadlock(RankFailure):
    """No rank can run; the message says of every rank where it stands."""

    cause = "deadlock"


class Stalled(RankFailure):
    """Nothing has moved for too long."""

    cause = "stalled"


class Shared(RankFailure):
    """Two ranks of lockstep used one process group or one storage, which processes would each have for themselves."""

    cause = "shared"


class Unwaited(RankFailure):
    """An asynchronous collective was never waited for."""

    cause = "unwaited"


class Modified(RankFailure):
    """A buffer was changed that the function may not change."""

    cause = "modified"
