"""A rank's traces tell other processes how its process ended, its last call, and its line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from parity_tests import warm_python
from shardproof.engines.ledger import LedgerRow
from shardproof.engines.processes import traces
from shardproof.engines.processes.root_cause import DIED, RUNNING
from shardproof.engines.processes.status_table import StatusTable
from shardproof.engines.processes.traces import Traces

ROW = LedgerRow(1, 0, "all_reduce", (0, 1), "tp", ("float32",), ((3,),), 12, 12, "SUM", source="model.py:7")
RANK = """
import ctypes, os, signal, sys, time
from shardproof.engines.processes.status_table import COMPUTING, StatusTable
from shardproof.engines.processes.traces import Traces
from parity_tests.harness.engines.processes.test_traces import ROW
traces = Traces(sys.argv[1], 1)
stacks = traces.begin()
slot = StatusTable(sys.argv[1] + "/status", 2).slot(1)
slot.issue(ROW)
slot.enter(COMPUTING)
"""

ENDS = {
    "ctypes.string_at(0)": "was killed by SIGSEGV",
    "os.abort()": "was killed by SIGABRT",
    "os._exit(0)": "left by os._exit(0)",
    "os.kill(os.getpid(), signal.SIGKILL)": "ended without a word",
}


@pytest.mark.parametrize(("code", "how"), ENDS.items())
def test_a_rank_that_died(tmp_path: Path, code: str, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK + code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = warm_python.run(str(script), str(tmp_path), environment=environment, imported=warm_python.TORCH)
    assert done.stderr == ""
    traces = Traces(tmp_path, 1)
    assert traces.pid is not None and not traces.is_running
    dead = traces.dead(StatusTable(tmp_path / "status", 2))
    line = len(RANK.splitlines()) + 1
    at = "" if "SIGKILL" in code else f" at train.py:{line}"
    assert (dead.kind, dead.rows) == (DIED, (ROW,))
    last = "all_reduce float32[3] SUM (group tp, #0) at model.py:7"
    assert str(dead) == f"rank 1 {how}{at}; it was last seen so: computes; its last was {last}"


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    StatusTable(tmp_path / "status", 2).slot(1).issue(ROW)
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        silent = Traces(tmp_path, 1, process.pid).silent(StatusTable(tmp_path / "status", 2))
        process.kill()
    assert silent.kind == RUNNING and silent.rows == (ROW,)
    assert str(silent).startswith("rank 1 is stopped by a signal; it waits in all_reduce float32[3] SUM (group tp, #0)")


def test_a_rank_that_has_left_by_itself_did_not_die(tmp_path: Path) -> None:
    (tmp_path / "process_1").write_text(str(os.getpid()))
    assert Traces(tmp_path, 1).is_running
    Traces(tmp_path, 1).leave()
    assert Traces(tmp_path, 1).pid is None


def test_the_next_job_removes_the_folder_of_a_dead_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as agent:
        agent.wait()
    running, left = Path(traces.folder_of_job(os.getpid())), Path(traces.folder_of_job(agent.pid))
    (left / "status").write_text("a")
    another = tmp_path / left.name.replace(traces.PREFIX, f"{traces.PREFIX}of_another_host_")
    another.mkdir()
    now = Path(traces.folder_of_job(os.getpid()))
    assert sorted(tmp_path.iterdir()) == sorted([running, another, now])
