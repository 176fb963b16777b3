"""The cells of the matrix: a kind of failure on an engine, in a process that may die of it.

`python -m parity_tests.evidence.failures.cells ENGINE RANKS OUTPUT KIND ...` appends two lines of JSON for each kind:
one when the kind begins, and its cell. A kind that ends the process has only the first line.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from parity_tests.evidence.failures import async_kinds, group_kinds, kinds, process_kinds
from parity_tests.evidence.failures.commands import BEGUN, COMMANDS
from shardproof.declare.case import CaseSpec
from shardproof.endings import exits
from shardproof.endings.exit_status import EQUAL, RANK_FAILED
from shardproof.endings.signals import signal_name
from shardproof.engines.failure import NotRun, RankFailure
from shardproof.engines.processes import orphans
from shardproof.engines.supervised import supervised

ENGINES = ("gloo", "lockstep", "torchrun")
WORLDS = (2, 4)
QUIET_S = 1.5
LIMIT_S = 300.0  # for a process to answer
RETURNED = (
    "returns_none",
    "returns_another_structure",
    "returns_nan",
    "writes_its_input",
    "returns_another_shape",
    "returns_another_dtype",
    "returns_a_sparse_tensor",
    "returns_a_meta_tensor",
    "returns_complex_numbers",
    "returns_complex_numbers_for_integers",
    "returns_a_freed_tensor",
    "returns_a_replicated_dtensor",
    "returns_a_partial_dtensor",
    "reads_before_the_wait",
    "reads_what_it_never_waits_for",
    "changes_its_input_before_the_wait",
    "changes_its_result_on_one_rank",
)
OUTSIDE = ("reference_exits", "reference_leaves_by_os_exit", "reference_changes", "draw_exits", "assume_exits")
# Last, each in a process of its own.
HANGING = (
    "polls_for_ever",
    "all_poll_for_ever",
    "waits_for_a_lock_for_ever",
    "loops",
    "sleeps",
    "hangs_in_c",
    "holds_the_interpreter",
    "is_stopped",
)
CAUSES = ("died: ", "stalled: ", "raised: ", "collective mismatch: ")  # with which a sentence begins
UNJUDGED = ("two_helpers_of_one_name", "reference_is_nan_in_every_case")  # may say why they have no verdict
REASON = re.compile(r"^(shardproof|not judged): \S", re.MULTILINE)  # why a command has no verdict
OPERATION = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|send|recv|barrier|new_group)\b")


@dataclass(frozen=True)
class Cell:
    """The outcome of a kind on an engine: the cause, as `died`, or `done`; the sentence; seconds until then."""

    kind: str
    cause: str
    sentence: str
    seconds: float

    @property
    def lacks(self) -> list[str]:
        """The parts that a failure's sentence lacks. A wrong return value needs its rank, a reference its line."""
        if self.kind in COMMANDS:
            is_told = self.cause == "mismatch" or f"{self.cause}: " in CAUSES
            if self.kind in UNJUDGED and self.cause == "not judged":
                is_told = REASON.search(self.sentence) is not None
            return [] if is_told else ["verdict"]
        patterns = {
            "rank": re.compile(r"\branks? \d"),
            "operation": OPERATION,
            "line": re.compile(r"\w\.py(:|\", line )\d"),
        }
        needed = tuple(patterns)
        if self.kind in RETURNED:
            needed = ("rank",)
        elif self.kind in OUTSIDE:
            needed = ("line",)
        needed = needed if self.cause != "done" else ()
        return [name for name in needed if not patterns[name].search(self.sentence)]


def groups() -> dict[str, dict[str, Callable[..., Any] | None]]:
    """Every kind with its function, by group, in the page's order. Functions of schemes load JAX: looked up later."""
    return {
        "Ranks and their collectives": _functions(kinds),
        "Asynchronous calls": _functions(async_kinds),
        "Groups, dtypes and messages": _functions(group_kinds),
        "Processes, threads and children": _functions(process_kinds),
        "Results": dict.fromkeys(RETURNED),
        "References, draws and conditions": dict.fromkeys(OUTSIDE),
        "Whole commands": dict.fromkeys(COMMANDS),
    }


