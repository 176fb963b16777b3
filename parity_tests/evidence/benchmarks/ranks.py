"""Run the ranks of a benchmark as processes, which start together and end with their answers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parity_tests.evidence.workers import Workers


def run_ranks(
    command: Sequence[str], world: int, folder: Path, *arguments: str, topic: str, seconds: float
) -> list[dict[str, Any]]:
    """Run `command RANK *further FOLDER` on each rank; returns the content of each rank's `found_RANK.json`.

    Errors: RuntimeError as soon as a rank fails, or if the ranks take longer than `seconds`.
    """
    workers = Workers(world)

    def answer(rank: int) -> dict[str, Any]:
        with workers.process([*command, str(rank), *arguments, str(folder)]) as process:
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"benchmarks: {topic} took longer than {seconds:g} s") from None
        if status:
            raise RuntimeError(f"benchmarks: rank {rank} of {topic} ended with status {status}")
        return json.loads((folder / f"found_{rank}.json").read_text())

    return workers.each(answer, range(world))
