"""A schedule by its name, in whatever case, or by the beginning of it."""

from __future__ import annotations

from torch_impl.pipelining.named_schedules import RULES, Rule


def rule_by_name(text: str, what: str, hint: str = "") -> Rule:
    """The rule of `zbv` or `1f1b`. `what` is asked for, `further` may be given beside the names.

    Errors: ValueError for what begins no name, or several.
    """
    matches = [name for name in RULES if name.lower() == text.lower()] or [
        name for name in RULES if text and name.lower().startswith(text.lower())
    ]
    if len(matches) != 1:
        raise ValueError(f"{what} {text!r} is not one of {', '.join(matches or RULES)}{hint}")
    return RULES[matches[0]]