def _functions(module: ModuleType) -> dict[str, Callable[..., Any] | None]:
    return {
        name: each
        for name, each in vars(module).items()
        if inspect.isfunction(each) and each.__module__ == module.__name__
    }


def bodies() -> dict[str, Callable[..., Any] | None]:
    """Every kind with its function."""
    return {name: body for group in groups().values() for name, body in group.items()}


def cells(engine: str, world: int, names: Sequence[str]) -> list[Cell]:
    """The cell of each kind. Where a kind ends the process, another one runs the next kinds."""
    rest = sorted((name for name in names if name not in COMMANDS), key=lambda name: name in HANGING)
    by_kind = {name: _command_cell(engine, world, name) for name in names if name in COMMANDS}
    while rest:
        with tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder) / "cells", Path(folder) / "errors"
            output.touch()
            started = time.monotonic()
            # A rank that hangs may die later, and the next kind would be blamed for it.
            some = rest[:1] if rest[0] in HANGING else [name for name in rest if name not in HANGING]
            status = _status([*_command(engine, world), engine, str(world), str(output), *some], errors)
            lines = [json.loads(line) for line in output.read_text().splitlines()]
            answered = [Cell(**line) for line in lines if "sentence" in line]
            begun, at = next(((line["begun"], line["at"]) for line in lines[-1:] if "begun" in line), (None, started))
            if begun or not answered:
                words = _last_words(status, errors)
                cause = words.partition(": ")[0] if words.startswith(CAUSES) else "ended"
                answered.append(Cell(begun or rest[0], cause, words, time.monotonic() - at))
        by_kind |= {cell.kind: cell for cell in answered}
        rest = [name for name in rest if name not in by_kind]
    return [by_kind[name] for name in names]


def _command_cell(engine: str, world: int, name: str) -> Cell:
    """The cell of a kind that is a command. Its seconds count from the import of the file to the end of the command."""
    kind = COMMANDS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for file, text in kind.files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text)
        command = [*_command(engine, world, "shardproof"), "verify", *kind.targets, "--examples", "1"]
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        environment = {**os.environ, **kind.environment, "PYTHONPATH": path}
        output = folder / "output"
        command += ["--engine", engine, "--mesh", f"tp={world}"]
        with output.open("w") as printed:
            status = _status(command, folder / "errors", stdout=printed.fileno(), cwd=folder, env=environment)
        ended, begun = time.monotonic(), (folder / BEGUN).read_text().splitlines()
        text = "".join(file.read_text(errors="replace") for file in (output, folder / "errors")).strip()
    # The status alone does not tell: torchrun makes 1 of all but 0.
    found = next((cause.removesuffix(": ") for cause in CAUSES if cause in text), "not judged")
    cause = "done" if status == EQUAL else "mismatch" if "MISMATCH" in text else found
    return Cell(name, cause if status is not None and status >= 0 else "ended", text, ended - float(begun[0]))


def _status(command: Sequence[str], errors: Path, stdout: int = subprocess.DEVNULL, **how: Any) -> int | None:
    """Run a command with its errors in a file. Returns its exit status, or None if it was ended for taking too long."""
    kept = orphans.kept(command)
    with errors.open("w") as stderr, subprocess.Popen(kept, stdout=stdout, stderr=stderr, **how) as process:
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            return None


def _command(engine: str, world: int, name: str = "parity_tests.evidence.failures.cells") -> list[str]:
    module = ["-m", name]
    if engine != "torchrun":
        return [sys.executable, *module]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *module]


