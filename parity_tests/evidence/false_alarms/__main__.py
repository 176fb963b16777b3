"""`python -m parity_tests.evidence.false_alarms`, or `make alarms`: judge examples of right schemes, write the page."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from parity_tests.evidence.false_alarms import page as pages
from parity_tests.evidence.false_alarms.run import all_counts, counts_of

EPILOG = """\b
Exit status:
    0  no false alarm
    1  at least one
    2  usage
"""
SHOWN_EVERY_S = 30.0


def main(
    examples: Annotated[int, typer.Option(min=1, help="Examples in all.")] = 100_000,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each with its part of the schemes.")] = 2,
    build: Annotated[Path, typer.Option(help="Where outcomes are remembered.")] = Path("build/false_alarms"),
    page: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
) -> None:
    """Judge so many drawn examples of the built-in schemes and print what was reported as wrong.

    A run that was stopped goes on where it stood, with as many processes; remove the folder of outcomes to begin anew,
    as after a change of the code.
    """
    build.mkdir(parents=True, exist_ok=True)
    journals = [build / f"share_{share}_of_{jobs}.jsonl" for share in range(jobs)]
    workers = {share: _worker(journals[share], share, jobs, examples) for share in range(jobs)}
    start, shown, judged = time.monotonic(), 0.0, dict.fromkeys(workers, -1)
    try:
        while workers:
            time.sleep(1.0)
            for share, worker in list(workers.items()):
                if worker.poll() is None:
                    continue
                total = sum(each.examples.total() for each in counts_of(journals[share]).values())
                if worker.returncode == 0:
                    del workers[share]
                elif total > judged[share]:  # after a case that never ended the process is of no more use
                    judged[share], workers[share] = total, _worker(journals[share], share, jobs, examples)
                else:
                    raise SystemExit(f"a process ended with {worker.returncode} twice at {journals[share]}")
            if time.monotonic() - shown > SHOWN_EVERY_S:
                shown = time.monotonic()
                print(f"{pages.closing(all_counts(journals))[0]} {shown - start:.0f} s", flush=True)
    finally:
        for worker in workers.values():
            worker.kill()
    counts = all_counts(journals)
    print("\n".join([*pages.closing(counts), "", pages.table(counts), *pages.sentences(counts)]))
    if page:
        pages.write(counts, page)
        print(f"written: {page}")
    raise typer.Exit(int(any(each.alarms for each in counts)))


def _worker(journal: Path, share: int, shares: int, examples: int) -> subprocess.Popen[bytes]:
    """The process of one share; examples that do not divide go to the first ones."""
    wanted = (examples // shares + (share < examples % shares)) * shares
    command = [
        sys.executable,
        "-m",
        "parity_tests.evidence.false_alarms.run",
        str(journal),
        *map(str, (share, shares, wanted)),
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
