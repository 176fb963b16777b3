"""`python -m parity_tests.training.located`: plant faults in a training step; does a trace find their module?

Exit status: 0 if 90 of 100 that change anything are found in the right module, else 1.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from parity_tests.faults.catalogue import CATALOGUE
from parity_tests.faults.fault import Fault
from parity_tests.faults.models import HOMES
from parity_tests.faults.patch import Plot
from parity_tests.harness import bridge
from parity_tests.harness.engines.failure import RankFailure
from parity_tests.tracing.flax_side import Known
from parity_tests.tracing.lines import first
from parity_tests.training.run import Run
from parity_tests.training.traced import known_of

PROMISED = 0.9
SMALL: dict[str, Any] = {"streams": 2, "length": 48}
# Each fault is tried on these in turn until a trace differs.
HOW: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"dp": 2, "cp": 2}, {"mamba": "state", "attention": "ring"}),
    ({"cp": 2, "tp": 2}, {"mamba": "hidden", "attention": "ulysses"}),
    ({"cp": 2}, {"mamba": "hidden", "attention": "all_gather"}),
)
# The homes of faults in components that stand in one kind of module.
FOLDERS = {
    "torch_impl/mamba/": "layers.1.mixer*",
    "torch_impl/context_parallel/": "layers.*.self_attn*",
    "torch_impl/vocab_parallel/": "",
}


@dataclass(frozen=True)
class Located:
    """What became of one fault: the homes that are right, and the one that was found; None where nothing differs."""

    fault: Fault
    home: str
    found: str | None
    said: str

    @property
    def is_right(self) -> bool:
        return self.found is not None and fnmatch(self.found, self.home)


def home_of(fault: Fault) -> str | None:
    """Where a fault is to be found; None for one that says nothing of a module."""
    if fault.name in HOMES:
        return HOMES[fault.name]
    return next((home for folder, home in FOLDERS.items() if fault.file.startswith(folder)), None)


def located(fault: Fault, known: Known) -> Located:
    """Plant a fault and trace until something differs. A rank that fails is not located: its own words say where."""
    home = home_of(fault) or ""
    plot = Plot.of(fault, ["parity_tests.training.traced"])
    with plot:
        for mesh, how in HOW:
            try:
                line = first(plot.modules[0].trace(Run.on(mesh, **SMALL, **how), known, "lockstep"))
            except RankFailure as failure:
                return Located(fault, home, None, f"failed: {str(failure).splitlines()[0]}")
            if line is not None:
                return Located(fault, home, line.home, line.name)
    return Located(fault, home, None, "")


def main(names: Sequence[str]) -> int:
    """All faults with a home, or those whose name or file has one of the given words in it."""
    bridge.start()
    known = known_of(Run(mesh={}, **SMALL))
    chosen = [fault for fault in CATALOGUE if home_of(fault) is not None and not fault.equivalent]
    if names:
        chosen = [fault for fault in chosen if any(name in text for name in names for text in (fault.name, fault.file))]
    outcomes = []
    for fault in chosen:
        outcomes.append(located(fault, known))
        made = outcomes[-1]
        word = "right" if made.is_right else "WRONG" if made.found is not None else "-"
        print(f"{word:5}  {fault.name}: {made.said or 'changes nothing here'}", flush=True)
    differing = [made for made in outcomes if made.found is not None]
    right = sum(made.is_right for made in differing)
    failed = sum(made.said.startswith("failed") for made in outcomes)
    print(
        f"{len(outcomes)} faults: {len(differing)} change a tensor of the step, {failed} end in a failed rank, "
        f"the rest cannot be seen in this model; {right} of {len(differing)} are found in the right module"
    )
    return int(right < PROMISED * len(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
