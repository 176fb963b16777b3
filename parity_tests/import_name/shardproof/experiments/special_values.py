"""Whether a failing case needs the special values drawn for it: verify it again with normal values.

Special kinds are EQUAL_NUMBERS, such as zeros and ties; the normal kind is `normal`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.experiments.undecided import verify_or_undecided
from shardproof.report.report import EQUAL_NUMBERS, Report, drawn_kinds


def name_values_to_avoid(scheme: Declared, report: Report) -> Report:
    """The report with `values_to_avoid`: the inputs that need special values for the case to fail."""
    if report.failure is not None:
        return report
    special = list(drawn_kinds(report.case, EQUAL_NUMBERS))
    each = [[name] for name in special]
    for names in [*each, special] if len(special) > 1 else each:
        if verify_or_undecided(scheme, _with_normal(report.case, names)).ok:
            return replace(report, values_to_avoid=tuple(names))
    return report


def _with_normal(case: CaseSpec, names: list[str]) -> CaseSpec:
    normal: dict[str, Any] = {name: {"kind": "normal"} for name in names}
    return case.replace(values={**case.values, **normal})
