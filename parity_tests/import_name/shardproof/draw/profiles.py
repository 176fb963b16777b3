"""Profiles set the numbers of examples and of shapes. They are Hypothesis profiles; Hypothesis keeps the active one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXAMPLES = {"quick": 8, "fast": 13, "dev": 20, "ci": 60, "nightly": 2000}
SHAPES = {"quick": 1, "fast": 4, "dev": 8, "ci": 12, "nightly": 48}
REPEATED = ("fast", "ci")  # `make test` and `make test-all` draw the same examples in each run
_IN_FORCE: list[str] = []


def register_profiles() -> None:
    """Register the profiles with Hypothesis; a conftest loads one by `--hypothesis-profile`."""
    from hypothesis import HealthCheck, settings

    quiet = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
    for name, examples in EXAMPLES.items():
        # Set in each profile: Hypothesis's default profile repeats examples if the variable CI is set.
        repeated = name in REPEATED
        stored = {"database": None} if repeated else {}
        settings.register_profile(name, max_examples=examples, derandomize=repeated, **quiet, **stored)


def few(examples: int) -> int:
    """A third of `examples`, rounded up, with the profile `fast`, else `examples`; for a test that sets its number."""
    return -(-examples // 3) if profile() == "fast" else examples


def profile() -> str:
    """The active profile, from `in_force` or else from Hypothesis; `dev` if Hypothesis has another profile or none."""
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
