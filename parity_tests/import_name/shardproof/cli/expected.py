"""A file of expected failures: each line has a scheme's name, its verdict, and after # the reason.

distributed_logprob     mismatch          # the gradient at ties, see issue 12
vocab_topk              engines disagree  # a buffer in a global
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardproof.declare.discover import nearest
from shardproof.engines import failure
from shardproof.report.summary import Expected

CAUSES = [kind.cause for kind in failure.RankFailure.__subclasses__()]
VERDICTS = ("mismatch", "protocol", "cost", "hygiene", "undecided", "engines disagree", *CAUSES)


def read(file: str | None, names: Sequence[str]) -> dict[str, Expected]:
    """The expected failures by scheme. Errors: ValueError with the line, if it names no scheme or no verdict."""
    expected: dict[str, Expected] = {}
    for number, line in enumerate(_lines(file) if file else (), start=1):
        words, _, reason = line.partition("#")
        if not words.strip():
            continue
        name, _, verdict = words.strip().partition(" ")
        verdict, at = verdict.strip(), f"{file}:{number}"
        if name not in names:
            raise ValueError(f"{at}: no scheme is called {name!r}{nearest(name, names)}")
        if verdict not in VERDICTS:
            raise ValueError(
                f"{at}: {verdict!r} is not the verdict of a failure; give one of {', '.join(sorted(set(VERDICTS)))}"
            )
        if name in expected:
            raise ValueError(f"{at}: {name} stands in the file a second time")
        expected[name] = Expected(verdict, reason.strip())
    return expected


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{file}: no text; it needs a line for each failure: scheme, verdict, # reason") from None
