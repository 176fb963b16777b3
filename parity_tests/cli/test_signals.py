"""A signal at any moment, to any process of a command: no process is left, and no status claims what was not judged."""

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parity_tests.specimens.user_files import RIGHT, WRONG, written

SIGNALS = ("INT", "TERM", "HUP", "QUIT", "KILL", "SEGV", "ABRT", "BUS", "ALRM", "USR1", "PIPE", "STOP")
LIMIT_S, GONE_S = 240.0, 10.0
MAIN = """
import signal, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # tests in the background inherit that they are ignored
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
"""
VERIFY = f"{MAIN}from shardproof import main\nmain()\n"
VERDICT = "2 schemes, 1 mismatch, 0 not run."
# A command that imports and judges nothing: it starts a process, and then it has found a mismatch.
SMALL = f"""{MAIN}
def call():
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], stderr=subprocess.DEVNULL)
    time.sleep(0.2)
    print({VERDICT!r}, flush=True)
    return 1
try:
    import subprocess, time
    from shardproof.engines.supervised import supervised
    sys.exit(supervised(call))
except KeyboardInterrupt:  # before the command takes care of it
    sys.exit(130)
"""


def started(arguments, marker=""):
    """A command, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "MARKER": marker},
    )


@functools.cache
def seconds(arguments):
    """How long a command takes that nobody disturbs."""
    start = time.monotonic()
    with started(arguments) as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and VERDICT in out, out
    return time.monotonic() - start


def processes(marker):
    """The living processes with this marker in their environment: the first is the command's parent."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_ours = folder.name.isdigit() and f"MARKER={marker}".encode() in (folder / "environ").read_bytes()
            if is_ours and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(folder.name))
    return sorted(found)


def check_one(choose, marker, arguments):
    """Send one signal to one process of a command that finds a mismatch, or to all of them."""
    number, moment = getattr(signal, f"SIG{choose.choice(SIGNALS)}"), choose.uniform(0.1, seconds(arguments))
    process = started(arguments, marker)
    time.sleep(moment)
    alive = processes(marker)
    is_stopped = number == signal.SIGSTOP  # of which only a parent can tell
    target = choose.choice(alive[1:] if is_stopped and len(alive) > 1 else alive or [process.pid])
    is_of_all = not is_stopped and choose.random() < 0.2
    with contextlib.suppress(ProcessLookupError):
        if is_of_all:
            os.killpg(process.pid, number)
        elif not is_stopped or target != process.pid:
            os.kill(target, number)
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        out = "it did not end"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + GONE_S
    while (left := processes(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    to = "all" if is_of_all else f"process {alive.index(target) if alive else 0}"
    what = f"{arguments[1:]}: {number.name} to {to} after {moment:.2f} s: status {process.returncode}\n{out}"
    assert left == [], what
    assert process.returncode not in (0, 2, 70), what  # there is a wrong scheme, and no bug of the command
    assert process.returncode != 1 or VERDICT in out, what
    assert "Traceback" not in out, what


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_ten_random_signals(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = written("signals.py", RIGHT, WRONG)
    choose = random.Random(seed)
    for attempt in range(10):
        engine = choose.choice(("lockstep", "gloo"))
        arguments = (VERIFY, "verify", file, "--engine", engine, "--mesh", "tp=2", "--examples", "2")
        check_one(choose, f"{seed}_{attempt}_{os.getpid()}", arguments)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) if seed else seed for seed in range(20)])
def test_a_random_signal_to_a_small_command(seed):
    check_one(random.Random(seed), f"small_{seed}_{os.getpid()}", (SMALL,))
