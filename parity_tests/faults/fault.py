"""A fault: one planted bug, as a piece of text that replaces another, and how it must be caught."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    "reduction",
    "group",
    "scale",
    "statistic",
    "border",
    "order",
    "sequence",
    "buffer",
    "random",
    "tied",
    "schedule",
    "precision",
)


@dataclass(frozen=True)
class Fault:
    """`old`, which occurs once in `file`, becomes `new`.

    `expect` names the oracle and a piece of its words, as `gradient: off by the constant factor`; the oracle is
    value, gradient, protocol, cost, hygiene or the cause of a failed rank. `source` says where the mistake was
    made before. `equivalent` says why nothing observable changes; such a fault is listed, not counted. `survives`
    says why the drawn examples do not see a change that is there; such a fault is counted, as not killed.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    expect: str
    source: str | None = None
    equivalent: str | None = None
    survives: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault {self.name!r}: kind {self.kind!r} is not one of {', '.join(KINDS)}")
