"""A file of expected failures: each line has a scheme's name, its verdict, and after # the reason.

distributed_logprob     mismatch          # the gradient at ties, see issue 12
losses/old.py::entropy  engines disagree  # a buffer in a global; another file has a scheme of this name
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardproof.declare.discover import nearest
from shardproof.engines import failure
from shardproof.report.summary import Expected, Place

CAUSES = [kind.cause for kind in failure.RankFailure.__subclasses__()]
VERDICTS = ("mismatch", "protocol", "cost", "hygiene", "undecided", "engines disagree", *CAUSES)


def read(file: str, places: Mapping[str, Place], others: Mapping[str, Place]) -> dict[str, Expected]:
    """The expected failures of these schemes, by key. A line may also name another one, which this run does not judge.

    Errors: ValueError with the line, if it names no scheme, or one of several, or no verdict.
    """
    expected: dict[str, Expected] = {}
    for number, line in enumerate(_lines(file), start=1):
        words, _, reason = line.partition("#")
        if not words.strip():
            continue
        name, _, verdict = words.strip().partition(" ")
        verdict, at = verdict.strip(), f"{file}:{number}"
        key = _key(name, places, at) or _key(name, others, at)
        if key is None:
            near = nearest(name, [place.name for place in (*places.values(), *others.values())])
            raise ValueError(f"{at}: no scheme is called {name!r}{near}")
        if verdict not in VERDICTS:
            raise ValueError(
                f"{at}: {verdict!r} is not the verdict of a failure; give one of {', '.join(sorted(set(VERDICTS)))}"
            )
        if key in expected:
            raise ValueError(f"{at}: {name} stands in the file a second time")
        expected[key] = Expected(verdict, reason.strip())
    return {key: failure for key, failure in expected.items() if key in places}


def _key(word: str, places: Mapping[str, Place], at: str) -> str | None:
    """The scheme that `name` or `file.py::name` means. Errors: ValueError if more than one file has the name."""
    file, _, name = word.rpartition("::")
    keys = [key for key, place in places.items() if place.name == name]
    if file:
        keys = [key for key in keys if Path(file).resolve() == Path(places[key].file)]
    if len(keys) > 1:
        files = " and ".join(f"{places[key].path}::{name}" for key in keys)
        raise ValueError(f"{at}: {len(keys)} schemes are called {name!r}; write {files}, one on a line")
    return keys[0] if keys else None


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{file}: no text; it needs a line for each failure: scheme, verdict, # reason") from None
