"""Profiles: how many examples are drawn, and of how many shapes; those of Hypothesis, which says which is in force."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXAMPLES = {"quick": 8, "dev": 20, "ci": 60, "nightly": 2000}
SHAPES = {"quick": 1, "dev": 8, "ci": 12, "nightly": 48}
_IN_FORCE: list[str] = []


def register_profiles() -> None:
    """Register `quick`, `dev`, `ci` and `nightly` with Hypothesis; a conftest loads one by `--hypothesis-profile`."""
    from hypothesis import HealthCheck, settings

    quiet = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
    settings.register_profile("quick", max_examples=EXAMPLES["quick"], **quiet)
    settings.register_profile("dev", max_examples=EXAMPLES["dev"], **quiet)
    settings.register_profile("ci", max_examples=EXAMPLES["ci"], derandomize=True, database=None, **quiet)
    settings.register_profile("nightly", max_examples=EXAMPLES["nightly"], **quiet)


def profile() -> str:
    """The profile in force: of `in_force`, or else of Hypothesis; `dev` where it is none of ours."""
    if _IN_FORCE:
        return _IN_FORCE[-1]
    if "hypothesis" not in sys.modules:
        return "dev"
    from hypothesis import settings

    name = settings.get_current_profile_name()
    return name if name in EXAMPLES else "dev"


@contextmanager
def in_force(name: str) -> Iterator[None]:
    """A profile for the time of a block, for which Hypothesis need not be loaded."""
    _IN_FORCE.append(name)
    try:
        yield
    finally:
        _IN_FORCE.pop()
