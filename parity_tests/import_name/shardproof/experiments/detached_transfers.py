"""Name the collective that hands values to other ranks and no gradient back, where a gradient is wrong for that.

A function may gather a detached tensor, and put its own part back: outputs are right, and the other ranks' share of the
gradient is lost. So the case runs again, once with other values of the input and once with other values from the
collective. It is named if it carries values of the input with the wrong gradient, and if an output depends on them: a
detached maximum that only shifts an exponent is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardproof.declare.declared import Declared
from shardproof.engines.ledger import CallSite, LedgerRow
from shardproof.engines.lockstep.call import CommunicationCall
from shardproof.engines.lockstep.repair import Repair, autograd_function, under
from shardproof.engines.program import Program
from shardproof.experiments.repaired_lines import without_derivative
from shardproof.explain.clues import FORWARD_EQUAL
from shardproof.explain.note import CONTEXT, Note
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

TRANSFERS = ("all_gather", "all_to_all", "gather", "scatter", "broadcast")
MOST_SITES = 8
CHANGED = 1.5  # times each value
Notes = Mapping[str, tuple[Note, ...]]


@dataclass(frozen=True)
class _Watched(Repair):
    """Keeps the tensors that a line's calls carry, multiplied by `factor`."""

    factor: float = 1.0
    carried: list[Tensor] = field(default_factory=list, compare=False)
    functions: list[object] = field(default_factory=list, compare=False)  # hand-written, around the calls

    def mend_results(self, calls: Sequence[CommunicationCall]) -> None:
        if self.site.has(calls[0].row):
            for call in calls:
                self.carried.extend(piece.detach().clone() for piece in call.pieces)
                if self.factor != 1.0:
                    call.results = [each * self.factor for each in call.results]

    def mend_gradient(self, row: LedgerRow, tensors: Sequence[Tensor], total: Callable[[Tensor], Tensor]) -> None:
        if self.site.has(row) and (function := autograd_function()) is not None:
            self.functions.append(function)


def name_detached_transfers(scheme: Declared, report: Report, notes: Notes) -> dict[str, tuple[Note, ...]]:
    """The notes, with the collective of a gradient that no other note explains; it comes first.

    Cost: a run for each such collective, and one for each such gradient.
    """
    by_label = {label: tuple(of_tensor) for label, of_tensor in notes.items()}
    unnamed = [tensor for tensor in report.tensors if by_label.get(tensor.label) == (FORWARD_EQUAL,)]
    for site, before in _that_outputs_need(scheme, report) if unnamed and report.case.world > 1 else ():
        for tensor in unnamed:
            if by_label[tensor.label] == (FORWARD_EQUAL,) and _carries(scheme, report, site, before, tensor.name):
                named = f"{FORWARD_EQUAL}: {without_derivative(site)}"
                by_label[tensor.label] = (Note(named, CONTEXT, sites=[site]),)
    return by_label


def _that_outputs_need(scheme: Declared, report: Report) -> Iterator[tuple[CallSite, list[Tensor]]]:
    """The lines outside hand-written functions that carry floats to an output, and these floats."""
    sites = {
        CallSite(row.op, row.source, row.phase): None
        for row in report.ledger.rows
        if row.phase == "fwd" and row.op in TRANSFERS and len(row.group) > 1 and "float" in "".join(row.dtypes)
    }
    for site in list(sites)[:MOST_SITES]:
        watched = _Watched(site.op, site.source, site.phase, "watch", factor=CHANGED)
        changed = verify_case(scheme, report.case, wrap_program=under(watched))
        is_needed = changed.failure is None and any(t.role == "output" and not t.ok for t in changed.tensors)
        if is_needed and not watched.functions:
            yield site, watched.carried


def _carries(scheme: Declared, report: Report, site: CallSite, before: Sequence[Tensor], name: str) -> bool:
    """Whether the tensors that a line carries change with the values of an input."""
    program = Program.of(scheme)
    arrays = {arg.name: program.full_array(arg, report.case) for arg in scheme.inputs}
    watched = _Watched(site.op, site.source, site.phase, "watch")
    verify_case(scheme, report.case, wrap_program=under(watched), arrays={**arrays, name: arrays[name] * CHANGED})
    same = len(before) == len(watched.carried) and all(map(torch.equal, before, watched.carried))
    return bool(watched.carried) and not same