def _last_words(status: int | None, errors: Path) -> str:
    """The last words of a job that ended before it could answer: our sentence, or how the process ended."""
    text = errors.read_text(errors="replace")
    # An earlier kind of the same process may have printed half a line before.
    ours = [sentence.rstrip() for sentence in re.findall(r"shardproof: (.*\n(?:  .*\n)*)", text)]
    if status is None:
        return "\n".join([*ours, f"the process of the command was ended after {LIMIT_S:g} s without an answer"])
    how = f"was killed by {signal_name(-status)}" if status < 0 else f"left with exit code {status}"
    ours.sort(key=lambda sentence: not sentence.startswith(CAUSES))
    return "\n".join(ours) or f"the process of the command {how}"


def _answer(engine: str, world: int, name: str) -> Cell:
    """Run one kind here. Errors: NotRun where an earlier one left a rank that hangs."""
    case = CaseSpec("failures", {"tp": world}, engine=engine)
    started = time.monotonic()
    body = bodies()[name]
    if body is None:
        cause, sentence = _verdict(engine, world, name)
        return Cell(name, cause, sentence, time.monotonic() - started)
    from shardproof.engines.engines import run
    from shardproof.judge import side_checks

    try:
        ranks = run(body, case, engine, quiet_s=QUIET_S)
    except RankFailure as failure:
        return Cell(name, failure.cause, str(failure), time.monotonic() - started)
    findings = side_checks.protocol(ranks.ledger)
    cause, sentence = ("protocol", findings[0]) if findings else ("done", "nothing failed")
    return Cell(name, cause, sentence, time.monotonic() - started)


def _verdict(engine: str, world: int, name: str) -> tuple[str, str]:
    """The verdict on a wrong scheme, and the first thing that the report names, or why there is no report."""
    from parity_tests.evidence.failures import outside, returned
    from shardproof.draw.choosers import seeded_chooser
    from shardproof.draw.drawing import draw_case
    from shardproof.report.guard import sentence_of
    from shardproof.verify_one_case import verify_case

    declared = getattr(outside if name in OUTSIDE else returned, name)
    try:
        case = draw_case(declared, seeded_chooser(0), {"tp": world}, seed=0, engine=engine)
        report = verify_case(declared, case, quiet_s=QUIET_S)
    except NotRun:
        raise  # says nothing about this kind
    except (Exception, SystemExit) as error:
        return "not judged", sentence_of(error)[1]
    if report.failure is not None:
        return report.failure.cause, str(report.failure)
    wrong = [
        f"{tensor.label} differs at {tensor.where}: {report.notes[tensor.label][0]}"
        for tensor in report.tensors
        if not tensor.ok
    ]
    if report.ok:
        return "done", "nothing failed"
    return report.verdict, "\n".join([*wrong, *report.protocol, *report.hygiene])


def _start(engine: str, world: int) -> None:
    """Run a function that does nothing: the seconds of a kind are counted on ranks that have imported torch."""
    from shardproof.engines.engines import run

    run(lambda mesh, case: None, CaseSpec("failures", {"tp": world}, engine=engine), engine)


def _append(file: IO[str], line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def main(engine: str, world: str, output: str, *names: str) -> int:
    """Append the cells to the file `output`, one by one."""
    if engine == "torchrun":
        from shardproof.engines.processes import launch

        if not launch.is_rank_zero():
            return launch.serve()
    _start(engine, int(world))
    with open(output, "a") as file:
        for name in names:
            _append(file, {"begun": name, "at": time.monotonic()})  # a clock that all processes share
            try:
                cell = _answer(engine, int(world), name)
            except NotRun:
                _append(file, {"begun": None, "at": 0.0})
                break
            _append(file, asdict(cell))
    sys.stdout.flush()
    if engine == "torchrun":
        from shardproof.engines.processes import launch

        launch.finish(0)
        exits.leave(RANK_FAILED)
    return EQUAL


if __name__ == "__main__":
    sys.exit(supervised(partial(main, *sys.argv[1:])))
