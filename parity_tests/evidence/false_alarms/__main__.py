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
from parity_tests.evidence.page import bullets, joined, write
from parity_tests.evidence.workers import Workers

EPILOG = """\b
Exit status:
    0  no false alarm
    1  at least one
    2  usage
"""


def main(
    examples: Annotated[int, typer.Option(min=1, help="Examples in all.")] = 100_000,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each with its part of the schemes.")] = 2,
    build: Annotated[Path, typer.Option(help="Where outcomes are remembered.")] = Path("build/false_alarms"),
    page: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
) -> None:
    """Judge so many drawn examples of the built-in schemes and print every error that was reported.

    A run that was stopped goes on where it stood, with as many processes; remove the folder of outcomes to begin anew,
    as after a change of the code.
    """
    journals = [build.resolve() / f"share_{share}_of_{jobs}.jsonl" for share in range(jobs)]
    workers, start = Workers(jobs), time.monotonic()

    def judge(share: int) -> None:
        judged, journal = -1, journals[share]
        wanted = (examples // jobs + (share < examples % jobs)) * jobs  # those that do not divide go to the first ones
        command = [sys.executable, "-m", "parity_tests.evidence.false_alarms.run", str(journal)]
        while True:
            with workers.process([*command, *map(str, (share, jobs, wanted))], stdout=subprocess.DEVNULL) as process:
                status = process.wait()
            before, judged = judged, sum(each.examples.total() for each in counts_of(journal).values())
            if status == 0:
                return
            if judged == before:  # else it met a case that never ended, and is of no more use
                raise SystemExit(f"a process ended with {status} twice at {journal}")

    def show() -> None:
        print(f"{pages.closing(all_counts(journals))[0]} {time.monotonic() - start:.0f} s", flush=True)

    workers.each(judge, range(jobs), show)
    counts = all_counts(journals)
    print(joined(bullets(pages.closing(counts)), pages.table(counts), bullets(pages.sentences(counts))))
    if page:
        write(pages.text(counts), page)
    raise typer.Exit(int(any(each.alarms for each in counts)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
