"""Survivors that a person has read, and why each is equivalent: no test on a CPU can see the change.

`judged.toml` has an entry for each: the file, the line with the change in it, and the reason. An equivalent mutant is
listed on the page and not counted. Some have the same values in every case. Some change only cost, which rules should
leave out. Some run only on CUDA or on another version of torch, where this sample is not judged.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from parity_tests.evidence.mutants.mutant import Mutant


@cache
def equivalent() -> dict[tuple[str, str], str]:
    """The reasons, by file and place."""
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {(file, place): why for file, places in entries.items() for place, why in places.items()}


def why_equivalent(mutant: Mutant) -> str | None:
    """Why the mutant is equivalent; None if it was not judged to be."""
    return equivalent().get((mutant.file, mutant.place))
