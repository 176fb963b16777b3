"""Whether a recorded case is one of a scheme: a replay that was edited, or is older than the scheme's declaration."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shardproof.declare.case import SPARE, CaseSpec
from shardproof.declare.conditions import CONDITIONS, COTANGENT
from shardproof.declare.declared import Declared
from shardproof.declare.draws import ALIKE, BY_NAME, EXTREMES, FLOAT_KINDS, IGNORED, KEEP, PLACES
from shardproof.draw.size_choices import free_dims


def check(scheme: Declared, case: CaseSpec) -> None:
    """ValueError if the case names an axis, dim, option, layout, input or condition that the scheme does not have.

    Also if it lacks an axis or a dim, or has a kind of value that is not drawn.
    """
    args = [*scheme.inputs, *scheme.outputs]
    shardings = [(dim.name, each) for arg in args for dim in arg.spec.dims for each in dim.shardings]
    free = free_dims(scheme)
    _same("mesh axes", case.scheme_mesh, scheme.mesh, scheme, required=scheme.mesh)
    _same("dims", case.dims, [*free, *scheme.dims], scheme, required=free)
    _same("options", case.options, [*scheme.options, *scheme.rank_options], scheme)
    _same("layouts", case.layouts, [f"{dim}/{each.axis}" for dim, each in shardings], scheme)
    cotangents = [COTANGENT + arg.name for arg in scheme.outputs]
    _same("values", case.values, [*(arg.name for arg in scheme.inputs), *cotangents], scheme)
    _same("conditions", case.conditions, CONDITIONS, scheme)
    if case.mesh.keys() - case.scheme_mesh.keys() - {SPARE}:
        raise ValueError(f"replay: case of '{scheme.name}' has an axis beside its mesh")
    for name, value in case.values.items():
        _check_value(scheme, name, value)


def _same(
    what: str, has: Collection[str], known: Collection[str], scheme: Declared, required: Collection[str] = ()
) -> None:
    unknown, missing = sorted(set(has) - set(known)), sorted(set(required) - set(has))
    names = ", ".join(dict.fromkeys(known)) or "none"
    if unknown:
        raise ValueError(f"replay: the case has {what} {', '.join(unknown)}; scheme '{scheme.name}' has {names}")
    if missing:
        raise ValueError(f"replay: the case lacks {what} {', '.join(missing)} of scheme '{scheme.name}'")


def _check_value(scheme: Declared, name: str, value: Any) -> None:
    kind = scheme.draws[name].kind if name in scheme.draws else "float"
    drawn: dict[str, tuple[Collection[str], Any]] = {
        "kind": ((*FLOAT_KINDS, *BY_NAME, ALIKE) if kind == "float" else (kind,), value.get("kind")),
        "keep": (KEEP, value.get("keep", KEEP[0])),
        "ignored": (IGNORED, value.get("ignored", IGNORED[0])),
        "border": ((*EXTREMES, "none"), value.get("border", ["none"])[0]),
    }
    for key, (known, has) in drawn.items():
        if has not in known:
            raise ValueError(f"replay: {key} {has!r} of '{name}' is not one of {', '.join(dict.fromkeys(known))}")
    picks = value.get("picks", [])
    if not isinstance(picks, list) or not all(isinstance(each, list) and len(each) == 2 for each in picks):
        raise ValueError(f"replay: picks of '{name}' are {picks!r}; each is a number and a place, as in [[0, 'first']]")
    for _, place in picks:
        if place not in (*PLACES, "anywhere"):
            raise ValueError(f"replay: place {place!r} of '{name}' is not one of {', '.join((*PLACES, 'anywhere'))}")
