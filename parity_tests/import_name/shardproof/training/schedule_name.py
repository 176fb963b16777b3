"""Find a schedule by its name, or by the beginning of its name, in upper or lower case."""

from __future__ import annotations

from torch_impl.pipelining.named_schedules import RULES, Rule


def rule_by_name(text: str, what: str, hint: str = "") -> Rule:
    """The rule with this name, such as `zbv` or `1f1b`. The argument `what` begins a message, `hint` ends it.

    Errors: ValueError unless the text is a name or begins exactly one name.
    """
    matches = [name for name in RULES if name.lower() == text.lower()] or [
        name for name in RULES if text and name.lower().startswith(text.lower())
    ]
    if len(matches) != 1:
        raise ValueError(f"{what} {text!r} is not one of {', '.join(matches or RULES)}{hint}")
    return RULES[matches[0]]
