"""A verdict in the output of pytest: broken at the terminal's width, with its cause in the summary.

pytest prints the lines of an exception as they are, and of its first line as much as fits behind the name of the test.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from shardproof.engines.failure import RankFailure
from shardproof.report.report import Report, VerdictError
from shardproof.report.sentence import Sentence, as_text

OF_EXCEPTION = "E   "  # pytest prints lines that begin so in red


@dataclass
class Crash:
    """The place and the message of a failure, with the fields that pytest reads and sends to another process."""

    path: str
    lineno: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}: {self.message}"


def of_scheme(excinfo: Any, report: Report | None, crash: Crash) -> Any:
    """The failure of a scheme: its report, or the sentence of the exception. The message of `crash` is filled in."""
    error = excinfo.value
    failure = excinfo.getrepr(style="value", tbfilter=False, chain=False)
    sentence = str(error).strip("\n")
    crash.message = sentence.partition("\n")[0] if report is None else report.headline
    (entry,) = failure.reprtraceback.reprentries
    entry.lines = as_text(Sentence(sentence) if report is None else report, _columns()).splitlines()
    failure.reprcrash = crash
    failure.chain = [(failure.reprtraceback, crash, None)]
    return failure


def of_test(error: BaseException, failure: Any) -> bool:
    """Whether a user's test ends with a verdict; if so, change its failure: the exception's lines, and its message."""
    report = _failing_report(error)
    if report is not None:
        told, message = report, f"{report.scheme.rpartition(':')[2]}: {report.headline}"
    elif isinstance(error, RankFailure):
        told, message = Sentence(str(error)), str(error).splitlines()[0]
    else:
        return False
    lines = as_text(told, _columns() - len(OF_EXCEPTION)).splitlines()
    lines += "\n".join(getattr(error, "__notes__", ())).splitlines()
    entry = failure.reprtraceback.reprentries[-1]
    source = [line for line in entry.lines if not line.startswith(OF_EXCEPTION)]
    entry.lines = [*source, *(OF_EXCEPTION + line for line in lines)]
    if failure.reprcrash is not None:
        failure.reprcrash.message = message
    return True


def _failing_report(error: BaseException) -> Report | None:
    """The report of a verdict, or of `assert scheme.verify()`, whose parts pytest keeps by names of its own."""
    if isinstance(error, VerdictError):
        return error.report
    if not isinstance(error, AssertionError):
        return None
    *_, (frame, _) = walk_tb(error.__traceback__)
    kept = [value for name, value in frame.f_locals.items() if name.startswith("@py_assert")]
    return next((value for value in kept if isinstance(value, Report) and not value.ok), None)


def _columns() -> int:
    return shutil.get_terminal_size().columns
