"""Profiles: the number of examples and of shapes; they are Hypothesis profiles, and Hypothesis knows the active one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXAMPLES = {"quick": 8, "dev": 20, "ci": 60, "nightly": 2000}
SHAPES = {"quick": 1, "dev": 8, "ci": 12, "nightly": 48}
_IN_FORCE: list[str] = []


def register_profiles() -> None:
    """Register `quick`, `dev`, `ci` and `nightly` with Hypothesis; a conftest loads one with `--hypothesis-profile`."""
    from hypothesis import HealthCheck, settings

    quiet = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
    settings.register_profile("quick", max_examples=EXAMPLES["quick"], **quiet)
    settings.register_profile("dev", max_examples=EXAMPLES["dev"], **quiet)
    settings.register_profile("ci", max_examples=EXAMPLES["ci"], derandomize=True, database=None, **quiet)
    settings.register_profile("nightly", max_examples=EXAMPLES["nightly"], **quiet)


def profile() -> str:
    """The active profile: from `in_force`, else from Hypothesis; `dev` if that is not one of ours."""
    if _IN_FORCE:
        return _IN_FORCE[-1]
    if "hypothesis" not in sys.modules:
        return "dev"
    from hypothesis import settings

    name = settings.get_current_profile_name()
    return name if name in EXAMPLES else "dev"


@contextmanager
def in_force(name: str) -> Iterator[None]:
    """Activate a profile inside a block, without loading Hypothesis."""
    _IN_FORCE.append(name)
    try:
        yield
    finally:
        _IN_FORCE.pop()
