"""Judge mutants by the drawn cases that run the changed line, the nearest schemes first.

`python -m parity_tests.evidence.mutants.drawn BATCH` judges a batch in a process of its own, because a mutant may leave
a process unusable. It writes a line of JSON for each mutant, and ends after a mutant whose ranks never came back.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parity_tests.evidence.injected_bugs.report import without_schedule_warnings
from parity_tests.evidence.injected_bugs.runner import FARTHEST, NEAREST, oracles, rounds, schemes_under
from parity_tests.evidence.injected_bugs.trials import SchemeTrials, Trial
from parity_tests.evidence.mutants.mutant import Mutant
from shardproof.declare import discover
from shardproof.engines.speed_advice import without_advice
from shardproof.judge import bridge

AT_IMPORT = "import"  # an import fails: of the changed file, or of a scheme's file with the change


class DrawnCases:
    """The cases of the schemes that the mutants of one process are tried on."""

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self._trials: dict[str, SchemeTrials] = {}

    def judge(self, mutant: Mutant, numbers: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Find the case that catches a mutant, if any; `numbers` are, by scheme, the cases that run its line."""
        start, judged = time.monotonic(), 0
        chosen = [
            [self._of(key).drawn[number] for number in numbers[key]] for key in itertools.islice(numbers, FARTHEST)
        ]
        try:
            modules, patched = schemes_under(mutant.patched, [trials[0].scheme for trials in chosen])
        except Exception as error:  # whatever an import raises
            return _record(mutant, start, len(numbers), 1, AT_IMPORT, f"{type(error).__name__}: {error}")
        with modules:
            for group in (chosen[:NEAREST], chosen[NEAREST:]):
                for example, trial in rounds(group):
                    judged += 1
                    report = trial.on(patched[trial.scheme.key])
                    if not report.ok and self._is_healthy(trial, modules):
                        return _record(
                            mutant, start, len(numbers), example, trial.scheme.name, ", ".join(oracles(report))
                        )
        return _record(mutant, start, len(numbers), judged, None, None)

    def _of(self, key: str) -> SchemeTrials:
        if key not in self._trials:
            self._trials[key] = SchemeTrials(discover.lookup(key), self.examples)
        return self._trials[key]

    @staticmethod
    def _is_healthy(trial: Trial, modules: Any) -> bool:
        """Whether the case passes without the change: a case that fails anyhow catches nothing."""
        with modules.suspended():
            return trial.healthy.ok


def _record(
    mutant: Mutant, start: float, schemes: int, examples: int, scheme: str | None, oracle: str | None
) -> dict[str, Any]:
    seconds = round(time.monotonic() - start, 1)
    return {
        "key": mutant.key,
        "schemes": schemes,
        "examples": examples,
        "drawn": scheme,
        "oracle": oracle,
        "seconds": seconds,
    }


@without_advice()
def main(batch: str) -> None:
    """Judge a batch: a JSON file with `examples`, `cache`, and `mutants`, pairs of a mutant and its cases by scheme."""
    record = json.loads(Path(batch).read_text())
    bridge.start(record["cache"])
    cases = DrawnCases(record["examples"])
    with without_schedule_warnings():
        for fields, numbers in record["mutants"]:
            with contextlib.redirect_stdout(sys.stderr):
                outcome = cases.judge(Mutant(**fields), numbers)
            print(json.dumps(outcome), flush=True)
            if outcome["oracle"] == "stalled":
                os._exit(0)  # a rank still computes in a thread of this process


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # threads of ranks that never ended
