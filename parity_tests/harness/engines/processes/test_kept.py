"""A process that starts commands by a keeper, or ties processes to itself, leaves none behind when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parity_tests.evidence.workers import ROOT
from parity_tests.specimens.processes import is_running
from shardproof.engines.processes.orphans import kept

PYTHON = (sys.executable, "-S")  # which starts in a tenth of the time
LIMIT_S = 20.0

# A command, its child and its grandchild, in sessions of their own as torchrun's ranks are.
TREE = """
import os, subprocess, sys, time
file, *left = sys.argv[1:]
with open(file, "a") as numbers:
    print(os.getpid(), file=numbers)
if left and left[0] != "leaves":
    subprocess.Popen([sys.executable, "-S", __file__, file, *left[1:]], start_new_session=True)
while "leaves" not in left or len(open(file).readlines()) < 3:
    time.sleep(0.01)
sys.exit(3)
"""

# Starts processes as the programs of evidence do. `in_a_thread` starts one in a thread that ends before it.
STARTER = """
import os, subprocess, sys, threading, time
from parity_tests.evidence.workers import Workers
from shardproof.engines.processes.orphans import kept

def waits(command):
    for _ in range(3):
        print(os.getpid(), file=open(command[-3], "a"))
    time.sleep(600)

def in_process(command):
    with Workers(1).process(command) as process:
        process.wait()

def in_a_thread(command):
    thread = threading.Thread(target=lambda: subprocess.Popen(kept(command)))
    thread.start()
    thread.join()
    time.sleep(600)

def in_call(command):
    Workers(1).call(waits, command)

if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])
"""


def has_come(so_far: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not so_far() and time.monotonic() < deadline:
        time.sleep(0.01)
    return so_far()


class Tree:
    """A command that starts a child and a grandchild, and the ids of the processes that have begun."""

    def __init__(self, folder: Path, *last: str) -> None:
        self._ids, file = folder / "ids", folder / "tree.py"
        file.write_text(TREE)
        self._ids.touch()
        self.command = [*PYTHON, str(file), str(self._ids), "child", "grandchild", *last]

    def ids(self) -> list[int]:
        return [int(line) for line in self._ids.read_text().splitlines()]

    def is_up(self) -> bool:
        return has_come(lambda: len(self.ids()) == 3)

    def is_gone(self) -> bool:
        gone = has_come(lambda: not any(map(is_running, self.ids())))
        for pid in filter(is_running, self.ids()):
            os.kill(pid, signal.SIGKILL)
        return gone


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("how", ["in_process", "in_a_thread", "in_call"])
def test_the_starter_is_killed(tmp_path: Path, how: str, number: signal.Signals) -> None:
    tree, script = Tree(tmp_path), tmp_path / "starter.py"
    script.write_text(STARTER)
    path = os.pathsep.join([str(ROOT), str(ROOT / "parity_tests" / "import_name")])
    command, environment = [*PYTHON, str(script), how, *tree.command], os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(command, env=environment) as starter:
        is_up = tree.is_up()
        starter.send_signal(number)
    assert is_up and starter.returncode == -number and tree.is_gone()


def test_sigterm_ends_a_keeper_and_its_command(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    with subprocess.Popen(kept(tree.command)) as keeper:
        assert tree.is_up()
        keeper.terminate()
    assert keeper.returncode == -signal.SIGTERM and not any(map(is_running, tree.ids()))


def test_a_killed_keeper_takes_its_command(tmp_path: Path) -> None:
    """After a timeout `subprocess.run` kills only the command; its children then have another parent."""
    tree = Tree(tmp_path)
    with subprocess.Popen(kept(tree.command)) as keeper:
        assert tree.is_up()
        command, *others = tree.ids()
        keeper.kill()
    is_gone = has_come(lambda: not is_running(command))
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    assert is_gone


def test_a_command_leaves_nothing_behind(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "leaves")
    with subprocess.Popen(kept(tree.command)) as keeper:
        assert keeper.wait(LIMIT_S) == 3
    assert len(tree.ids()) == 3 and not any(map(is_running, tree.ids()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGINT, signal.SIGTERM])
def test_a_command_that_a_signal_ends(number: signal.Signals) -> None:
    command = [*PYTHON, "-c", f"import os, signal; signal.signal({number:d}, 0); os.kill(os.getpid(), {number:d})"]
    if number == signal.SIGKILL:
        command = [*PYTHON, "-c", f"import os; os.kill(os.getpid(), {number:d})"]
    assert subprocess.run(kept(command), timeout=LIMIT_S).returncode == -number


def test_a_command_under_torchrun_ends_with_its_agent_while_it_imports(tmp_path: Path) -> None:
    command, agent, ids = tmp_path / "command.py", tmp_path / "agent.py", tmp_path / "ids"
    imports = f"print(os.getpid(), file=open({str(ids)!r}, 'w')) or time.sleep(600)"
    path = str(ROOT / "parity_tests" / "import_name")
    command.write_text(
        f"import os, sys, time; sys.path.insert(0, {path!r})\n"
        f"from shardproof.engines.supervised import supervised; supervised(lambda: {imports})"
    )
    agent.write_text(f"import subprocess; subprocess.run({[*PYTHON, str(command)]!r}, start_new_session=True)")
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "job"}
    with subprocess.Popen(["nohup", *PYTHON, str(agent)], env=environment, stdout=subprocess.DEVNULL) as process:
        is_up = has_come(lambda: ids.exists() and ids.read_text().endswith("\n"))
        process.kill()
    rank = int(ids.read_text())
    is_gone = has_come(lambda: not is_running(rank))
    if not is_gone:
        os.kill(rank, signal.SIGKILL)
    assert is_up and is_gone


def test_a_command_gets_input_and_default_signals() -> None:
    program = "import sys; print(sys.stdin.read()); print(open('/proc/self/status').read())"

    def printed(command: list[str]) -> tuple[str, list[int]]:
        """The input, and the standard signals that are blocked, ignored and caught."""
        lines = subprocess.run(command, input="words", capture_output=True, text=True).stdout.splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
        return lines[0], [mask & 0x7FFFFFFF for mask in masks]

    direct = [*PYTHON, "-c", program]
    assert printed(kept(direct)) == printed(direct) and printed(direct)[0] == "words"
