"""Draw the calling conditions of a case: one or two ways to call it for half of the cases.

The others are drawn in addition. Those that cost nothing: for half of all cases, how their tensors are stored, that the
caller overwrites its inputs, that cotangents are NaN in rows that a scheme declares as not read, and that integers are
int32; for half of the float32 cases, that autocast is on; for half of the cases of 16 bits, that inputs are float32
which the scheme says may be. Where no cotangents are NaN, a quarter of the cases in the widest dtype are
differentiated twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardproof.declare.case import CaseSpec
from shardproof.declare.conditions import (
    CONDITIONS,
    COTANGENT,
    OTHER_CALLS,
    WITHOUT_GRADIENTS,
    record_of,
)
from shardproof.declare.declared import Argument, Declared
from shardproof.declare.draws import Chooser
from shardproof.draw.inputs import addend_axes

HOW_MANY = (0, 0, 1, 2)
# Relative frequency of conditions; those with many variants, one per tensor, are drawn more often.
SHARES = {"strided": 4, "expanded": 2, "frozen": 2, "unused": 2, "second_backward": 4}
STORAGE = ("strided", "expanded", "one_storage", "same_tensor")  # a tensor is stored in one way
OF_ONE_DTYPE = ("one_storage", "same_tensor")
STRIDES = ("transposed", "stepped", "swapped")
TREES_OF_PARAMETERS = ("parameters", "params", "weights")
PARAMETERS = ("weight", "bias")
ENDINGS = ("_weight", "_bias")
OF_FREE_INTEGERS = ("ids", "mask", "integers")  # kinds of draws that stay valid if all rows are equal
OF_INTEGERS = ("ids", "offsets", "lengths", "integers")
OF_EQUAL_FLOATS = ("zeros", "ones")
NARROW = ("bfloat16", "float16")
WIDE = ("float64", "float32")
DIFFERENTIATED_TWICE = (False, False, False, True)
EVALUATED = (False, False, True)  # a call before: is it an evaluation?
# Conditions of the backward; a call without gradients has none of them.
OF_THE_BACKWARD = ("frozen", "unused", "call_between", "second_backward", "recomputed")
ONE_RUN_MORE = (*OTHER_CALLS, "second_backward", "recomputed")  # of these a case has one


def draw_conditions(scheme: Declared, choose: Chooser, other: Callable[[], CaseSpec], dtype: str) -> dict[str, Any]:
    """The value of `CaseSpec.conditions` for a case of this dtype; `other` draws the case of a second call."""
    conditions: dict[str, Any] = {}
    makers = _applicable(scheme, choose, other)

    def add_one_of(candidates: Iterable[str]) -> None:
        names = [name for name in candidates if name not in conditions and _compatible(name, conditions)]
        if names:
            name = choose([name for name in names for _ in range(SHARES.get(name, 1))])
            conditions[name] = makers[name]()

    if choose((False, True)):
        add_one_of(name for name in makers if name in STORAGE)
    for _ in range(choose(HOW_MANY)):
        add_one_of(name for name in makers if name not in STORAGE)
    if "overwritten" not in scheme.excluded_conditions and choose((False, True)):
        conditions["overwritten"] = True
    if scheme.nan_cotangents and "nan_cotangents" not in scheme.excluded_conditions and choose((False, True)):
        conditions["nan_cotangents"] = list(scheme.nan_cotangents)
    may_be_wider = scheme.wider_inputs and dtype in NARROW and "wider_inputs" not in scheme.excluded_conditions
    if may_be_wider and not set(OF_ONE_DTYPE) & set(conditions) and choose((False, True)):
        conditions["wider_inputs"] = [choose(scheme.wider_inputs)] if choose((True, False)) else [*scheme.wider_inputs]
    of_integers = [arg.name for arg in scheme.inputs if scheme.draws[arg.name].kind in OF_INTEGERS]
    if of_integers and "int32" not in scheme.excluded_conditions and choose((False, True)):
        conditions["int32"] = [choose(of_integers)] if choose((True, False)) else of_integers
    if dtype == "float32" and "autocast" not in scheme.excluded_conditions and choose((False, True)):
        conditions["autocast"] = True
    if _may_be_differentiated_twice(scheme, conditions, dtype) and choose(DIFFERENTIATED_TWICE):
        conditions["second_derivative"] = True
    return {name: conditions[name] for name in CONDITIONS if name in conditions}


def _may_be_differentiated_twice(scheme: Declared, conditions: Mapping[str, Any], dtype: str) -> bool:
    has_gradients = all(any(arg.differentiable for arg in each) for each in (scheme.inputs, scheme.outputs))
    widest = next((each for each in WIDE if each in scheme.dtypes), None)
    is_drawn = has_gradients and dtype == widest and "second_derivative" not in scheme.excluded_conditions
    return is_drawn and not {*WITHOUT_GRADIENTS, "recomputed", "nan_cotangents"} & set(conditions)


def _compatible(name: str, conditions: Mapping[str, Any]) -> bool:
    if name in OTHER_CALLS and set(OTHER_CALLS) & set(conditions):
        return False  # one extra run is enough
    if name in ONE_RUN_MORE and "recomputed" in (name, *conditions) and set(ONE_RUN_MORE) & set(conditions):
        return False
    if name in OF_THE_BACKWARD:
        return not set(WITHOUT_GRADIENTS) & set(conditions)
    return name not in WITHOUT_GRADIENTS or not {*OF_THE_BACKWARD, *WITHOUT_GRADIENTS} & set(conditions)


def _applicable(scheme: Declared, choose: Chooser, other: Callable[[], CaseSpec]) -> dict[str, Callable[[], Any]]:
    """The conditions that the scheme's tensors allow and the scheme does not exclude, each with its draw."""
    active = [arg.name for arg in scheme.inputs if arg.differentiable]
    with_gradient = [arg for arg in scheme.outputs if arg.differentiable] if active else []
    floating = [arg for arg in scheme.inputs if not arg.is_integer]
    viewed = [arg.name for arg in scheme.inputs if arg.spec.dims and not is_parameter(scheme, arg.name)]
    viewed += [COTANGENT + arg.name for arg in with_gradient if arg.spec.dims]
    equal = [arg.name for arg in scheme.inputs if may_be_expanded(scheme, arg)]
    equal += [COTANGENT + arg.name for arg in with_gradient if not addend_axes(arg, "cotangent")]
    outputs = [arg.name for arg in with_gradient]
    pairs = [[a.name, b.name] for a, b in itertools.combinations(floating, 2) if _may_be_one(scheme, a, b)]

    # A scheme with a module runs a backward of its own.
    may_be_evaluated = active and scheme.module is None and "no_grad" not in scheme.excluded_conditions

    def call_before() -> dict[str, Any]:
        record = record_of(other())
        return record | ({"conditions": {"no_grad": True}} if may_be_evaluated and choose(EVALUATED) else {})

    makers: dict[str, tuple[Any, Callable[[], Any]]] = {
        "strided": (viewed, lambda: _views(viewed, choose)),
        "expanded": (equal, lambda: [choose(equal)] if choose((True, False)) else equal),
        "frozen": (len(active) > 1 and outputs, lambda: _some(active, choose)),
        "unused": (len(outputs) > 1, lambda: _some(outputs, choose)),
        "call_before": (True, call_before),
        "call_between": (outputs, lambda: record_of(other())),
        "second_backward": (outputs, lambda: True),
        "one_storage": (len(floating) > 1, lambda: True),
        "same_tensor": (pairs, lambda: choose(pairs)),
        "no_grad": (active, lambda: True),
        "inference_mode": (active, lambda: True),
        "recomputed": (outputs and scheme.module is None, lambda: True),
    }
    return {
        name: make for name, (allowed, make) in makers.items() if allowed and name not in scheme.excluded_conditions
    }


