"""Survivors that were looked at: why each is equivalent, that is, no test on a CPU can see the change.

`judged.toml` has an entry for each: the file, the line with the change in it, and the reason. An equivalent mutant is
listed on the page and not counted. Some have the same values in every case, some change cost alone, which rules are to
leave out, and some are run by CUDA or another version of torch alone, where this sample is not judged.
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
    """Why nobody can see it; None for a mutant that was not judged so."""
    return equivalent().get((mutant.file, mutant.place))
