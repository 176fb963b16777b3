"""The exit statuses of a command.

0 all equal; 1 a mismatch of value, gradient, protocol, cost or hygiene; 2 a target, option or declaration that cannot
be used, or an output file that cannot be written; 3 a rank failed, or a user's code ended the process; 4 nothing ran;
70 an internal error; 130 interrupted; 141 standard output has no reader any more; 128 + N ended by signal N.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardproof.endings.raised import EXITS, chain

EQUAL, MISMATCH, USAGE, RANK_FAILED, NOTHING, INTERNAL, INTERRUPTED, UNREAD = 0, 1, 2, 3, 4, 70, 130, 141
BY_SIGNAL = 128  # plus the number of the signal, as a shell reports it
INTERRUPTED_SENTENCE = "interrupted; what was not printed was not judged"
WORST_FIRST = (INTERNAL, RANK_FAILED, MISMATCH, USAGE)  # a command with several outcomes exits with the first


def worst(statuses: Iterable[int]) -> int | None:
    """The worst of the statuses; None if none of them is in WORST_FIRST."""
    found = set(statuses)
    return next((status for status in WORST_FIRST if status in found), None)


def of_error(error: BaseException) -> int:
    """The status of a user's mistake: 3 if an exit caused the error, else the error's own status, else 2."""
    has_left = any(isinstance(cause, EXITS) for cause in chain(error))
    return RANK_FAILED if has_left else getattr(error, "status", USAGE)


class NotJudged(Exception):
    """The only scheme of a command has no verdict; the message says why."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status
