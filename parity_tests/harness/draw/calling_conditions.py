"""Draw the calling conditions of a case: two or three for half of the cases.

That the caller overwrites its inputs afterwards changes nothing that a function can see and costs nothing: it is drawn
besides, for half of all cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.conditions import (
    CONDITIONS,
    COTANGENT,
    OTHER_CALLS,
    WITHOUT_GRADIENTS,
    record_of,
)
from parity_tests.harness.declare.declared import Argument, Declared
from parity_tests.harness.declare.draws import Chooser
from parity_tests.harness.draw.inputs import addend_axes

HOW_MANY = (0, 0, 2, 3)
# How often a condition is drawn, beside one that is drawn once: those that are of many kinds, for each tensor one.
SHARES = {"strided": 3, "expanded": 2, "frozen": 2, "unused": 2}
STRIDES = ("transposed", "stepped")
OF_FREE_INTEGERS = ("ids", "mask", "integers")  # kinds of draws that stay valid where all rows are equal
OF_EQUAL_FLOATS = ("zeros", "ones")
# Conditions of a backward, which a call without gradients does not have.
OF_THE_BACKWARD = ("frozen", "unused", "call_between", "second_backward")


def draw_conditions(scheme: Declared, choose: Chooser, other: Callable[[], CaseSpec]) -> dict[str, Any]:
    """The value of `CaseSpec.conditions`; `other` draws the case of a second call."""
    conditions: dict[str, Any] = {}
    count = choose(HOW_MANY)
    makers = _applicable(scheme, choose, other) if count else {}
    for _ in range(count):
        names = [name for name in makers if name not in conditions and _compatible(name, conditions)]
        if names:
            name = choose([name for name in names for _ in range(SHARES.get(name, 1))])
            conditions[name] = makers[name]()
    if "overwritten" not in scheme.excluded_conditions and choose((False, True)):
        conditions["overwritten"] = True
    return {name: conditions[name] for name in CONDITIONS if name in conditions}


def _compatible(name: str, conditions: Mapping[str, Any]) -> bool:
    if name in OTHER_CALLS and set(OTHER_CALLS) & set(conditions):
        return False  # one more run is enough
    if name in OF_THE_BACKWARD:
        return not set(WITHOUT_GRADIENTS) & set(conditions)
    if name in WITHOUT_GRADIENTS:
        return not {*OF_THE_BACKWARD, *WITHOUT_GRADIENTS} & set(conditions)
    storage = {"strided", "expanded", "one_storage", "same_tensor"}  # a tensor is stored in one way
    return name not in storage or not storage & set(conditions)


def _applicable(scheme: Declared, choose: Chooser, other: Callable[[], CaseSpec]) -> dict[str, Callable[[], Any]]:
    """The conditions that the scheme's tensors allow and that it does not exclude, each with its draw."""
    active = [arg.name for arg in scheme.inputs if arg.differentiable]
    with_gradient = [arg for arg in scheme.outputs if arg.differentiable] if active else []
    floating = [arg for arg in scheme.inputs if not arg.is_integer]
    viewed = [arg.name for arg in scheme.inputs if arg.spec.dims]
    viewed += [COTANGENT + arg.name for arg in with_gradient if arg.spec.dims]
    equal = [arg.name for arg in scheme.inputs if may_be_expanded(scheme, arg)]
    equal += [COTANGENT + arg.name for arg in with_gradient if not addend_axes(arg, "cotangent")]
    outputs = [arg.name for arg in with_gradient]
    pairs = [[a.name, b.name] for a, b in itertools.combinations(floating, 2) if _may_be_one(scheme, a, b)]

    def other_call() -> dict[str, Any]:
        return record_of(other())

    makers: dict[str, tuple[Any, Callable[[], Any]]] = {
        "strided": (viewed, lambda: _views(viewed, choose)),
        "expanded": (equal, lambda: [choose(equal)] if choose((True, False)) else equal),
        "frozen": (len(active) > 1 and outputs, lambda: _some(active, choose)),
        "unused": (len(outputs) > 1, lambda: _some(outputs, choose)),
        "call_before": (True, other_call),
        "call_between": (outputs, other_call),
        "second_backward": (outputs, lambda: True),
        "one_storage": (len(floating) > 1, lambda: True),
        "same_tensor": (pairs, lambda: choose(pairs)),
        "no_grad": (active, lambda: True),
        "inference_mode": (active, lambda: True),
    }
    return {
        name: make for name, (allowed, make) in makers.items() if allowed and name not in scheme.excluded_conditions
    }


def may_be_expanded(scheme: Declared, arg: Argument) -> bool:
    """Whether all rows of an input may be one row: in every addend of a sum over ranks, and by its draw.

    A function of which floats are drawn that are all equal is right for them; where they are not, as for a model's
    weights, gradients may cancel to nothing but rounding.
    """
    draw = scheme.draws[arg.name]
    are_equal = set(OF_EQUAL_FLOATS) & set(draw.kinds) if draw.kind == "float" else draw.kind in OF_FREE_INTEGERS
    return len(arg.spec.dims) > 1 and bool(are_equal) and not addend_axes(arg, role="input")


def _may_be_one(scheme: Declared, a: Argument, b: Argument) -> bool:
    """Whether two inputs may be one tensor: the same shards of the same kinds of values."""
    return str(a.spec) == str(b.spec) and scheme.draws[a.name] == scheme.draws[b.name] and not addend_axes(a, "input")


def _views(tensors: Sequence[str], choose: Chooser) -> dict[str, str]:
    chosen = [choose(tensors)] if choose((True, False)) else tensors
    kind: str = choose(STRIDES)
    return {tensor: kind for tensor in chosen}


def _some(names: Sequence[str], choose: Chooser) -> list[str]:
    """One of several, or all but one."""
    one = choose(names)
    return [one] if choose((True, False)) else [name for name in names if name != one]
