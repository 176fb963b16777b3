"""`python -m parity_tests.evidence.peers`, or `make peers`: judge other projects' functions, write docs/findings.md.

Each verdict is compared with the expected one; the exit status is 1 if any differs. The verdicts of each file are
kept in build/peers.jsonl, from which the page is written. A file has no verdict where its project or engine is missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from parity_tests.evidence.journal import Journal
from parity_tests.evidence.page import write
from parity_tests.evidence.peers.findings import FINDINGS, PROJECTS, Finding
from parity_tests.evidence.peers.outcome import FOLDER, Outcome, key
from shardproof.engines.processes import orphans

ROOT = FOLDER.parents[2]
ENGINES = ("lockstep", "gloo")
CHATTER = ("[WARNING]", "built successfully")  # lines that libraries print unasked
JOURNAL = ROOT / "build" / "peers.jsonl"
TIMEOUT_S = 1800  # for one file on one engine


def main(
    only: Annotated[str | None, typer.Option(help=f"One project: {', '.join(PROJECTS)}.")] = None,
    engine: Annotated[str | None, typer.Option(help=f"One engine: {', '.join(ENGINES)}.")] = None,
    examples: Annotated[int, typer.Option(help="Drawn examples of each scheme.")] = 8,
    page: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("docs/findings.md"),
) -> None:
    """Judge the schemes, run the plain scripts of the findings, and write the page."""
    from parity_tests.evidence.peers.page import text

    if only is not None and only not in PROJECTS:
        raise typer.BadParameter(f"--only {only!r} is not one of {', '.join(PROJECTS)}")
    if engine is not None and engine not in ENGINES:
        raise typer.BadParameter(f"--engine {engine!r} is not one of {', '.join(ENGINES)}")
    versions = {folder: version(folder) for folder in PROJECTS if only in (None, folder)}
    outcomes: list[Outcome] = []
    for folder, outcome_set in versions.items():
        if outcome_set is None:
            print(f"{PROJECTS[folder]} is not installed: its schemes are left out")
            continue
        for name in (engine,) if engine else ENGINES:
            for file in files(folder):
                outcomes += judge_file(file, name, examples)
    kept = {(file, name): read(file, name) for name in ENGINES for file in files()}
    if missing := {file.parent.name for (file, _), of_file in kept.items() if of_file is None}:
        print(f"the page is not written: no verdicts of {', '.join(sorted(missing))} on {' and '.join(ENGINES)}")
    else:
        scripts = {finding.script: run_script(finding) for finding in FINDINGS}
        every = [each for of_file in kept.values() for each in of_file or ()]
        write(text(every, {folder: version(folder) or "" for folder in PROJECTS}, scripts), page)
    unexpected = [each for each in outcomes if not each.is_expected]
    print(
        f"{len(outcomes)} verdicts, {len(unexpected)} of them unexpected; {dict(Counter(e.verdict for e in outcomes))}"
    )
    raise typer.Exit(1 if unexpected else 0)


def files(*folders: str) -> list[Path]:
    """The files of schemes of these projects, or of all."""
    paths = [path for folder in folders or PROJECTS for path in sorted((FOLDER / folder).glob("*.py"))]
    return [path for path in paths if "scheme(" in path.read_text() and not path.name.startswith("test_")]


def read(file: Path, engine: str) -> list[Outcome] | None:
    """The outcomes that the journal has of a file; None before they are judged."""
    rows = Journal(JOURNAL).of(key(file, engine)).get("outcomes")
    return None if rows is None else [Outcome(**{**row, "wrong": tuple(row["wrong"])}) for row in rows]


def version(folder: str) -> str | None:
    """The installed version of a folder's project, or None."""
    try:
        return importlib.metadata.version(PROJECTS[folder])
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_file(file: Path, engine: str, examples: int) -> list[Outcome]:
    """The outcomes of one file in a process of its own, printed as they come."""
    start = time.perf_counter()
    Journal(JOURNAL).add({"key": key(file, engine), "outcomes": None})
    program = [sys.executable, "-m", "parity_tests.evidence.peers.outcome"]
    command = [*program, str(file), engine, str(examples), str(JOURNAL)]
    done = subprocess.run(
        orphans.kept(command), cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    outcomes = read(file, engine)
    if outcomes is None:
        raise SystemExit(f"{file}: no verdicts\n{done.stderr[-2000:]}")
    counts = dict(Counter(each.verdict.partition(":")[0] for each in outcomes))
    print(f"{file.parent.name}/{file.stem} on {engine}: {counts}, {time.perf_counter() - start:.0f} s", flush=True)
    for each in outcomes:
        if not each.is_expected:
            print(f"    {each.name}: {each.verdict}, expected {each.expected_verdict}   {each.smallest}", flush=True)
    return outcomes


def run_script(finding: Finding) -> str:
    """The output of a finding's plain script on processes of its own, with its lines sorted where ranks race."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(finding.ranks)]
    script = FOLDER / "scripts" / f"{finding.script}.py"
    done = subprocess.run(
        orphans.kept([*command, str(script)]), env=_environment(), capture_output=True, text=True, timeout=300
    )
    printed_lines = [line for line in done.stdout.splitlines() if line]  # ranks that write at once leave empty ones
    lines = [line for line in printed_lines if not any(word in line for word in CHATTER)]
    print(f"{finding.script}: {len(lines)} lines", flush=True)
    return "\n".join(sorted(lines) if any(line.startswith("rank ") for line in lines) else lines)


def _environment() -> dict[str, str]:
    """One thread a rank, this tree's packages first, and no progress bars."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "parity_tests" / "import_name"), os.environ.get("PYTHONPATH", "")])
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    return os.environ | quiet | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


if __name__ == "__main__":
    typer.run(main)