def is_parameter(scheme: Declared, name: str) -> bool:
    """Whether an input is a parameter, of `module=` or by its name: a module's parameters are no strided views."""
    first, last = name.partition(".")[0], name.rpartition(".")[2]
    return first in (scheme.module, *TREES_OF_PARAMETERS) or last in PARAMETERS or last.endswith(ENDINGS)


def may_be_expanded(scheme: Declared, arg: Argument) -> bool:
    """Whether all rows of an input may be equal: its draw allows it, and it is not a sum over ranks.

    Floats are expanded only if equal floats are among their drawn kinds; otherwise, as for a model's weights, gradients
    may cancel down to rounding errors.
    """
    draw = scheme.draws[arg.name]
    are_equal = set(OF_EQUAL_FLOATS) & set(draw.kinds) if draw.kind == "float" else draw.kind in OF_FREE_INTEGERS
    is_plain = not is_parameter(scheme, arg.name) and not addend_axes(arg, role="input")
    return len(arg.spec.dims) > 1 and bool(are_equal) and is_plain


def _may_be_one(scheme: Declared, a: Argument, b: Argument) -> bool:
    """Whether two inputs may be one tensor: the same shards of the same kinds of values."""
    return str(a.spec) == str(b.spec) and scheme.draws[a.name] == scheme.draws[b.name] and not addend_axes(a, "input")


def _views(tensors: Sequence[str], choose: Chooser) -> dict[str, str]:
    """One tensor, or each in a way of its own: some stay contiguous then, but not all."""
    first, kind = choose(tensors), choose(STRIDES)
    if choose((True, False)):
        return {first: kind}
    kinds = {tensor: choose((None, *STRIDES)) for tensor in tensors if tensor != first}
    return {first: kind} | {tensor: other for tensor, other in kinds.items() if other is not None}


def _some(names: Sequence[str], choose: Chooser) -> list[str]:
    """One of several, or all except one."""
    one = choose(names)
    return [one] if choose((True, False)) else [name for name in names if name != one]
