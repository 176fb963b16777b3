"""No rank outlives the torchrun agent that started it: a host whose agent is killed leaves nothing behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

from parity_tests.harness.run.exit_status import FAILED

LOOK_S = 0.5  # between two looks
_watching: list[threading.Thread] = []


def leave_with_agent() -> None:
    """From the first call on, end this process soon after its agent. Nothing where no agent started it."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not _watching:
        _watching.append(threading.Thread(target=_watch, args=(os.getppid(),), name="agent", daemon=True))
        _watching[0].start()


def _watch(agent: int) -> None:
    while os.getppid() == agent:
        time.sleep(LOOK_S)
    leave(f"the torchrun agent of this host (process {agent}) has ended, and its ranks with it")


def leave(why: str) -> NoReturn:
    """At once, whatever hangs in native code."""
    sys.stderr.write(f"shardproof: rank {os.environ.get('RANK', '?')}: {why}\n")
    sys.stderr.flush()
    os._exit(FAILED)
