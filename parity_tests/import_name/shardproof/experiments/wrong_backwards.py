"""Name the hand-written backward that is not the derivative of its forward, where a gradient is wrong on one rank.

On one rank the collectives of a forward change nothing: they copy their input, which has a derivative. So autograd can
differentiate the forward itself. A torch.autograd.Function is named if every gradient is right once autograd does so,
in the case and in a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import Function

from shardproof.declare.declared import Declared
from shardproof.engines.ledger import LedgerRow
from shardproof.engines.lockstep.call import CommunicationCall
from shardproof.engines.lockstep.repair import NO_POISON, Repair, under
from shardproof.experiments import cases
from shardproof.experiments.unsummed_edges import Edge, Graph, place_of_backward, with_graph
from shardproof.explain.arithmetic import names_a_number
from shardproof.explain.clues import FORWARD_EQUAL
from shardproof.explain.note import ACROSS_MESHES, CONTEXT, Note
from shardproof.explain.sums import NO_GRADIENT
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

MAX_FUNCTIONS = 8
NO_DERIVATIVE = "is not the derivative of its forward"
Notes = Mapping[str, tuple[Note, ...]]


def name_wrong_backwards(scheme: Declared, report: Report, notes: Notes) -> dict[str, tuple[Note, ...]]:
    """The notes, with the function of gradients that no other note explains.

    Cost: up to 3 + MAX_FUNCTIONS runs on one rank.
    """
    by_label = dict(notes)
    unnamed = [label for label, of_tensor in notes.items() if _is_unexplained(of_tensor)]
    on_one_rank = cases.on_one_rank(scheme, report.case) if unnamed else None
    for failing in cases.reports(scheme, [on_one_rank]):
        explained = [label for label in unnamed if label in failing.notes]
        function = _that_makes_right(scheme, failing) if failing.failure is None and explained else None
        if function is not None:
            words = f"the backward of {function.operation} at {function.source} {NO_DERIVATIVE}"
            named = Note(f"{FORWARD_EQUAL}: {words}", CONTEXT)
            for label in explained:
                by_label[label] = (named, *(note for note in notes[label] if note != FORWARD_EQUAL))
    return by_label


def _is_unexplained(notes: tuple[Note, ...]) -> bool:
    """Whether notes say no more of a gradient than that it is wrong, None, or off by a number without a meaning."""
    rest = [note for note in notes if note != FORWARD_EQUAL and not note.startswith(NO_GRADIENT)]
    return FORWARD_EQUAL in notes and all(note.scope == ACROSS_MESHES and not names_a_number(note) for note in rest)


def _that_makes_right(scheme: Declared, failing: Report) -> Edge | None:
    """An edge of the function whose derivative by autograd makes every tensor right."""
    graph: Graph = []
    verify_case(scheme, failing.case, wrap_program=with_graph(lambda mesh, own: graph.extend(own)))
    functions = {(edge.operation, edge.source): edge for edge, _, _ in graph if edge.is_handwritten}
    larger = cases.larger(scheme, failing.case, 2, values=False)
    copied = under(_DifferentiableCopies("", "", "fwd", NO_POISON))
    for edge in list(functions.values())[:MAX_FUNCTIONS]:
        with _in_the_open(edge):
            if all(report.ok for report in cases.reports(scheme, [failing.case, larger], copied)):
                return edge
    return None


@dataclass(frozen=True)
class _DifferentiableCopies(Repair):
    """On one rank every collective copies its input, and autograd sees it."""

    def concerns(self, row: LedgerRow, action: str) -> bool:
        return action == self.action

    def mend_results(self, calls: Sequence[CommunicationCall]) -> None:
        for call in calls:
            for output, source in zip(call.outputs, call.sources, strict=False):  # a broadcast's root has no output
                if output is not source:
                    output.copy_(source.reshape(output.shape))


@contextmanager
def _in_the_open(edge: Edge) -> Iterator[None]:
    """Run the forward of a function like any other code, so that autograd sees its operations."""
    base: Any = Function
    original = base.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if (cls.__name__, place_of_backward(cls)) != (edge.operation, edge.source):
            return original.__get__(None, cls)(*args, **kwargs)
        if cls.setup_context is not base.setup_context:
            return cls.forward(*args, **kwargs)
        return cls.forward(_Context(args), *args, **kwargs)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = original


class _Context(SimpleNamespace):
    """What a forward may say about its backward, which does not run."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__(needs_input_grad=tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in args))

    def save_for_backward(self, *tensors: Any) -> None: ...
    def save_for_forward(self, *tensors: Any) -> None: ...
    def mark_dirty(self, *tensors: Any) -> None: ...
    def mark_non_differentiable(self, *tensors: Any) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
