"""The time from a save to its verdict under `shardproof verify FILE --watch`.

The file is the README's scheme, saved right and wrong in turn. The verdict of a wrong version is the line that names
the wrong tensor; its cause and its smallest case follow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.pages import blocks
from parity_tests.specimens.documented_console import replaced

SAVES = 100
LIMIT_S = 0.7
PAUSE_S = 1.5  # before a save, in which the command prepares for the next failure
ENDS = "Ctrl-C ends"  # stands in the last line before the next save
VERDICTS = {"right": "1 scheme, 0 mismatches", "wrong": ": mismatch in "}


def figures(saves: int = SAVES) -> Iterator[Figure]:
    """The seconds from a save to the verdict, of right and of wrong versions.

    Errors: RuntimeError for a version with another verdict than its own.
    """
    for kind, seconds in _seconds(saves).items():
        first, whole = (sorted(each)[len(each) // 2] for each in zip(*seconds, strict=True))
        verdicts = spread([verdict for verdict, _ in seconds], " s")
        yield Figure(
            f"from a save to the verdict of a {kind} version",
            f"<= {LIMIT_S:g} s",
            verdicts,
            first <= LIMIT_S,
            f"wall-clock time, {len(seconds)} of {saves} saves of the README's scheme, right and wrong in turn; "
            f"the whole report after {whole:.3g} s",
        )


def _seconds(saves: int) -> dict[str, list[tuple[float, float]]]:
    """For each kind of version, the seconds from each save to its verdict and to the end of its report."""
    source = next(block.text for block in blocks("README.md") if block.language == "python")
    (difference,) = (block.text for block in blocks("README.md") if block.language == "diff")
    texts = {"right": source, "wrong": replaced(source, difference)}
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in texts}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save(folder, source)
        command = [sys.executable, "-m", "shardproof", "verify", "my_logprob.py", "--watch"]
        with subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            try:
                assert process.stdout is not None
                _times(process.stdout, VERDICTS["right"])
                for number in range(saves):
                    kind = list(texts)[number % 2]
                    time.sleep(PAUSE_S)
                    start = time.perf_counter()
                    _save(folder, texts[kind])
                    verdict, report = _times(process.stdout, VERDICTS[kind])
                    seconds[kind].append((verdict - start, report - start))
            finally:
                os.killpg(process.pid, signal.SIGTERM)  # a job in the background hears no SIGINT
    return seconds


def _save(folder: Path, text: str) -> None:
    """Write a file beside and rename it, as most editors do."""
    beside = folder / ".my_logprob.py.new"
    beside.write_text(text)
    beside.replace(folder / "my_logprob.py")


def _times(output: IO[str], verdict: str) -> tuple[float, float]:
    """When the verdict is printed, and when the report ends."""
    lines, at = [], None
    while not lines or ENDS not in lines[-1]:
        lines.append(output.readline())
        if not lines[-1]:
            raise RuntimeError(f"benchmarks: the watch has ended:\n{''.join(lines)}")
        if at is None and verdict in lines[-1]:
            at = time.perf_counter()
    if at is None:
        raise RuntimeError(f"benchmarks: there is no {verdict!r} in the verdict:\n{''.join(lines)}")
    return at, time.perf_counter()
