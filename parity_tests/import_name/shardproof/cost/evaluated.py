"""The declared cost of a case, evaluated without running it: for each rank, and for the busiest one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Cost, Declared
from shardproof.draw import inputs

# A cost that names inputs depends on their values, which are drawn unsharded.
MOST_RANKS = 64
MOST_ELEMENTS = 2**20


def costs_of_ranks(scheme: Declared, case: CaseSpec) -> list[Cost]:
    """The cost of each rank in the order of the scheme's mesh; a single one if all ranks send the same.

    Errors: ValueError if the cost raises, or depends on values with more ranks or elements than can be drawn.
    """
    assert scheme.cost is not None
    names = list(inspect.signature(scheme.cost).parameters)[1:]
    named = [arg for arg in scheme.inputs if arg.name in names]
    if named:
        _check_sizes(scheme, case, named)
    try:
        declared = scheme.cost(case, **{arg.name: _drawn(scheme, case, arg) for arg in named})
    except Exception as error:
        raise ValueError(f"scheme '{scheme.name}': its cost raised {type(error).__name__}: {error}") from error
    return [declared] if isinstance(declared, Cost) else list(declared)


def busiest(costs: Sequence[Cost]) -> Cost:
    """For each op the most calls and the most bytes of any rank, and the most products."""
    if len(costs) == 1:
        return costs[0]
    products = [cost.products for cost in costs if cost.products is not None]
    largest = (max(each[0] for each in products), max(each[1] for each in products)) if products else None
    return Cost(_most([cost.forward for cost in costs]), _most([cost.backward for cost in costs]), largest)


def _most(tables: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    largest: dict[str, tuple[int, int]] = {}
    for table in tables:
        for op, (calls, size) in table.items():
            before = largest.get(op, (0, 0))
            largest[op] = (max(before[0], calls), max(before[1], size))
    return largest


def _check_sizes(scheme: Declared, case: CaseSpec, named: Sequence[Argument]) -> None:
    elements = max(math.prod(arg.shape(case)) for arg in named)
    if case.world > MOST_RANKS or elements > MOST_ELEMENTS:
        raise ValueError(
            f"scheme '{scheme.name}': its cost depends on the values of {', '.join(arg.name for arg in named)}, which "
            f"are drawn for at most {MOST_RANKS} ranks and {MOST_ELEMENTS:,} elements; here are {case.world:,} ranks "
            f"and {elements:,} elements"
        )


def _drawn(scheme: Declared, case: CaseSpec, arg: Argument) -> Any:
    return inputs.full_array(arg, scheme.draws[arg.name], case)
