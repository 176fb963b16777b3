"""What a run of many schemes was asked, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parity_tests.harness.report.report import Report
from parity_tests.harness.run.exit_status import EQUAL, FAILED, MISMATCH, NOTHING


@dataclass(frozen=True)
class Wanted:
    """What the command line asked for."""

    engine: str = "lockstep"
    examples: int | None = None
    profile: str = "dev"
    seed: int = 0
    names: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    fail_fast: bool = False
    jax_cache: str | None = None
    json: str | None = None
    junit: str | None = None
    quiet: bool = False
    verbose: bool = False


@dataclass
class Outcome:
    """Reports by scheme, and the schemes that were not run with the reason."""

    reports: list[Report] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def status(self) -> int:
        if any(report.failure is not None for report in self.reports):
            return FAILED
        if any(not report.ok for report in self.reports):
            return MISMATCH
        return EQUAL if self.reports else NOTHING
