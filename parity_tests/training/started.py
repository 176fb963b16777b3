"""Processes that a test started, however deep: they carry its mark in their environment."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path
from typing import NamedTuple

NAME = "SHARDPROOF_STARTED_BY"
LOOK_S = 0.02


class Process(NamedTuple):
    pid: int
    command: str


class Mark:
    """Put `environment` into a started process; `running` then finds it and all its descendants."""

    def __init__(self) -> None:
        self.value = uuid.uuid4().hex
        self.environment = {**os.environ, NAME: self.value}

    def running(self) -> list[Process]:
        """Those that are alive, and not merely waiting to be reaped."""
        marks = []
        for folder in Path("/proc").iterdir():
            try:
                if (
                    not folder.name.isdigit()
                    or f"{NAME}={self.value}".encode() not in (folder / "environ").read_bytes()
                ):
                    continue
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    marks.append(Process(int(folder.name), command))
            except OSError:  # it ended just now, or is another user's
                continue
        return marks

    def left_after(self, seconds: float) -> list[Process]:
        """Those that are still there so long from now; nothing is waited for once there is none."""
        deadline = time.monotonic() + seconds
        while (running := self.running()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return running

    def kill(self) -> None:
        """All of them."""
        for process in self.running():
            os.kill(process.pid, signal.SIGKILL)
