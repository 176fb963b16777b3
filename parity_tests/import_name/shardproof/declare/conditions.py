"""Calling conditions: how a function is called, apart from its inputs' values; see `CaseSpec.conditions`.

A case without conditions has contiguous inputs, a gradient for every differentiable input, a cotangent for every
output, one forward and one backward. The conditions by name, each with its value:

    strided          {tensor: "transposed" | "stepped" | "swapped"}: views that are not contiguous; a swapped
                     view has contiguous rows, in another order
    expanded         [tensors]: views of stride 0, an input along its first dim, a cotangent along all of its dims
    frozen           [inputs] that require no gradient
    unused           [outputs] that get no cotangent
    call_before      dims, dtype, layouts, lengths, values, options and seed of another call, which comes first, forward
                     and backward; with conditions of its own, `no_grad` alone, it has no backward, as an evaluation
    call_between     the same; its forward comes between the forward and the backward of the compared call
    second_backward  true: the graph is retained, and the gradients of the second backward are compared
    one_storage      true: the inputs are views of one buffer
    same_tensor      [a, b]: two inputs of equal values and one storage
    no_grad          true: only the forward, under torch.no_grad()
    inference_mode   true: the same under torch.inference_mode()
    overwritten      true: the caller writes into its inputs afterwards, so that no result may share their storage; and
                     into all tensors of a call before and the gradients of a first backward
    nan_cotangents   [outputs] with cotangents of NaN in the rows that the scheme declares as not read
    wider_inputs     [inputs] in float32, in a case of 16 bits: numbers and tensors
    int32            [integer inputs] of that dtype in place of int64
    autocast         true: the forward of a float32 case runs under torch.autocast to bfloat16
    recomputed       true: backward runs the forward again, under torch.utils.checkpoint
    second_derivative  true: the gradient of another call is differentiated once more; see
                     engines/second_derivative.py

A tensor is an input's name, or `cotangent NAME` for an output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardproof.declare.case import CaseSpec

CONDITIONS = (
    "strided",
    "expanded",
    "frozen",
    "unused",
    "call_before",
    "call_between",
    "second_backward",
    "one_storage",
    "same_tensor",
    "no_grad",
    "inference_mode",
    "overwritten",
    "nan_cotangents",
    "wider_inputs",
    "int32",
    "autocast",
    "recomputed",
    "second_derivative",
)
# A scheme may also exclude this: a mesh that is part of a larger world, which is an extra axis and not a calling
# condition.
LARGER_WORLD = "larger_world"
WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
OTHER_CALLS = ("call_before", "call_between")
VIEWS = ("strided", "expanded")
# Conditions that apply to some of the tensors.
OF_TENSORS = (*VIEWS, "frozen", "unused", "nan_cotangents", "wider_inputs", "int32")
# Conditions under which a function may send less than its declared cost, or send it twice.
OF_ANOTHER_COST = (
    *("frozen", "unused", *OTHER_CALLS, "second_backward", *WITHOUT_GRADIENTS),
    *("recomputed", "second_derivative"),
)
# Under these a function may differ by design, for example compute no gradient for a frozen weight.
NOT_ALWAYS_PROMISED = (
    *("frozen", "unused", "second_backward", *WITHOUT_GRADIENTS),
    *("overwritten", "int32", "autocast", "recomputed", "second_derivative"),
)
COTANGENT = "cotangent "
EXCLUDED = "EXCLUDED_CONDITIONS"  # a module or package lists by this name the conditions that all its schemes exclude
# The reasons: tensors created in inference mode cannot be saved for backward; on one rank many functions return their
# input; some of torch's operations take int64 alone; its operations follow autocast; few functions are recomputed or
# differentiated twice.
EXCLUDED_BY_DEFAULT = ("inference_mode", "overwritten", "int32", "autocast", "recomputed", "second_derivative")


def excluded_by_default(module: str) -> Sequence[str]:
    """The conditions that a module, or else the nearest of its packages, excludes for its schemes.

    If none of them has such a list: the conditions that correct training code often does not support.
    """
    return of_nearest(module, EXCLUDED, EXCLUDED_BY_DEFAULT)


def of_nearest(module: str, name: str, otherwise: Any) -> Any:
    """The value that a module has under this name, or else the nearest of its packages."""
    while module:
        value = getattr(sys.modules.get(module), name, None)
        if value is not None:
            return value
        module = module.rpartition(".")[0]
    return otherwise


def phrases(case: CaseSpec) -> list[str]:
    """Each condition of the case as a clause that follows `when`: `logits is a transposed view`."""
    return [phrase for name, value in case.conditions.items() for phrase in _phrases(name, value, case)]


def when(case: CaseSpec) -> str:
    """The conditions of the case as a clause after its sizes; empty without conditions."""
    return f", when {' and '.join(phrases(case))}" if case.conditions else ""


def how_to_exclude(case: CaseSpec, excluded: Sequence[str], is_raised: bool) -> str:
    """How to exclude the only condition under which the function fails; empty for several conditions.

    Wrong numbers because of strides or another call are never intended.
    """
    name = next(iter(case.conditions))
    if len(case.conditions) != 1 or not (is_raised or name in NOT_ALWAYS_PROMISED):
        return ""
    meant = "that is meant" if is_raised else "it is never called so"
    return f"; if {meant}, declare excluded_conditions={(*excluded, name)!r}"


def _phrases(name: str, value: Any, case: CaseSpec) -> list[str]:
    if name == "strided":
        views = {
            "transposed": "a transposed view",
            "stepped": "a strided view",
            "swapped": "a view with two dims swapped in memory",
        }
        return [f"{_tensor(tensor)} is {views[kind]}" for tensor, kind in value.items()]
    if name in OTHER_CALLS:
        with_other = f"with {_difference(value, case)}"
        before = name == "call_before"
        mode = " under torch.no_grad()" if value.get("conditions") else ""
        return [
            f"the function was called {with_other}{mode} before"
            if before
            else f"the function is called again {with_other} before backward"
        ]
    if name == "same_tensor":
        return [f"{value[0]} and {value[1]} are the same tensor"]
    if name == "nan_cotangents":
        return [f"the cotangent of {tensor} is NaN in rows that are not read" for tensor in value]
    each = {
        "expanded": "{} is an expanded view, of stride 0",
        "frozen": "{} requires no gradient",
        "unused": "{} has no cotangent",
        "wider_inputs": "{} is float32",
        "int32": "{} is int32",
    }
    if name in each:
        return [each[name].format(_tensor(tensor)) for tensor in value]
    return [
        {
            "second_backward": "backward runs a second time",
            "no_grad": "it is called under torch.no_grad()",
            "inference_mode": "it is called under torch.inference_mode()",
            "one_storage": "the inputs are views of one buffer",
            "overwritten": "the caller overwrites its inputs afterwards",
            "autocast": "it is called under torch.autocast to bfloat16",
            "recomputed": "backward computes it again, under torch.utils.checkpoint",
            "second_derivative": "its gradient is differentiated again",
        }[name]
    ]


def _difference(record: Mapping[str, Any], case: CaseSpec) -> str:
    """How another call differs from the case: `other sizes`, `chunk_size=4`; if in nothing else, `other values`."""
    if record["dims"] != case.dims:
        return "other sizes"
    if record.get("dtype", case.dtype) != case.dtype:
        return f"{record['dtype']} inputs"
    if record["lengths"] != case.lengths or record["layouts"] != case.layouts:
        return "other lengths"
    options = record.get("options", case.options)
    changed = [f"{name}={value!r}" for name, value in options.items() if value != case.options.get(name)]
    return " and ".join(changed) or "other values"


def _tensor(label: str) -> str:
    return f"the cotangent of {label.removeprefix(COTANGENT)}" if label.startswith(COTANGENT) else label


def with_one_less(case: CaseSpec) -> Iterator[CaseSpec]:
    """The case without each of its conditions in turn, then without each tensor of a condition with several tensors."""
    for name in case.conditions:
        yield case.replace(conditions=_without(case.conditions, name))
    for name, value in case.conditions.items():
        if name in OF_TENSORS and len(value) > 1:
            for tensor in value:
                rest = {k: v for k, v in value.items() if k != tensor} if isinstance(value, Mapping) else None
                rest = [other for other in value if other != tensor] if rest is None else rest
                yield case.replace(conditions={**case.conditions, name: rest})


def without_other_calls(case: CaseSpec) -> CaseSpec:
    """The case without its other calls, which are recorded for its mesh only."""
    return case.replace(conditions={name: value for name, value in case.conditions.items() if name not in OTHER_CALLS})


def other_case(case: CaseSpec, name: str) -> CaseSpec | None:
    """The case of the call before or between, on the same mesh; without conditions unless the record has some."""
    record = case.conditions.get(name)
    return None if record is None else case.replace(**{"conditions": {}, **record})


def other_cases(case: CaseSpec) -> list[CaseSpec]:
    """The cases of all calls except the compared one."""
    return [other for name in OTHER_CALLS if (other := other_case(case, name)) is not None]


def record_of(case: CaseSpec) -> dict[str, Any]:
    """The fields of a case that `other_case` needs."""
    return {name: getattr(case, name) for name in ("dims", "dtype", "layouts", "lengths", "values", "options", "seed")}


def dtype_of(case: CaseSpec, name: str) -> str:
    """The dtype of a floating input."""
    return "float32" if name in case.conditions.get("wider_inputs", ()) else case.dtype


def has_gradients(case: CaseSpec, name: str) -> bool:
    """Whether the case asks for the gradient of a differentiable input."""
    return not set(WITHOUT_GRADIENTS) & set(case.conditions) and name not in case.conditions.get("frozen", ())


def _without(conditions: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in conditions.items() if other != name}
