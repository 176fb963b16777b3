"""The ranks of a benchmark, each a process: started together, and none outlives its answer."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LOOK = 0.02  # seconds between two looks at the ranks


def found_by(
    command: Sequence[str], world: int, folder: Path, *arguments: str, topic: str, seconds: float
) -> list[dict[str, Any]]:
    """What each rank writes to `found_RANK.json` of the folder, run as `command RANK *further FOLDER`.

    Errors: RuntimeError as soon as a rank fails, or when they take longer than so many seconds.
    """
    commands = [[*command, str(rank), *arguments, str(folder)] for rank in range(world)]
    with started(commands) as ranks:
        end = time.monotonic() + seconds
        while _go_on(topic, [rank.poll() for rank in ranks]):
            if time.monotonic() > end:
                raise RuntimeError(f"benchmarks: {topic} took longer than {seconds:g} s")
            time.sleep(LOOK)
    return [json.loads((folder / f"found_{rank}.json").read_text()) for rank in range(world)]


@contextmanager
def started(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of these commands, ended when the block is left, whatever it is left by."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, cwd=ROOT))
        yield running
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def _go_on(topic: str, statuses: Sequence[int | None]) -> bool:
    """Whether any is at work still. Errors: RuntimeError for one that failed."""
    for rank, status in enumerate(statuses):
        if status:
            raise RuntimeError(f"benchmarks: rank {rank} of {topic} ended with status {status}")
    return None in statuses
