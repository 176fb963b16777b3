"""Hypothesis's side of drawing: a strategy of CaseSpecs, and the profiles that say how many and how they are found."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.declared import Declared
from parity_tests.harness.draw.drawing import draw_case

EXAMPLES = {"quick": 8, "dev": 20, "ci": 60, "nightly": 2000}
SHAPES = {"quick": 1, "dev": 8, "ci": 12, "nightly": 48}


def register_profiles() -> None:
    """Register `quick`, `dev`, `ci` and `nightly` with Hypothesis; a conftest loads one by `--hypothesis-profile`."""
    quiet = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
    settings.register_profile("quick", max_examples=EXAMPLES["quick"], **quiet)
    settings.register_profile("dev", max_examples=EXAMPLES["dev"], **quiet)
    settings.register_profile("ci", max_examples=EXAMPLES["ci"], derandomize=True, database=None, **quiet)
    settings.register_profile("nightly", max_examples=EXAMPLES["nightly"], **quiet)


def profile() -> str:
    """The Hypothesis profile in force, `dev` where it is none of ours."""
    name = settings.get_current_profile_name()
    return name if name in EXAMPLES else "dev"


def every_case(
    scheme: Declared,
    *,
    engine: str = "lockstep",
    dtype: str | None = None,
    world: int | None = None,
    inside_subgroup: bool | None = None,
    **fixed: Any,
) -> SearchStrategy[CaseSpec]:
    """Cases of a scheme; what is given (mesh axes, dims, options) is kept, the rest is drawn.

    On lockstep a quarter of them stand inside a larger world; `inside_subgroup` is for all of them or for none.
    """
    limit = SHAPES[profile()]

    @st.composite
    def cases(draw: DrawFn) -> CaseSpec:
        return draw_case(
            scheme,
            lambda options: draw(options if isinstance(options, SearchStrategy) else st.sampled_from(options)),
            fixed,
            dtype=dtype,
            engine=engine,
            world=world,
            limit=limit,
            inside_subgroup=inside_subgroup,
            with_conditions=True,
        )

    return cases()
