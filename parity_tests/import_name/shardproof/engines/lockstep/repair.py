"""A repair runs one line's calls, or one of them, differently, to test whether that line is to blame.

If the result is right without a collective of the backward, that collective was superfluous; if it is right once the
gradient is summed over the group, the backward lacked the sum; if a NaN disappears once a buffer holds no poison, the
buffer was read before its wait. An all_reduce may also be carried out by another operation or over other ranks.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardproof.declare.case import CaseSpec
from shardproof.engines.ledger import CallSite, LedgerRow
from shardproof.engines.lockstep import world
from shardproof.engines.lockstep.call import CommunicationCall
from shardproof.engines.lockstep.operations import combined
from shardproof.engines.program import Program, RankResult

OMIT = "omit"  # each rank gets its own input back
SWAP_SUM_AND_MEAN = "swap sum and mean"  # over the ranks' inputs
SUM_GRADIENT = "sum gradient"  # the gradient of a forward collective's result, over its group, before its backward
REDUCE = (
    "reduce"  # an all_reduce by `reduce_op`, over the ranks of `axis`; an all_gather returns that sum as each entry
)
NO_POISON = "no poison"  # leave the output of an asynchronous collective readable before its wait
OF_THE_BACKWARD = {"all_reduce": (OMIT, SWAP_SUM_AND_MEAN), "reduce_scatter": (OMIT, SWAP_SUM_AND_MEAN)}
SWAPPED = {"SUM": "AVG", "AVG": "SUM"}
# Reductions that no backend has, for statistics of ranks: norms, and logsumexps.
OF_STATISTICS = {"the root of the sum of squares": torch.hypot, "the log of the sum of exponentials": torch.logaddexp}
ALL_RANKS = "all ranks"  # in place of an axis


@dataclass(frozen=True)
class Repair:
    """`action` applies to the calls of `op` that line `source` issues in `phase`: all, or only number `seq`.

    A line in a shared function issues many collectives, and one of them may be wrong. The same mistake may stand in
    `other_lines` too. `reduce_op` and `axis` belong to REDUCE: None keeps the operation, or the group. Its results are
    multiplied by `times`.
    """

    op: str
    source: str
    phase: str
    action: str
    seq: int | None = None
    reduce_op: str | None = None
    axis: str | None = None
    other_lines: tuple[str, ...] = ()
    times: int = 1

    @property
    def site(self) -> CallSite:
        """The call site that is repaired."""
        return CallSite(self.op, self.source, self.phase, self.seq)

    @property
    def sites(self) -> list[CallSite]:
        """The call site, and the sites of the other lines."""
        return [self.site, *(CallSite(self.op, source, self.phase) for source in self.other_lines)]

    def concerns(self, row: LedgerRow, action: str) -> bool:
        return self.action == action and any(site.has(row) for site in self.sites)

    def mend_results(self, calls: Sequence[CommunicationCall]) -> None:
        """Replace the results of the calls of one rendezvous."""
        row = calls[0].row
        if self.concerns(row, OMIT):
            for call in calls:
                call.results = _input_for(call, call.place, len(calls))
        elif self.concerns(row, SWAP_SUM_AND_MEAN) and row.reduce_op in SWAPPED:
            other = SWAPPED[row.reduce_op]
            for call in calls:
                addends = zip(*(_input_for(each, call.place, len(calls)) for each in calls), strict=True)
                call.results = [combined(other, each) for each in addends]
        elif self.concerns(row, REDUCE) and self.reduce_op is not None:
            totals = [_combined(self.reduce_op, each) for each in zip(*(call.pieces for call in calls), strict=True)]
            totals = [total if self.times == 1 else total * self.times for total in totals]
            entries = len(calls) if row.op == "all_gather" else 1
            for call in calls:
                call.results = [total for total in totals for _ in range(entries)]

    def other_group(self, row: LedgerRow, axes: Mapping[str, int], groups: Iterable[Any]) -> Any:
        """The group of this rank that carries out the call instead; None for the call's own group."""
        if self.axis is None or not self.concerns(row, REDUCE):
            return None
        ranks = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
        if self.axis != ALL_RANKS:
            own = np.argwhere(ranks == row.rank)[0]
            place = list(axes).index(self.axis)
            ranks = ranks[tuple(slice(None) if index == place else at for index, at in enumerate(own))]
        return next(group for group in groups if getattr(group, "ranks", None) == tuple(ranks.ravel().tolist()))

    def mend_gradient(self, row: LedgerRow, tensors: Sequence[Tensor], total: Callable[[Tensor], Tensor]) -> None:
        """Replace the gradient of this call's result by its total over the group."""
        if not self.concerns(row, SUM_GRADIENT):
            return
        node = autograd_function()
        if node is not None:
            node.register_prehook(lambda gradients: tuple(g if g is None else total(g) for g in gradients))
        for tensor in tensors if node is None and torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                tensor.register_hook(total)


@dataclass(frozen=True)
class RepairedProgram(Program):
    """A program that runs under a repair in the exchange, with the same setup and its own globals."""

    repair: Repair | None = None

    def __call__(self, mesh: Any, case: CaseSpec) -> RankResult:
        world.here().exchange.repair = self.repair
        return super().__call__(mesh, case)


def under(repair: Repair) -> Callable[[Program], RepairedProgram]:
    """A wrapper for `verify_case`, which makes a program run under this repair."""

    def repaired(program: Program) -> RepairedProgram:
        return RepairedProgram(**{each.name: getattr(program, each.name) for each in fields(program)}, repair=repair)

    return repaired


def _combined(name: str, addends: Sequence[Tensor]) -> Tensor:
    """The ranks' tensors combined by the operation `name`. Statistics of integers are counts, and are summed."""
    if name not in OF_STATISTICS:
        return combined(name, addends)
    return reduce(OF_STATISTICS[name], addends) if addends[0].is_floating_point() else combined("SUM", addends)


def _input_for(call: CommunicationCall, place: int, size: int) -> list[Tensor]:
    """One rank's input for another rank: all of it, or the blocks of a reduce-scatter."""
    if call.row.op != "reduce_scatter":
        return call.pieces
    return [call.pieces[block + place] for block in range(0, len(call.pieces), size)]


def autograd_function() -> Any:
    """The node of the innermost torch.autograd.Function that runs its forward now."""
    values = (value for frame, _ in traceback.walk_stack(sys._getframe(1)) for value in frame.f_locals.values())
    return next((value for value in values if isinstance(value, torch.autograd.function.BackwardCFunction)), None)
