"""A scheme with calls of another implementation in place of ours."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof.declare.case import SizesAndOptions
from shardproof.declare.conditions import WITHOUT_GRADIENTS, excluded_by_default
from shardproof.declare.declared import Declared, Implementation
from shardproof.declare.validation import SHARED
from shardproof.draw.drawing import one_case
from shardproof.engines.engines import run
from shardproof.engines.failure import RankFailure
from shardproof.engines.program import Program
from shardproof.implementation.offered import NotApplicable, Offered, module_of
from shardproof.implementation.public_names import PublicName, public_names_of, rebound

MAX_COMBINATIONS = 256  # combinations of option values to try


class NotOffered(Exception):
    """The other implementation lacks the functions of a scheme; the message names them."""


def on_implementation(scheme: Declared, target: str) -> Declared:
    """The scheme on the functions of `target`, a module name or FILE.py. Errors: NotOffered, UnusableTarget.

    Names that the module lacks call our functions. Costs belong to our functions, so none is declared; conditions that
    other people's functions need not support are not drawn: see `excluded_conditions` of @scheme.
    """
    module = module_of(target)
    target = str(Path(target).resolve()) if target.endswith(".py") else target
    names = public_names_of(scheme.fn)
    judged = [name for name in names if not name.carries_arguments] or names
    if not judged:
        raise NotOffered("tests functions that are not public")
    offered = {name: Offered(target, name) for name in names if _is_offered(module, name)}
    if not set(judged) & set(offered):
        raise NotOffered(f"{Path(target).name} {' and '.join(sorted(_absence(module, name) for name in judged))}")
    record = Implementation(
        target,
        judged=tuple(offered[name].place for name in judged if name in offered),
        ours=tuple(f"{name.package}.{name.name}" for name in judged if name not in offered),
        lacks_parameters=not all(each.has_our_parameters for each in offered.values()),
    )
    package = module.__name__.partition(".")[0]
    return replace(
        scheme,
        fn=rebound(scheme.fn, offered),
        cost=None,
        isolate=(*scheme.isolate, *({package} - set(SHARED))),
        excluded_conditions=tuple(dict.fromkeys([*scheme.excluded_conditions, *excluded_by_default(module.__name__)])),
        implementation=record,
    )


def narrowed(scheme: Declared, fixed: Mapping[str, Any]) -> Declared:
    """The scheme restricted to option values and conditions that the other implementation has parameters for.

    If it lacks a parameter of ours, each combination of option values is run once, and one of them without gradients.
    Errors: NotApplicable if it accepts no combination.
    """
    record = scheme.implementation
    if record is None or not record.lacks_parameters:
        return scheme
    choices = {name: values for name, values in scheme.all_options.items() if name not in fixed}
    combinations = [
        dict(zip(choices, values, strict=True))
        for values in itertools.islice(itertools.product(*choices.values()), MAX_COMBINATIONS)
    ]
    reasons = [_why_not(scheme, {**fixed, **values}) for values in combinations]
    possible = [values for values, reason in zip(combinations, reasons, strict=True) if reason is None]
    if not possible:
        raise NotApplicable(next(reason for reason in reasons if reason is not None))
    not_applicable: list[str] = []
    reason = _why_not(scheme, {**fixed, **possible[0]}, {"no_grad": True})
    if reason is not None:
        scheme = replace(scheme, excluded_conditions=(*scheme.excluded_conditions, *WITHOUT_GRADIENTS))
        not_applicable.append(f"{reason} (under no_grad)")
    if len(possible) == len(combinations):
        return replace(scheme, implementation=replace(record, not_applicable="; ".join(not_applicable) or None))

    def is_possible(case: SizesAndOptions) -> bool:
        allowed = any(all(case.options[name] == value for name, value in each.items()) for each in possible)
        return allowed and (scheme.assume is None or bool(scheme.assume(case)))

    possible_choices = {
        name: tuple(v for v in values if any(each[name] == v for each in possible)) for name, values in choices.items()
    }
    is_rectangle = len(possible) == len(list(itertools.product(*possible_choices.values())))
    not_applicable.append(_rejected_choices(choices, possible_choices, reasons))
    return replace(
        scheme,
        options={name: possible_choices.get(name, values) for name, values in scheme.options.items()},
        rank_options={name: possible_choices.get(name, values) for name, values in scheme.rank_options.items()},
        assume=scheme.assume if is_rectangle else is_possible,
        implementation=replace(record, not_applicable="; ".join(not_applicable)),
    )


def _is_offered(module: Any, name: PublicName) -> bool:
    """Whether the module has its own object with the name, and a Function's counterpart is a Function."""
    theirs, ours = getattr(module, name.name, None), name.value
    if theirs is None or theirs is ours or not callable(theirs):
        return False
    is_applied = inspect.isclass(ours) and hasattr(ours, "apply")
    return not is_applied or (hasattr(theirs, "apply") and hasattr(theirs, "forward"))


def _absence(module: Any, name: PublicName) -> str:
    """`has no all_reduce (it has all_reduces)`, or that its object with this name cannot be called like ours."""
    theirs = getattr(module, name.name, None)
    if theirs is name.value:
        return f"imports {name.name} from here"
    if theirs is not None:
        return f"has a {name.name} that cannot be called like ours (type {type(theirs).__name__})"
    similar = difflib.get_close_matches(name.name, [each for each in vars(module) if not each.startswith("_")], n=1)
    return f"has no {name.name}" + (f" (it has {similar[0]})" if similar else "")


def _why_not(scheme: Declared, fixed: Mapping[str, Any], conditions: Mapping[str, Any] | None = None) -> str | None:
    """Why the other implementation cannot be called this way; None if it can, or fails in another way."""
    try:
        run(Program.of(scheme), one_case(scheme, **fixed).replace(conditions=dict(conditions or {})))
    except RankFailure as failure:
        return str(failure.__cause__) if isinstance(failure.__cause__, NotApplicable) else None
    except ValueError:  # no such case exists: verifying it will report that
        return None
    return None


def _rejected_choices(
    choices: Mapping[str, Sequence[Any]], possible_choices: Mapping[str, Sequence[Any]], reasons: Sequence[str | None]
) -> str:
    """`parameter chunk_size (chunk_size=1, 2)`: the reasons, and the option values that no possible case has."""
    reason_text = ", ".join(dict.fromkeys(reason for reason in reasons if reason is not None))
    removed = {
        name: [value for value in values if value not in possible_choices[name]] for name, values in choices.items()
    }
    values = "; ".join(f"{name}={', '.join(map(repr, each))}" for name, each in removed.items() if each)
    return f"{reason_text} ({values or 'some combinations of options'})"
