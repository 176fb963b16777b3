"""Judge drawn examples of the built-in schemes, which are right: every reported error is a false alarm.

The first examples of a scheme have each combination of its options on each mesh: drawn cases have each two of these
together, and three meet by chance. Then time is shared equally: the next examples are of the scheme that has had the
least time. So a function is judged a thousand times and a whole model some dozens. Example n is the same in each run.

`python -m parity_tests.evidence.false_alarms.run JOURNAL SHARE SHARES EXAMPLES` is one of SHARES processes. It judges
its share of the schemes until it has its part of the examples. Examples in its journal are not judged again.
"""

from __future__ import annotations

import functools
import itertools
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from parity_tests.evidence.injected_bugs.report import without_schedule_warnings
from parity_tests.evidence.injected_bugs.runner import NOT_TRIED
from parity_tests.evidence.journal import Journal
from shardproof.declare import discover
from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case, mesh_choices
from shardproof.draw.size_choices import assumed_options
from shardproof.engines.failure import Stalled
from shardproof.engines.speed_advice import without_advice
from shardproof.experiments.undecided import verify_or_undecided
from shardproof.judge import bridge
from shardproof.report.report import Report

ROUND_S = 4.0  # of one scheme, before the next one has its turn
EACH = 40  # examples of every scheme, before time decides
COMBINED_S = 20.0  # of one scheme, for combinations of options beyond these


@dataclass
class Counts:
    """The counts of one scheme; `alarms` and `undecided` are sentences that name the case."""

    scheme: str
    examples: Counter[str] = field(default_factory=Counter)  # by dtype
    conditions: int = 0  # of them called under a calling condition
    worst: dict[str, float] = field(default_factory=dict)  # the greatest error in budgets, by dtype
    undecided: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    seconds: float = 0.0
    combinations: int = 0  # of options and a mesh; the first examples have them

    @property
    def needs_more(self) -> bool:
        """Whether examples are due before other schemes get more time."""
        judged = self.examples.total()
        return judged < EACH or (judged < self.combinations and self.seconds < COMBINED_S)

    def add(self, other: Counts) -> None:
        self.examples += other.examples
        self.conditions += other.conditions
        for dtype, ratio in other.worst.items():
            self.worst[dtype] = max(ratio, self.worst.get(dtype, 0.0))
        self.undecided += other.undecided
        self.alarms += other.alarms
        self.seconds += other.seconds
        self.combinations = other.combinations

    def note(self, case: CaseSpec, report: Report) -> None:
        """Count one example."""
        self.examples[case.dtype] += 1
        self.conditions += bool(case.conditions)
        if report.is_undecided:
            self.undecided.append(f"{case.id}: {report.undecided_reason}")
        elif report.failed:
            self.alarms.append(_sentence(report))
        else:
            ratios = [tensor.ratio for tensor in report.tensors]
            self.worst[case.dtype] = max([self.worst.get(case.dtype, 0.0), *ratios])


def counts_of(journal: Path) -> dict[str, Counts]:
    """The counts in a journal, by the key of the scheme."""
    return {key: _counts(**record) for key, record in Journal(journal).records.items()}


def all_counts(journals: Iterable[Path]) -> list[Counts]:
    """The counts of every built-in scheme in these journals, zero for a scheme that was not judged yet."""
    counts = {key: each for journal in journals for key, each in counts_of(journal).items()}
    return [counts.get(scheme.key, Counts(scheme.key)) for scheme in schemes()]


def schemes(share: int = 0, shares: int = 1) -> list[Declared]:
    """The built-in schemes that lockstep runs, or every so-manyth of them."""
    tried = [each for each in discover.built_in() if each.name not in NOT_TRIED and "lockstep" in each.engines]
    return tried[share::shares]


@functools.cache
def combinations(scheme: Declared) -> list[dict[str, Any]]:
    """Each mesh with each combination of options that it may have, in an order that is the same in each run."""
    found: list[dict[str, Any]] = []
    for mesh, shapes in mesh_choices(scheme, {})[0].fits:
        if scheme.assume:
            allowed = (options for shape in shapes for options in assumed_options(scheme, shape, mesh, {}))
            found += {repr(options): {**mesh, **options} for options in allowed}.values()
        else:
            chosen = itertools.product(*scheme.all_options.values())
            found += [{**mesh, **dict(zip(scheme.all_options, values, strict=True))} for values in chosen]
    Random(0).shuffle(found)
    return found


def judge(scheme: Declared, first: int, most: int, seconds: float = ROUND_S) -> Counts:
    """Judge examples from number `first` on, `most` of them or as many as the seconds allow, and at least one."""
    combined = combinations(scheme)
    counts, start = Counts(scheme.key, combinations=len(combined)), time.process_time()
    for number in range(first, first + most):
        given = combined[number] if number < len(combined) else {}
        case = draw_case(scheme, seeded_chooser(number), given, seed=number, inside_subgroup=None, with_conditions=True)
        report = verify_or_undecided(scheme, case)
        counts.note(case, report)
        counts.seconds = time.process_time() - start
        if counts.seconds > seconds or isinstance(report.failure, Stalled):
            break
    return counts


def _sentence(report: Report) -> str:
    tensor = max(report.tensors, key=lambda each: each.ratio, default=None)
    ratio = f", {tensor.label} at {tensor.ratio:.2g} budgets" if tensor else ""
    why = report.failure or next(iter((*report.protocol, *report.cost, *report.hygiene)), "")
    return f"{report.case.id}: {report.verdict}{ratio} {why}".rstrip()


@without_advice()
def main(arguments: Sequence[str]) -> None:
    """Judge one share until it has its part of all examples."""
    path, share, shares, wanted = Path(arguments[0]), *map(int, arguments[1:])
    bridge.start()
    tried = {scheme.key: scheme for scheme in schemes(share, shares)}
    journal = Journal(path)
    counts = {key: _counts(**journal.of(key)) if journal.of(key) else Counts(key) for key in tried}
    left = wanted // shares - sum(each.examples.total() for each in counts.values())
    with without_schedule_warnings():
        while left > 0:
            key = min(counts, key=lambda each: (not counts[each].needs_more, counts[each].seconds))
            judged = judge(tried[key], counts[key].examples.total(), left)
            counts[key].add(judged)
            left -= judged.examples.total()
            journal.add({"key": key, **asdict(counts[key]), "examples": dict(counts[key].examples)})
            if any("stalled" in alarm for alarm in judged.alarms):
                os._exit(1)  # a rank still computes in a thread of this process


def _counts(key: str, examples: Mapping[str, int], **record: Any) -> Counts:
    return Counts(examples=Counter(examples), **record)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads of ranks that never ended
