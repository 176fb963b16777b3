"""A Hypothesis strategy that draws the cases of a scheme."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw.drawing import draw_case
from shardproof.draw.profiles import SHAPES, profile


def every_case(
    scheme: Declared,
    *,
    engine: str = "lockstep",
    dtype: str | None = None,
    world: int | None = None,
    inside_subgroup: bool | None = None,
    **fixed: Any,
) -> SearchStrategy[CaseSpec]:
    """Cases of a scheme: given mesh axes, dims and options are kept, the rest is drawn.

    On lockstep a quarter of them run inside a larger world; `inside_subgroup` forces this for all or for none.
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
