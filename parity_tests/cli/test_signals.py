"""A signal at any moment, to any process of a command: no process is left, and no status claims what was not judged."""

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from parity_tests.specimens.user_files import RIGHT, WRONG, written

SIGNALS = ("INT", "TERM", "HUP", "QUIT", "KILL", "SEGV", "ABRT", "BUS", "ALRM", "USR1", "PIPE", "STOP", "CONT")
LIMIT_S, GONE_S = 240.0, 10.0
MAIN = """
import signal, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # tests in the background inherit that they are ignored
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
"""
VERIFY = f"{MAIN}from shardproof import main\nmain()\n"
SCRIPT = f"{MAIN}import runpy\nsys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
MODULE = f"{MAIN}import runpy\nsys.argv.pop(0)\nrunpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
HARMLESS = ("CONT", "PIPE")  # the first stops a process for a moment; Python ignores the second
STOPPED_S = 1.0
AT_MOST_S = 12.0
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
    from shardproof.engines import supervised
    supervised.ORPHANS_S = 0.2  # before the process that it has started is killed
    sys.exit(supervised.supervised(call))
except KeyboardInterrupt:  # before the command takes care of it
    sys.exit(130)
"""


MY_PAIR = Path(__file__).resolve().parents[2] / "docs" / "examples" / "my_pair.py"


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


@dataclass
class Command:
    """A command that finds a mismatch; the status and the output of another program around it are not ours."""

    arguments: tuple[str, ...]
    verdict: str = VERDICT
    is_ours: bool = True
    stays: bool = False  # until Ctrl-C

    @functools.cached_property
    def seconds(self):
        """How long it takes if nobody disturbs it."""
        start = time.monotonic()
        process = started(self.arguments)
        out = output_of(process, stays=self.stays and 2 * AT_MOST_S)
        assert process.returncode == 1 and self.verdict in out, out
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


def send(number, process, target, is_of_all):
    """The signal to one process or to all; SIGCONT after the process has been stopped for a moment."""
    to = functools.partial(os.killpg, process.pid) if is_of_all else functools.partial(os.kill, target)
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGCONT:
            to(signal.SIGSTOP)
            time.sleep(STOPPED_S)
        # Only a parent can tell that its child is stopped.
        if is_of_all or number != signal.SIGSTOP or target != process.pid:
            to(number)


def output_of(process, *, stays=0.0):
    """The output of a command that ends in time; of one that stays, at Ctrl-C after so many seconds."""
    try:
        if stays:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=stays)[0]
            os.killpg(process.pid, signal.SIGINT)
        return process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "it did not end"


def left_after(seconds, marker):
    """The processes of a command that are left, which are killed."""
    deadline = time.monotonic() + seconds
    while (left := processes(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def check_one(choose, marker, command):
    """Send one signal to one process of a command, or to all of them; returns what is wrong then."""
    name, moment = choose.choice(SIGNALS), choose.uniform(0.1, min(command.seconds, AT_MOST_S))
    number = getattr(signal, f"SIG{name}")
    process = started(command.arguments, marker)
    time.sleep(moment)
    alive = processes(marker)
    is_stopped = number == signal.SIGSTOP
    target = choose.choice(alive[1:] if is_stopped and len(alive) > 1 else alive or [process.pid])
    is_of_all = not is_stopped and choose.random() < 0.2
    send(number, process, target, is_of_all)
    out = output_of(process, stays=command.stays and 2 * AT_MOST_S)
    left = left_after(GONE_S, marker)
    to = "all" if is_of_all else f"process {alive.index(target) if target in alive else 0}"
    what = f"{command.arguments[1:]}: {name} to {to} after {moment:.2f} s: status {process.returncode}\n{out}"
    print(what.splitlines()[0])
    is_true = process.returncode == 1 and command.verdict in out
    wrong = {
        f"processes {left} are left": bool(left),
        "it has status 0": process.returncode == 0,  # there is a wrong scheme
        "its status is another": name in HARMLESS and not is_true,
        "it blames the command's user or itself": command.is_ours and process.returncode in (2, 70),
        "it lacks its verdict": command.is_ours and process.returncode == 1 and not is_true,
        "it prints a traceback": command.is_ours and "Traceback" in out,
    }
    return [f"{sentence}: {what}" for sentence, is_so in wrong.items() if is_so]


def commands():
    """Commands that find the mismatch of a file in the working folder."""
    file = written("scheme_signals.py", RIGHT, WRONG)
    different = MY_PAIR.read_text().replace("epsilon=1e-5", "epsilon=1e-2").partition("in_bfloat16")[0]
    Path("my_pair.py").write_text(different)
    judge = ("verify", file, "--mesh", "tp=2", "--examples", "2")
    replay = re.findall(r"replay: python (\S+)", output_of(started((VERIFY, *judge))))[0]
    Path(replay).rename("replay.py")  # the other commands write theirs in its place
    agent = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardproof")
    plugin = ("pytest", "-q", "-p", "no:cacheprovider", "--shardproof-examples", "2")
    return {
        "lockstep": Command((VERIFY, *judge)),
        "gloo": Command((VERIFY, *judge, "--engine", "gloo")),
        "torchrun": Command((MODULE, *agent, *judge, "--engine", "torchrun"), is_ours=False),
        "test": Command((MODULE, *plugin, file), "1 failed, 1 passed", is_ours=False),
        "replay": Command((SCRIPT, "replay.py"), "MISMATCH"),
        "trace": Command((VERIFY, "trace", "my_pair.py"), "first to differ: output of ln"),
        "watch": Command((VERIFY, *judge, "--watch"), stays=True),
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_ten_random_signals(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    choose, of_all = random.Random(seed), commands()
    wrong = [
        each
        for attempt in range(10)
        for each in check_one(choose, f"{seed}_{attempt}_{os.getpid()}", of_all[choose.choice(list(of_all))])
    ]
    assert wrong == [], "\n".join(wrong)


SMALL_COMMAND = Command((SMALL,))


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) if seed else seed for seed in range(20)])
def test_a_random_signal_to_a_small_command(seed):
    assert check_one(random.Random(seed), f"small_{seed}_{os.getpid()}", SMALL_COMMAND) == []
