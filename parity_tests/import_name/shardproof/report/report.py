"""The report: one record of checks and findings, printed in a terminal and drawn in a notebook."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Group, RenderableType

from shardproof.declare.case import SPARE, CaseSpec
from shardproof.declare.conditions import LARGER_WORLD, how_to_exclude, phrases
from shardproof.declare.counted import counted
from shardproof.declare.declared import Cost, Implementation
from shardproof.declare.draws import EXTREME
from shardproof.engines.engines import engine_text
from shardproof.engines.failure import RankFailure, Shared
from shardproof.engines.ledger import Finding, Ledger
from shardproof.explain.clues import FORWARD_EQUAL
from shardproof.explain.note import NOT_DIFFERENTIABLE, READ_TOO_EARLY, Note
from shardproof.explain.places import NOT_FINITE
from shardproof.judge.compare import TensorComparison
from shardproof.report.sentence import LINE, Sentence, as_text
from shardproof.report.tensor_table import names, notes_by_tensors, tensor_table
from shardproof.report.tested_versions import newer

EQUAL_NUMBERS = ("zeros", "ones", "iota", "ties")  # kinds with repeated numbers
IN_A_LARGER_WORLD = (
    f"inside a larger world: {SPARE} is not an axis of the scheme; the scheme's mesh is half of the ranks"
)
MOST_NAMED = 4  # pairs that no example had
# Fields that a report on one case copies from the report on all examples.
OF_ALL_EXAMPLES = (
    "examples",
    "shrinking_steps",
    "dtypes",
    "left_out",
    "trace_seconds",
    "undecided_reason",
    "undecided_examples",
)


class VerdictError(AssertionError):
    """The verdict is not `equal`. One subclass for each reason."""

    def __init__(self, text: str, report: Report | None = None) -> None:
        super().__init__(text)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args  # another process gets the text alone


class ValueMismatch(VerdictError):
    """An output differs from the reference."""


class GradientMismatch(VerdictError):
    """The outputs are right and a gradient is not."""


class Undecided(VerdictError):
    """The reference is discontinuous where the tensors differ, so no verdict is possible."""


class ProtocolMismatch(VerdictError):
    """Every rank finished, but their ledgers disagree or a backend would reject a call."""


class CostMismatch(VerdictError):
    """Calls or bytes differ from the declared closed form."""


class HygieneViolation(VerdictError):
    """A tensor was modified, replicas or their dtypes differ, the random state changed, or the wrong group was used.

    The wrong group is the default group in a function that runs inside a larger world.
    """


class EnginesDisagree(VerdictError):
    """The case fails in this process but passes on gloo in fresh processes."""


@dataclass(frozen=True, repr=False)
class Report:
    """The outcome of verifying one scheme: the worst comparison of each tensor, and notes on the kind of mistake."""

    scheme: str
    case: CaseSpec
    tensors: tuple[TensorComparison, ...] = ()
    protocol: tuple[Finding, ...] = ()
    cost: tuple[str, ...] = ()
    hygiene: tuple[str, ...] = ()
    notes: Mapping[str, tuple[Note, ...]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    failure: RankFailure | None = None
    cost_declared: bool = False
    declared_costs: tuple[Cost, ...] = ()  # one for each rank, if the declared cost applies to this case
    seconds: float = 0.0
    examples: int = 1
    shrinking_steps: int = 0  # runs after the first failure, in search of a smaller case and to repeat the smallest
    dtypes: tuple[str, ...] = ()
    meshes: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)  # why each of these meshes cannot shard the given sizes
    not_drawn: tuple[str, ...] = ()  # pairs that no example had, as "g=2 on cp=4"; only if the scheme is equal
    case_of_tensor: Mapping[str, CaseSpec] = field(default_factory=dict)
    trace_seconds: float = 0.0
    is_undecided: bool = False  # neither equal nor a mismatch
    undecided_reason: str | None = None  # the last undecided example's reason, also if the scheme is equal
    undecided_examples: int = 0
    smallest: bool = False  # no case with one size (except `as_given`) a step smaller fails this way
    as_given: tuple[str, ...] = ()  # axes and dims with a size given by the caller, for which no smaller size was tried
    conditions_needed: bool = False  # without any one of its calling conditions the case does not fail this way
    values_to_avoid: tuple[str, ...] = ()  # inputs whose repeated values, such as zeros, cause the failure
    state_between_calls: str | None = None  # if fresh processes show that the function keeps state
    replay: str | None = None
    replaced_replays: tuple[str, ...] = ()  # older replay files of the scheme, now deleted
    replay_error: str | None = None  # why there is no replay file
    unfinished: str | None = None  # why a failing case was not made smaller, or its notes not tested
    confirmed_on: str | None = None  # the engine on which the case has the same verdict
    not_repeated: str | None = None  # why the case was not repeated on gloo in fresh processes, or proves nothing there
    engines_disagree: str | None = None  # why the case fails here and passes on gloo in fresh processes
    shards: str | None = None  # the shard of each input on the rank that raised
    scalars: Mapping[str, float] = field(default_factory=dict)  # the value of each input without dims
    excluded_conditions: tuple[str, ...] = ()  # calling conditions that the scheme or its file excludes
    implementation: Implementation | None = None  # the tested implementation, if it is not torch_impl
    source: str = ""  # file:line of the function
    types: str | None = None  # what spmd-types says of the function's lines
    clearer_report: Report | None = None  # a larger case with the same failure, which shows more of the mistake

    @property
    def ok(self) -> bool:
        besides_values = self.protocol or self.cost or self.hygiene or self.is_undecided
        return self.failure is None and not besides_values and all(tensor.ok for tensor in self.tensors)

    def __bool__(self) -> bool:
        return self.ok  # for `assert scheme.verify()`

    @property
    def failed(self) -> bool:
        """Neither equal nor undecided: a mismatch or a failed rank."""
        return not self.ok and not self.is_undecided

    @property
    def only_unwaited(self) -> bool:
        """Whether the one finding is that work is never waited for: other cases are judged all the same."""
        is_unwaited = len(self.protocol) == 1 and any(row.unwaited for row in self.ledger.rows)
        return is_unwaited and self.failed and replace(self, protocol=()).ok

    @property
    def verdict(self) -> str:
        """The verdict in a word or two: equal, or the first finding."""
        if self.engines_disagree is not None:
            return "engines disagree"
        if self.failure is not None:
            return self.failure.cause
        if self.is_undecided:
            return "undecided"
        if not all(tensor.ok for tensor in self.tensors):
            return "mismatch"
        named = {"protocol": self.protocol, "cost": self.cost, "hygiene": self.hygiene}
        return next((name for name, messages in named.items() if messages), "equal")

    @property
    def headline(self) -> str:
        """The most telling sentence of a report that is not equal: a failure, the first note, or a side check."""
        if self.engines_disagree is not None:
            return f"engines disagree: {self.engines_disagree}"
        if self.failure is not None:
            return str(self.failure).splitlines()[0]
        noted = [(names(self, labels), note) for labels, notes in notes_by_tensors(self).items() for note in notes]
        # A number shows no pattern and refers to another tensor; that a gradient alone is wrong, its name says too.
        telling = [each for each in noted if not each[1].startswith("see ")]
        notes = [f"{tensors}: {note.removeprefix(f'{FORWARD_EQUAL}: ')}" for tensors, note in telling or noted]
        reasons = (self.undecided_reason,) if self.is_undecided and self.undecided_reason else ()
        return next(iter([*notes, *self.protocol, *self.cost, *said_once(self.hygiene), *reasons]), self.verdict)

    @property
    def confirmation(self) -> str | None:
        """`confirmed on gloo, in fresh processes`, or the reason why not.

        The engine is left out if it is the case's own.
        """
        if self.confirmed_on is None:
            on_gloo = "" if self.case.engine == "gloo" else " on gloo"
            return self.not_repeated and f"not confirmed{on_gloo}: {self.not_repeated}"
        on_engine = "" if self.confirmed_on == self.case.engine else f" on {self.confirmed_on},"
        return f"confirmed{on_engine} in fresh processes"

    @property
    def kind_of_case(self) -> str:
        """For a failure: `smallest case`, `smallest case with tp as given`, or `failing case` if no size was tried."""
        given = f" with {', '.join(self.as_given)} as given" if self.as_given else ""
        return f"smallest case{given}" if self.smallest else "failing case"

    @property
    def case_text(self) -> str:
        """Sizes, dtype and seed of the case, and its scalar inputs: `tp=2 b=4 float32 seed=0, scale=1.5`."""
        scalars = " ".join(f"{name}={value:.6g}" for name, value in self.scalars.items())
        return f"{sizes(self.case)}, {scalars}" if scalars else sizes(self.case)

    def worst(self, role: str) -> TensorComparison | None:
        """The output or gradient with the largest ratio of error to budget."""
        return max(
            (tensor for tensor in self.tensors if tensor.role == role), key=lambda tensor: tensor.ratio, default=None
        )

    def raise_if_failed(self) -> None:
        """Raise unless `ok`, with one exception type per cause; an undecided report raises too, although not `failed`.

        The message is the full report; for a failed rank, the cause and the state of the other ranks.
        """
        if self.ok:
            return
        if self.engines_disagree is not None:
            raise EnginesDisagree(f"\n{self}", self) from self.failure
        if self.failure is not None:
            raise self.failure
        if self.is_undecided:
            raise Undecided(f"\n{self}", self)
        outputs = all(tensor.ok for tensor in self.tensors if tensor.role == "output")
        gradients = all(tensor.ok for tensor in self.tensors if tensor.role == "gradient")
        failing_oracles: list[tuple[bool, type[VerdictError]]] = [
            (not outputs, ValueMismatch),
            (not gradients, GradientMismatch),
            (bool(self.protocol), ProtocolMismatch),
            (bool(self.cost), CostMismatch),
            (bool(self.hygiene), HygieneViolation),
        ]
        raise next(kind for fails, kind in failing_oracles if fails)(f"\n{self}", self)

    def ledger_text(self) -> str:
        """The ledger as text: every collective of every rank, in order of issue."""
        return "\n".join(f"rank {row.rank}: {row}" for row in self.ledger.rows)

    def omissions(self) -> list[str]:
        """The meshes that were left out, grouped by reason: `tp=2 tp=4: v=7 cannot be sharded ...`."""
        of = self.left_out
        meshes_of = {reason: [mesh for mesh in of if of[mesh] == reason] for reason in of.values()}
        omissions = [f"{' '.join(meshes)}: {reason}" for reason, meshes in meshes_of.items()]
        only = self.meshes if omissions and self.ok and len(self.meshes) == self.case.world == 1 else ()
        return omissions + [f"all meshes but {mesh}, which shards nothing" for mesh in only]

    def to_dict(self) -> dict[str, Any]:
        """The JSON record that `--json` writes."""
        return {
            "scheme": self.scheme,
            "verdict": self.verdict,
            "ok": self.ok,
            "examples": self.examples,
            "shrinking_steps": self.shrinking_steps,
            "engine": self.case.engine,
            "case": {"conditions": {}, **json.loads(self.case.json)},  # present even if the case has none
            "tensors": [
                {
                    "tensor": r.label,
                    "error": number(r.error),
                    "budget": number(r.budget),
                    "ratio": number(r.ratio),
                    "where": list(r.where),
                    "dtype": r.dtype,
                    "ok": r.ok,
                    "notes": list(self.notes.get(r.label, ())),
                }
                for r in self.tensors
            ],
            "protocol": list(self.protocol),
            "cost": list(self.cost),
            "hygiene": list(self.hygiene),
            "failure": None if self.failure is None else str(self.failure),
            "replay": self.replay,
            "left_out": dict(self.left_out),
            "not_drawn": list(self.not_drawn),
            "confirmed_on": self.confirmed_on,
            "engines_disagree": self.engines_disagree,
            "undecided": self.undecided_examples,
            "undecided_reason": self.undecided_reason,
            "shards": self.shards,
            "scalars": {name: number(value) for name, value in self.scalars.items()},
            "types": self.types,
            "implementation": None if self.implementation is None else self.implementation.to_dict(),
        }

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"<report {self.scheme.rpartition(':')[2]}: {self.verdict}, {sizes(self.case)}>"

    def _case_and_replay(self) -> list[str]:
        """The case and the command to replay it, on one line if that is at most LINE columns."""
        case = f"{self.kind_of_case}: {self.case_text}"
        if not self.replay:
            return [case]
        gone = f" (in place of {', '.join(self.replaced_replays)})" if self.replaced_replays else ""
        command = f"replay: python {self.replay}{gone}"
        one_line = f"{case}      {command}"
        return [one_line] if len(one_line) <= LINE else [case, command]

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [Sentence(line, style="yellow") for line in newer() if not self.ok]
        parts.append(Sentence(self._heading(), style="bold"))
        if self.implementation is not None:
            parts += [Sentence(f"  {line}") for line in self.implementation.lines]
        disagreement: list[RenderableType] = []
        if self.engines_disagree is not None:
            disagreement.append(Sentence(f"  engines disagree: {self.engines_disagree}", style="yellow"))
        if self.failure is not None:
            failure = Sentence("\n".join("  " + line for line in str(self.failure).splitlines()), style="red")
            # Ranks that share state are the reason why engines disagree, so this comes first.
            parts += [failure, *disagreement] if isinstance(self.failure, Shared) else [*disagreement, failure]
            if self.shards is not None:
                parts.append(Sentence(f"  {self.shards}"))
        else:
            parts += [*disagreement, *tensor_table(self), Sentence("  " + self._side_check_lines())]
        if self.undecided_reason is not None:
            share = f"{self.undecided_examples} of {counted(self.examples, 'example')}"
            too_many = ", too many for a pass" if self.is_undecided else ""
            parts.append(Sentence(f"  undecided: {share}{too_many}: {self.undecided_reason}"))
        parts += [Sentence(f"  left out: {omission}") for omission in self.omissions()]
        if self.not_drawn:
            more = f" and {len(self.not_drawn) - MOST_NAMED} more" if len(self.not_drawn) > MOST_NAMED else ""
            parts.append(Sentence(f"  not drawn: {', '.join(self.not_drawn[:MOST_NAMED])}{more}"))
        parts += [Sentence(f"  {line}") for line in (self.types and f"types: {self.types}", self.confirmation) if line]
        if not self.ok:
            parts.append(Sentence("\n".join(self._case_and_replay())))
            if self.case.conditions and not self._ends_by_itself:
                only = "only when" if self.conditions_needed else "seen when"
                is_raised = self.failure is not None and self.failure.cause == "raised"
                excluded = self.excluded_conditions
                advice = how_to_exclude(self.case, excluded, is_raised) if self.conditions_needed else ""
                parts.append(Sentence(f"  {only} {' and '.join(phrases(self.case))}{advice}"))
            if self.state_between_calls is not None:
                parts.append(Sentence(f"  {self.state_between_calls}"))
            parts += [Sentence("  " + hint) for hint in self._hints()]
        return Group(*parts)

    def _repr_html_(self) -> str:
        from shardproof.report.html_page import fragment

        return fragment(self)

    def _heading(self) -> str:
        name, engine = self.scheme.rpartition(":")[2], engine_text(self.case, self.meshes)
        count = counted(self.examples, "example")
        if self.shrinking_steps:
            count += f" and {counted(self.shrinking_steps, 'shrinking step')}"
        meshes = " ".join(self.meshes) or mesh_text(self.case.mesh)
        return f"{name}    {meshes}   {engine}   {count}   {' '.join(self.dtypes or (self.case.dtype,))}"

    @property
    def _ends_by_itself(self) -> bool:
        """Whether a rank died or stalled: calling conditions are rarely the cause."""
        return self.failure is not None and self.failure.cause in ("died", "stalled")

    def _hints(self) -> list[str]:
        """Hints from the failing case itself: it needs no sharding, or it has special values."""
        hints = []
        is_read_too_early = any(READ_TOO_EARLY in note for notes in self.notes.values() for note in notes)
        if self.case.world == 1 and not all(tensor.ok for tensor in self.tensors) and not is_read_too_early:
            so = "so called, " if self.conditions_needed and self.case.conditions else ""
            differ = "the function and its reference differ before anything is sharded"
            hints.append(f"one rank is enough for it: {so}{differ}")
        cut = [label for label, notes in self.notes.items() if any(NOT_DIFFERENTIABLE in note for note in notes)]
        if names := tuple(label.removeprefix("d/d ") for label in cut):
            unwanted = f"if no gradient is wanted, as of an optimizer's step, declare nograd={names}"
            hints.append(f"the collectives of torch_impl.collectives are differentiable; {unwanted}")
        # Values do not make a rank hang or die; but an exception may depend on them.
        extreme = drawn_kinds(self.case, EXTREME) if self.failure is None or self.failure.cause == "raised" else {}
        names_a_line = any(note.sites for notes in self.notes.values() for note in notes)
        if self.values_to_avoid and not names_a_line:
            kind_by_name = drawn_kinds(self.case, EQUAL_NUMBERS)
            kinds = ", ".join(f"{name} {kind_by_name[name]}" for name in self.values_to_avoid)
            normal = ", ".join(f"{name!r}: values('normal')" for name in self.values_to_avoid)
            hints.append(
                f"equal with normal values, drawn for it: {kinds}; if they never occur, declare draw={{{normal}}}"
            )
        elif extreme and not names_a_line:
            hints.append(how_to_avoid(extreme))
        unread = [name for name, value in self.case.values.items() if value.get("padding") == "nan"]
        if unread and any(note.startswith(NOT_FINITE) for notes in self.notes.values() for note in notes):
            rows = f"NaN in the rows of {', '.join(unread)} that are not read"
            hints.append(f"drawn for it: {rows}; leave them out with torch.where, not with a product")
        if SPARE in self.case.mesh:
            never = f"; if it never is, declare excluded_conditions=({LARGER_WORLD!r},)" if self.smallest else ""
            hints.append(f"{IN_A_LARGER_WORLD}{never}")
        if self.unfinished is not None:
            hints.append(f"not examined further: {self.unfinished}")
        if self.replay_error is not None:
            hints.append(f"no replay file was written: {self.replay_error}")
        return hints

    def _side_check_lines(self) -> str:
        """Protocol, cost and hygiene: on one line if all are in order."""
        cost = "cost as declared, forward and backward" if self.cost_declared else "cost not declared"
        lines = [
            "protocol ok" if not self.protocol else f"protocol: {self.protocol[0]}",
            cost if not self.cost else f"cost: {self.cost[0]}",
            "hygiene ok" if not self.hygiene else "hygiene: " + "; ".join(said_once(self.hygiene)[:3]),
        ]
        return ("\n  " if self.protocol or self.cost or self.hygiene else "   ").join(lines)


def drawn_kinds(case: CaseSpec, kinds: Iterable[str]) -> dict[str, str]:
    """The kind drawn for each input with values of these kinds, in all elements or at the border of a shard."""
    kind_by_name = {name: value["kind"] for name, value in case.values.items() if value.get("kind") in kinds}
    borders = {name: value["border"][0] for name, value in case.values.items() if "border" in value}
    return kind_by_name | {name: f"{kind} at the border of a shard" for name, kind in borders.items() if kind in kinds}


def how_to_avoid(kind_by_name: Mapping[str, str]) -> str:
    """The kinds of values that were drawn for these inputs, and the declaration that draws none of them."""
    kinds = ", ".join(f"{name} {kind}" for name, kind in kind_by_name.items())
    other = ", ".join(f"{name!r}: values('normal', 'ties')" for name in kind_by_name)
    return f"drawn for it: {kinds}; if such values never occur, declare draw={{{other}}}"


def said_once(findings: Iterable[str]) -> list[str]:
    """The findings, each once for all ranks that have it: `ranks 0, 1: input 'x' was modified, first at (0,)`."""
    ranks_of: dict[str, list[str]] = {}
    for finding in findings:
        ((rank, text),) = re.findall(r"\A(?:rank (\d+): )?(.*)", finding, re.DOTALL)
        ranks_of.setdefault(text, []).extend([rank] if rank else [])
    beginnings = (f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: " if ranks else "" for ranks in ranks_of.values())
    return [begin + text for begin, text in zip(beginnings, ranks_of, strict=True)]


def mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def sizes(case: CaseSpec) -> str:
    chosen = {**case.mesh, **case.dims, **case.options}
    return " ".join(f"{name}={value}" for name, value in chosen.items()) + f" {case.dtype} seed={case.seed}"


def number(value: float) -> float | str:
    """A number for JSON: infinities and NaN become text."""
    return value if math.isfinite(value) else str(value)
