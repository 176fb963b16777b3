"""No rank outlives the parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parity_tests.slow import slow_but
from parity_tests.specimens.processes import is_running

GONE_S = 0.5
START_S = 120.0
LOADED = 2.0  # how much slower a machine may be that runs other work beside these tests

# A user's script: no main guard, functions in __main__.
SCRIPT = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal; & ignores it
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    import torch, torch.distributed as dist
    from pathlib import Path
    from shardproof.declare.case import CaseSpec
    from shardproof.engines.processes import pool

    what, marker = sys.argv[1:]
    case = CaseSpec("orphans", {"tp": 2})

    def healthy(mesh, case):
        dist.all_reduce(torch.ones(3), group=mesh["tp"])

    def in_a_collective(mesh, case):
        if mesh.rank("tp") == 0:
            Path(marker).touch()
            dist.all_reduce(torch.ones(3), group=mesh["tp"])
        time.sleep(60)

    def with_a_child(mesh, case):
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        with open(marker, "a") as file:
            file.write(f"{pid} ")
        dist.all_reduce(torch.ones(3), group=mesh["tp"])
        return pid

    def with_a_session(mesh, case):
        code = "import os, time; os.write(1, b'1'); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.read(1)
        with open(marker, "a") as file:
            file.write(f"{child.pid} ")
        dist.all_reduce(torch.ones(3), group=mesh["tp"])

    def in_a_loop(mesh, case):
        Path(marker).touch()
        while True:
            pass

    pool.run(healthy, case)
    print(*pool.pids(), pool._server.folder, flush=True)
    if what == "leaves":
        sys.exit(0)
    if what in ("with_a_child", "with_a_session"):
        pool.run(locals()[what], case)
        time.sleep(60)
    if what == "beside_a_fork" and os.fork() == 0:
        time.sleep(2)
        os._exit(0)
    if what in ("suspended", "without_a_server"):
        ranks = pool._pools[2, "gloo"].pids
        while not all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T" for pid in ranks):
            time.sleep(0.01)
    if what == "without_a_server":
        os.kill(pool._server.pid, signal.SIGKILL)
    if what in ("idle", "beside_a_fork", "suspended", "without_a_server"):
        Path(marker).touch()
        time.sleep(60)
    pool.run(locals()[what], case, quiet_s=60)
"""


@pytest.mark.slow
def test_script_is_run_once_and_by_no_other_process(start: Callable[..., Parent]) -> None:
    parent = start("leaves")
    assert parent.process.wait(30) == 0
    assert parent.process.stdout.read() == ""  # a rank that imported the script would have printed, too
    parent.assert_nothing_left()


@pytest.mark.parametrize(
    "what", slow_but(["in_a_collective"], ["idle", "suspended", "in_a_collective", "in_a_loop", "beside_a_fork"])
)
def test_parent_is_killed(start: Callable[..., Parent], what: str) -> None:
    parent = start(what)
    parent.process.kill()
    parent.assert_nothing_left()


@pytest.mark.slow
def test_suspended_ranks_end_with_their_server(start: Callable[..., Parent]) -> None:
    """The kernel resumes stopped processes and hangs up on them once their parent, in its own session, has ended."""
    parent = start("without_a_server", alive=False)
    deadline = time.monotonic() + GONE_S * LOADED
    while any(map(is_running, parent.pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in parent.pids if is_running(pid)] == []


@pytest.mark.slow
@pytest.mark.parametrize("what", ["with_a_child", "with_a_session"])
def test_a_ranks_processes_end_with_it(start: Callable[..., Parent], what: str) -> None:
    parent = start(what)
    while len(children := parent.marker.read_text().split()) < 2:
        time.sleep(0.01)
    assert all(is_running(int(pid)) for pid in children)
    parent.process.kill()
    parent.pids += map(int, children)
    parent.assert_nothing_left()


STARTING = """
    import os, signal
    from shardproof.engines.processes import forks

    def killed(server, key, seconds):
        print(server.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    forks.ForkServer._await = killed
    forks.server()
"""


def test_a_server_whose_parent_is_killed_while_it_starts_ends_with_it() -> None:
    command = [sys.executable, "-c", textwrap.dedent(STARTING)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        server = int(process.stdout.readline())  # not to the end of the pipe, which the server inherits
        deadline = time.monotonic() + GONE_S * LOADED
        while is_running(server) and time.monotonic() < deadline:
            time.sleep(0.01)
        runs = is_running(server)
        if runs:
            os.kill(server, signal.SIGKILL)
    assert not runs


AHEAD = """
    from shardproof.engines.processes import forks

    forks.start_ahead()
    print(forks._ahead.pid, flush=True)
"""


def test_a_server_that_no_pool_takes_ends_with_the_process() -> None:
    command = [sys.executable, "-c", textwrap.dedent(AHEAD)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        server = int(process.stdout.readline())
    assert process.returncode == 0
    deadline = time.monotonic() + GONE_S * LOADED
    while (runs := is_running(server)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if runs:
        os.kill(server, signal.SIGKILL)
    assert not runs


@pytest.mark.slow
def test_parent_is_interrupted(start: Callable[..., Parent]) -> None:
    parent = start("in_a_loop")
    parent.process.send_signal(signal.SIGINT)
    assert parent.process.wait(30) == -signal.SIGINT
    parent.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_parent_that_fails_is_not_waited_for(start: Callable[..., Parent]) -> None:
    with pytest.raises(AssertionError):
        start("no_such_body")


class Parent:
    """A process that has a pool, and the pids in it."""

    def __init__(self, process: subprocess.Popen[str], marker: Path) -> None:
        self.process, self.marker = process, marker
        *pids, self.folder = process.stdout.readline().split()
        self.pids = [int(pid) for pid in pids]

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + GONE_S * LOADED
        while any(map(is_running, self.pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [pid for pid in self.pids if is_running(pid)] == []
        assert not Path(self.folder).exists()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Parent]]:
    script = tmp_path / "scheme_without_guard.py"
    script.write_text(textwrap.dedent(SCRIPT))
    parents: list[Parent] = []

    def started(what: str, alive: bool = True) -> Parent:
        marker = tmp_path / "under_way"
        command = [sys.executable, str(script), what, str(marker)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        parents.append(Parent(process, marker))
        if what != "leaves":
            deadline = time.monotonic() + START_S
            while not marker.exists():
                assert process.poll() is None, f"{what}: the parent has ended with status {process.returncode}"
                assert time.monotonic() < deadline, f"{what}: the parent has not come so far in {START_S} s"
                time.sleep(0.01)
            assert not alive or all(map(is_running, parents[-1].pids))
        return parents[-1]

    yield started
    for parent in parents:
        parent.process.kill()
        parent.process.communicate()


def test_this_process_runs() -> None:
    assert is_running(os.getpid())
