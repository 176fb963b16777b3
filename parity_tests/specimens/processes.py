"""Whether a process is still there, for tests that nothing is left behind."""

import os
from pathlib import Path


def is_there(pid: int) -> bool:
    """Whether the process exists, even as a zombie that nobody waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_running(pid: int) -> bool:
    """Whether the process runs; False for a zombie, which only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
