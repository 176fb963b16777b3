"""`python -m parity_tests.evidence.located`: inject bugs into a training step; does a trace find their module?

Exit status: 0 if 90 of 100 that change anything are found in the right module; else, and where none does, 1.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug, patched_text
from parity_tests.evidence.injected_bugs.patched_modules import PatchedModules
from parity_tests.evidence.journal import Journal
from parity_tests.evidence.located import page as located_page
from parity_tests.evidence.located import reached
from parity_tests.evidence.located.page import EQUAL, FAILED, NOT_RUN, RIGHT, WRONG, Located
from parity_tests.evidence.page import write
from shardproof.engines.failure import RankFailure
from shardproof.judge import bridge
from shardproof.tracing.comparison import first
from shardproof.tracing.flax_side import ReferenceTrace
from shardproof.training.run import SIZES, Run
from shardproof.training.traced import trace_reference

PROMISED = 0.9
SMALL: dict[str, Any] = {
    "streams": 2,
    "length": 48,
    "sizes": {**SIZES, "layers": ("attention", "mamba", "attention")},
}
# Each bug is tried on these in turn until a trace differs.
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


def home_of(bug: InjectedBug) -> str | None:
    """Where a bug is located; None for one that says nothing of a module."""
    return COMPONENTS.get(bug.component) if bug.module is None else bug.module


def runs(dtype: str, **sizes: Any) -> list[Run]:
    """The runs that each bug is tried on."""
    return [Run.on(mesh, dtype=dtype, **{**SMALL, **sizes, **how}) for mesh, how in HOW]


def located(bug: InjectedBug, reference_trace: ReferenceTrace, tried: Sequence[Run] | None = None) -> Located:
    """Inject a bug and trace until something differs. A rank that fails is not located: its own words say where."""
    tried = runs("float64") if tried is None else tried
    home = home_of(bug) or ""
    injected = PatchedModules.of(bug, ["shardproof.training.traced"])
    with injected:
        for run in tried:
            mesh = " ".join(f"{axis}={size}" for axis, size in run.mesh.items())
            try:
                line = first(injected.modules[0].trace(run, reference_trace, "lockstep"))
            except RankFailure as failure:
                return Located(bug, home, FAILED, message=str(failure).splitlines()[0], mesh=mesh)
            if line is not None:
                word = RIGHT if fnmatch(line.home, home) else WRONG
                return Located(bug, home, word, line.home, line.name, mesh)
    return Located(bug, home, EQUAL if tried else NOT_RUN)


def key(bug: InjectedBug, dtype: str) -> str:
    """An answer holds for the text of the bug's file as it was. Errors: StaleBug."""
    patched = patched_text(bug)
    return sha256(f"{dtype} {patched.file} {patched.text}".encode()).hexdigest()


def all_located(bugs: Sequence[InjectedBug], dtype: str, journal: Journal) -> Iterator[Located]:
    """Every bug in turn, at once where the journal has an answer."""
    tried, reference_trace, ran = runs(dtype), None, None
    for bug in bugs:
        answer = journal.of(key(bug, dtype)).get("answer")
        if answer is None:
            reference_trace = reference_trace or trace_reference(Run(mesh={}, dtype=dtype, **SMALL))
            ran = ran or [reached.functions_run(run) for run in tried]
            reaching = [run for run, functions in zip(tried, ran, strict=True) if reached.is_reached(bug, functions)]
            outcome = located(bug, reference_trace, reaching)
            answer = {name: value for name, value in vars(outcome).items() if name != "bug"}
            journal.add({"key": key(bug, dtype), "name": bug.name, "answer": answer})
        yield Located(bug, **answer)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Only bugs with one of these in name or symbol.")] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
    keep: Annotated[Path | None, typer.Option(help="File of answers; a bug that it has is not tried again.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write located.md into this folder.")] = None,
    table: Annotated[Path | None, typer.Option(help="Write a line for each bug into this file, as Markdown.")] = None,
) -> None:
    """Inject every bug that has a home in a training step, and see where a trace finds it."""
    bridge.start()
    chosen = [bug for bug in CATALOGUE if home_of(bug) is not None and not bug.equivalent]
    if names:
        chosen = [bug for bug in chosen if any(name in text for name in names for text in (bug.name, bug.at))]
    if not chosen:
        raise typer.BadParameter(f"no bug with a home has one of {names} in its name or symbol")
    outcomes = []
    for outcome in all_located(chosen, dtype, Journal(keep)):
        outcomes.append(outcome)
        if outcome.word != NOT_RUN:
            print(f"{outcome.word:6}  {outcome.bug.name}: {outcome.message}", flush=True)
    print(located_page.closing(outcomes))
    if page:
        write(located_page.text(outcomes, dtype), page / "located.md")
    if table:
        write(located_page.one_by_one(outcomes), table)
    raise typer.Exit(int(not meets_promise(outcomes)))


def meets_promise(outcomes: Sequence[Located]) -> bool:
    """Whether the promise holds. It does not if no bug changed anything: then nothing was shown."""
    right, wrong = (sum(outcome.word == word for outcome in outcomes) for word in (RIGHT, WRONG))
    return right + wrong > 0 and right >= PROMISED * (right + wrong)


if __name__ == "__main__":
    typer.run(main)
