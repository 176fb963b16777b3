"""`python -m parity_tests.training.located`: plant faults in a training step; does a trace find their module?

Exit status: 0 if 90 of 100 that change anything are found in the right module; else, and where none does, 1.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer

from parity_tests.harness.judge import bridge
from parity_tests.harness.run.failure import RankFailure
from parity_tests.injected_bugs.catalogue import CATALOGUE
from parity_tests.injected_bugs.injected_bug import InjectedBug
from parity_tests.injected_bugs.patch import Plot
from parity_tests.tracing.flax_side import Known
from parity_tests.tracing.lines import first
from parity_tests.training import located_page, reached
from parity_tests.training.kept import Kept
from parity_tests.training.run import SIZES, Run
from parity_tests.training.traced import known_of

PROMISED = 0.9
SMALL: dict[str, Any] = {
    "streams": 2,
    "length": 48,
    "sizes": {**SIZES, "layers": ("attention", "mamba", "attention")},
}
# Each fault is tried on these in turn until a trace differs.
HOW: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"dp": 2, "cp": 2}, {"mamba": "state", "attention": "ring"}),
    ({"cp": 2, "tp": 2}, {"mamba": "hidden", "attention": "ulysses"}),
    ({"dp_replicate": 2, "cp": 2}, {"mamba": "hidden", "attention": "all_gather"}),
    ({"cp": 4}, {"mamba": "state", "attention": "usp"}),
    ({"pp": 2, "cp": 2}, {"mamba": "state", "attention": "all_gather"}),
)
# The homes of bugs in components that stand in one kind of module.
COMPONENTS = {
    "mamba": "layers.*.mixer*",
    "context_parallel": "layers.*.self_attn*",
    "vocab_parallel": "",
}
NOT_RUN, EQUAL, FAILED, RIGHT, WRONG = "not run", "equal", "failed", "right", "wrong"


@dataclass(frozen=True)
class Located:
    """What became of one fault: the homes that are right, the one that was found, and the words that named it.

    `word` is `not run` where no traced step calls a function of the fault, `equal` where no tensor differs, `failed`
    where a rank does, else `right` or `wrong`. `mesh` is where it differed.
    """

    fault: InjectedBug
    home: str
    word: str
    found: str = ""
    said: str = ""
    mesh: str = ""

    @property
    def is_right(self) -> bool:
        return self.word == RIGHT


def home_of(fault: InjectedBug) -> str | None:
    """Where a fault is to be found; None for one that says nothing of a module."""
    return COMPONENTS.get(fault.component) if fault.module is None else fault.module


def runs(dtype: str, **sizes: Any) -> list[Run]:
    """What each fault is tried on."""
    return [Run.on(mesh, dtype=dtype, **{**SMALL, **sizes, **how}) for mesh, how in HOW]


def located(fault: InjectedBug, known: Known, tried: Sequence[Run] | None = None) -> Located:
    """Plant a fault and trace until something differs. A rank that fails is not located: its own words say where."""
    tried = runs("float64") if tried is None else tried
    home = home_of(fault) or ""
    plot = Plot.of(fault, ["parity_tests.training.traced"])
    with plot:
        for run in tried:
            mesh = " ".join(f"{axis}={size}" for axis, size in run.mesh.items())
            try:
                line = first(plot.modules[0].trace(run, known, "lockstep"))
            except RankFailure as failure:
                return Located(fault, home, FAILED, said=str(failure).splitlines()[0], mesh=mesh)
            if line is not None:
                word = RIGHT if fnmatch(line.home, home) else WRONG
                return Located(fault, home, word, line.home, line.name, mesh)
    return Located(fault, home, EQUAL if tried else NOT_RUN)


def all_located(faults: Sequence[InjectedBug], dtype: str, kept: Kept) -> Iterator[Located]:
    """Every fault in turn, those that `kept` has an answer of at once."""
    tried, known, ran = runs(dtype), None, None
    for fault in faults:
        before = kept.answer(fault, dtype)
        if before is None:
            known = known or known_of(Run(mesh={}, dtype=dtype, **SMALL))
            ran = ran or [reached.functions_run(run) for run in tried]
            those = [run for run, functions in zip(tried, ran, strict=True) if reached.is_reached(fault, functions)]
            made = located(fault, known, those)
            before = {name: value for name, value in vars(made).items() if name != "fault"}
            kept.keep(fault, dtype, before)
        yield Located(fault, **before)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Only faults with one of these in name or symbol.")] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
    keep: Annotated[Path | None, typer.Option(help="File of answers; a fault that it has is not tried again.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write located.md into this folder.")] = None,
) -> None:
    """Plant every fault that has a home in a training step, and see where a trace finds it."""
    bridge.start()
    chosen = [fault for fault in CATALOGUE if home_of(fault) is not None and not fault.equivalent]
    if names:
        chosen = [fault for fault in chosen if any(name in text for name in names for text in (fault.name, fault.at))]
    if not chosen:
        raise typer.BadParameter(f"no fault with a home has one of {names} in its name or symbol")
    outcomes = []
    for made in all_located(chosen, dtype, Kept(keep)):
        outcomes.append(made)
        if made.word != NOT_RUN:
            print(f"{made.word:6}  {made.fault.name}: {made.said}", flush=True)
    print(located_page.closing(outcomes))
    if page:
        print(f"written: {located_page.write(outcomes, dtype, page)}")
    raise typer.Exit(int(not is_kept(outcomes)))


def is_kept(outcomes: Sequence[Located]) -> bool:
    """Whether what is promised holds. Of no fault that changes anything it does not: nothing was shown."""
    right, wrong = (sum(made.word == word for made in outcomes) for word in (RIGHT, WRONG))
    return right + wrong > 0 and right >= PROMISED * (right + wrong)


if __name__ == "__main__":
    typer.run(main)
