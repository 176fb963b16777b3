"""A supervised command ends as it would alone, and one that a fatal signal ends is reported by its parent."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from parity_tests.specimens.processes import is_running
from shardproof.endings import signals
from shardproof.endings.exit_status import INTERNAL, INTERRUPTED, RANK_FAILED, UNREAD, USAGE
from shardproof.endings.signals import signal_name

LIMIT_S = 60.0
HEAD = """
import ctypes, os, re, signal, sys, threading, time
from shardproof.endings import journal
from shardproof.engines import supervised as supervised_module
from shardproof.engines.supervised import supervised
"""
# Limits of seconds as tenths, for tests of what a parent waits for.
QUICK = """
from shardproof.engines.processes import idleness
supervised_module.TICK_S, supervised_module.MARGIN_S, supervised_module.STOPPED_S = 0.1, 0.5, 1.0
supervised_module.IDLE_S, idleness.LOOK_S = 0.8, 0.4
"""


def python(*arguments, start_new_session=False, **environment):
    return subprocess.Popen(
        [sys.executable, *(arguments if len(arguments) > 1 else ("-c", *arguments))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
        env={**os.environ, **environment},
    )


def started(source, folder):
    """A command in a file of its own, whose lines are a user's."""
    file = folder / "command.py"
    file.write_text(source)
    return python("-u", str(file))


def ended(process):
    """Status, output and errors."""
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def ending(body, **environment):
    """Status, output and errors of a command with this body."""
    indented = body.replace("\n", "\n    ")
    return ended(python(f"{HEAD}\ndef call():\n    {indented}\nsys.exit(supervised(call))", **environment))


@pytest.mark.parametrize(
    ("body", "status"),
    [("print('done'); return 0", 0), ("print('done'); return 4", 4), ("print('done'); sys.exit(130)", 130)],
)
def test_status_and_output_equal_the_calls(body, status):
    assert ending(body) == (status, "done\n", "")


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    "number",
    [*(signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGVTALRM), signal.SIGXCPU, signal.SIGRTMIN + 6],
)
def test_a_fatal_signal_is_reported(number):
    status, _, err = ending(f"os.kill(os.getpid(), {int(number)})")
    assert status == RANK_FAILED
    assert err == f"shardproof: the process of the command was killed by {signal_name(number)}\n"


def test_a_signal_that_asks_to_end_does_so_and_is_named():
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_DFL)"
    status, _, err = ending(f"{deaf}; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)")
    assert (status, err) == (-15, "shardproof: ended by SIGTERM; what was not printed was not judged\n")


@pytest.mark.parametrize("deaf", ["", "signal.signal(signal.SIGXCPU, signal.SIG_DFL)"])
def test_a_limit_of_time_ends_the_command(deaf):
    """The system signals the process that computes, and not its parent."""
    limited = f"{HEAD}\nimport resource\nresource.setrlimit(resource.RLIMIT_CPU, (2, 100))"
    status, _, err = ended(python(f"{limited}\ndef call():\n    {deaf}\n    while True: pass\nsupervised(call)"))
    sentence = "shardproof: ended by SIGXCPU; what was not printed was not judged\n"
    assert (status, err) == (-signal.SIGXCPU, sentence)


def test_a_broken_pipe_is_an_output_that_nobody_reads():
    body = "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\nos.kill(os.getpid(), signal.SIGPIPE)"
    assert ending(body) == (UNREAD, "", "")


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("os._exit(0)", "os._exit(0), which ends the process of the command"),
        ("os.execv('/bin/true', ['true'])", "os.execv('/bin/true'), which ends the process of the command"),
        ("ctypes.CDLL(None)._exit(0)", "the process of the command left with exit code 0"),
    ],
)
def test_a_process_that_does_not_come_to_its_end_has_no_verdict(body, how):
    assert ending(f"print('half', flush=True)\n{body}") == (RANK_FAILED, "half\n", f"shardproof: {how}\n")


def test_a_thread_that_ends_the_process_is_named(tmp_path):
    body = "thread = threading.Thread(target=leave)\n    thread.start()\n    thread.join()"
    source = f"{HEAD}\ndef leave():\n    os._exit(0)\n\ndef call():\n    {body}\n\nsys.exit(supervised(call))\n"
    line = source.splitlines().index("    os._exit(0)") + 1
    status, _, err = ended(started(source, tmp_path))
    assert (status, err) == (
        RANK_FAILED,
        f"shardproof: the process of the command left with exit code 0 by os._exit(0) at command.py:{line}\n",
    )


def test_a_forked_process_may_leave():
    forks = "child = os.fork()\nif child == 0:\n    os._exit(7)"
    assert ending(f"{forks}\nreturn os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])") == (7, "", "")


def test_a_forked_process_has_no_verdict_of_its_own():
    forks = "if os.fork() == 0:\n    sys.exit(0)\nos.wait()"
    assert ending(f"{forks}\nreturn 1") == (1, "", "")
    status, _, err = ending(f"{forks}\nctypes.CDLL(None)._exit(0)")
    assert (status, err) == (RANK_FAILED, "shardproof: the process of the command left with exit code 0\n")


def test_a_thread_ends_no_command_under_a_launcher_with_status_0():
    body = "thread = threading.Thread(target=os._exit, args=(0,))\nthread.start()\nthread.join()"
    status, _, err = ending(body, TORCHELASTIC_RUN_ID="job")
    assert status == RANK_FAILED
    assert re.fullmatch(r"shardproof: os\._exit\(0\) .*ends this process without a verdict\n", err)


def test_a_command_that_cannot_fork_says_so():
    fails = "def fails():\n    raise BlockingIOError(11, 'Resource temporarily unavailable')\nos.fork = fails\n"
    status, _, err = ended(python(f"{HEAD}\n{fails}sys.exit(supervised(lambda: 0))"))
    sentence = "the process of the command cannot be started or watched: Resource temporarily unavailable"
    assert (status, err) == (USAGE, f"shardproof: {sentence}\n")


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", r"was stopped by a signal and not continued for \d+ s"),
        (
            "supervised_module.words.beat(0.5)\n    re.match('(a+)+$', 'a' * 60 + 'b')",
            r"has held the interpreter for \d+ s, in native code",
        ),
    ],
)
def test_a_process_that_cannot_watch_itself_is_watched(body, sentence, tmp_path):
    source = f"{HEAD}{QUICK}\ndef call():\n    {body}\n\nsys.exit(supervised(call))\n"
    line = source.splitlines().index(f"    {body.splitlines()[-1].strip()}") + 1
    status, _, err = ended(started(source, tmp_path))
    assert status == RANK_FAILED
    assert re.fullmatch(rf"shardproof: the process of the command {sentence} at command.py:{line}\n", err)


def short(body):
    """A command for which no process may wait longer than 0.8 s in a scheme."""
    indented = body.replace("\n", "\n    ")
    return f"{HEAD}{QUICK}import contextlib, subprocess\ndef call():\n    {indented}\n\nsys.exit(supervised(call))\n"


def test_a_scheme_that_waits_for_ever_costs_its_own_verdict(tmp_path):
    source = short("""why = journal.current.sentence('first')
if why is not None:
    print(why)
    return 4
journal.current.begin('first')
lock = threading.Lock()
lock.acquire()
lock.acquire()""")
    status, out, err = ended(started(source, tmp_path))
    line = max(number for number, text in enumerate(source.splitlines(), 1) if "lock.acquire()" in text)
    waited = r"the process of the command has waited for \d+ s, in which none of its processes computed"
    assert (status, err) == (4, "")
    assert re.fullmatch(rf"{waited} at command.py:{line}\n", out)


def test_an_import_that_takes_long_is_named(tmp_path):
    """As one that waits for other ranks, because the environment is a launcher's."""
    limits = f"{QUICK}supervised_module.IDLE_S, supervised_module.LONG_IMPORT_S = 60.0, 0.3\n"
    source = short("""for _ in range(2):
    journal.current.begin('import folder/slow.py')
    time.sleep(0.8)
    journal.current.done('import folder/slow.py')
    time.sleep(0.3)""").replace(QUICK, limits)
    status, _, err = ended(started(source, tmp_path))
    line = source.splitlines().index("        time.sleep(0.8)") + 1
    assert (status, err) == (0, f"shardproof: the import of slow.py has taken 0 s, and is at command.py:{line}\n" * 2)


# The second ends by an exit function of Python's, which waits for the process.
NEVER_EXITS = {
    "of_its_own": "import atexit\natexit.register(time.sleep, 1000)",
    "of_multiprocessing": "import multiprocessing\n"
    "multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,)).start()",
}


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("how", NEVER_EXITS)
def test_an_exit_function_that_waits_for_ever_ends_after_the_verdicts(how):
    status, out, err = ended(python(short(f"{NEVER_EXITS[how]}\nprint('equal')")))
    assert (status, out) == (RANK_FAILED, "equal\n")
    waited = r"the process of the command has waited for \d+ s, in which none of its processes computed"
    assert re.fullmatch(rf"shardproof: {waited}.*, after all verdicts were printed\n", err)


GOES_ON = {
    "computes": """journal.current.begin('first')
end = time.monotonic() + 2
while time.monotonic() < end:
    pass""",
    "a process of it computes": """journal.current.begin('first')
with contextlib.suppress(subprocess.TimeoutExpired):
    subprocess.run([sys.executable, '-c', 'while True: pass'], timeout=2)""",
    "is in no scheme": "time.sleep(2)",
    "may wait longer in a run": """supervised_module.words.limit_runs(60.0)
journal.current.begin('first')
time.sleep(2)""",
}


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("how", GOES_ON)
def test_a_process_that_does_not_wait_for_ever_goes_on(how):
    assert ended(python(short(GOES_ON[how]))) == (0, "", "")


def test_a_process_that_is_continued_in_time_goes_on():
    """Stopped twice, for longer in all than it may be stopped at a time."""
    call = "def call():\n    print(os.getpid(), flush=True)\n    time.sleep(1.5)"
    process = python(f"{HEAD}{QUICK}\n{call}\nsys.exit(supervised(call))")
    child = int(process.stdout.readline())
    for _ in range(2):
        os.kill(child, signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(child, signal.SIGCONT)
    assert ended(process)[::2] == (0, "")


def test_after_a_death_another_process_goes_on():
    body = """of = journal.current
print(of.outcome('first'), of.sentence('second'), of.report('second'))
if of.outcome('first'):
    return 5
journal.current.begin('first')
journal.current.done('first', {'a': 1})
journal.current.begin('second')
journal.current.found('second', 'half')
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)"""
    died = "the process of the command was killed by SIGKILL"
    assert ending(body) == (5, f"None None None\n{{'a': 1}} {died} half\n", "")


def test_a_process_that_dies_of_the_same_again_is_the_last():
    body = "print('once', flush=True)\njournal.current.begin('first')\nos.kill(os.getpid(), signal.SIGKILL)"
    status, out, err = ending(body)
    assert (status, out) == (RANK_FAILED, "once\n" * 2)
    assert err == "shardproof: the process of the command was killed by SIGKILL\n"


@pytest.mark.parametrize(
    ("function", "message"),
    [("os._exit(0)", "os._exit(0), which ends the process of the command"), ("sys.exit(0)", "0")],
)
def test_an_exit_function_cannot_take_the_verdict(function, message, tmp_path):
    source = f"{HEAD}\nimport atexit\n\ndef leave():\n    {function}\n\n"
    source += "def call():\n    atexit.register(leave)\n    print('equal')\n\nsys.exit(supervised(call))\n"
    line = source.splitlines().index(f"    {function}") + 1
    status, out, err = ended(started(source, tmp_path))
    assert (status, out) == (RANK_FAILED, "equal\n")
    raised = f"an atexit function raised SystemExit at command.py:{line}: {message}"
    assert f"shardproof: {raised}; all verdicts were printed before\n" in err


def test_an_interrupt_at_any_moment_is_one_sentence():
    """From the fork to the last line: at a terminal it goes to parent and child."""
    source = f"{HEAD}\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    source += "def call():\n    print(flush=True)\n    time.sleep(0.05)\n"
    for delay in (0.0, 0.02, 0.045, 0.05, 0.055, 0.06, 0.08):
        process = python(f"{source}sys.exit(supervised(call))", start_new_session=True)
        process.stdout.readline()
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        status, _, err = ended(process)
        sentence = "shardproof: interrupted; what was not printed was not judged\n"
        assert (status, err) in ((INTERRUPTED, sentence), (0, "")), delay


def test_a_signal_that_is_ignored_asks_for_nothing():
    """As SIGHUP under nohup: it reaches parent and child, and neither ends."""
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    grace = "supervised_module.TICK_S, supervised_module.GRACE_S = 0.1, 0.4"
    call = "def call():\n    print(flush=True)\n    time.sleep(1)"
    source = f"{HEAD}\n{ignored}\n{grace}\n{call}\nsys.exit(supervised(call))"
    process = python(source, start_new_session=True)
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGHUP)
    assert ended(process)[::2] == (0, "")


def test_a_parent_that_ignores_ended_children_costs_no_status():
    call = "def call():\n    return 5\n"
    process = python(f"{HEAD}\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n{call}sys.exit(supervised(call))")
    assert ended(process) == (5, "", "")


def test_an_internal_error_has_a_status_of_its_own():
    status, _, err = ending("raise KeyError('lost')")
    assert status == INTERNAL
    assert err.splitlines()[-2:] == ["KeyError: 'lost'", "shardproof: internal error: KeyError"]


@pytest.mark.parametrize(
    ("body", "status", "err"),
    [
        ("return 5", 5, ""),
        ("import ctypes; ctypes.CDLL(None)._exit(5)", 5, ""),
        (
            "import ctypes; ctypes.CDLL(None)._exit(0)",
            RANK_FAILED,
            "shardproof: died: rank 1 left with exit code 0 before it reported\n",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("os.kill(os.getppid(), signal.SIGSTOP); return 5", 5, ""),
        *(
            (
                f"signal.signal({number:d}, lambda *_: sys.exit(5)); os.kill(os.getppid(), {number:d}); time.sleep(9)",
                5,
                "",
            )
            for number in signals.ASKING
        ),
    ],
)
def test_under_a_launcher_a_process_ends_as_its_rank_does(body, status, err):
    assert ending(body, TORCHELASTIC_RUN_ID="job", RANK="1") == (status, "", err)


def test_a_parent_that_reports_a_death_loads_no_torch():
    source = f"{HEAD}\ndef call():\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
    status, out, err = ended(python(f"{source}supervised(call)\nprint('torch' in sys.modules)"))
    assert (status, out) == (0, "False\n")
    assert err == "shardproof: the process of the command was killed by SIGSEGV\n"


def test_nothing_is_forked_once_jax_has_been_used():
    """Its threads would not be in the fork; its import starts none."""
    call = "def call():\n    print(os.getpid() == process)\n"
    source = f"{HEAD}import jax\nprocess = os.getpid()\n{call}supervised(call)\njax.devices()\nsupervised(call)"
    assert ended(python(source)) == (0, "False\nTrue\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_parent_ends_both(number):
    # Tests that run in the background inherit that an interrupt is ignored.
    source = f"{HEAD}\nsignal.signal(signal.SIGINT, signal.default_int_handler)\ndef call():\n"
    process = python(f"{source}    print(os.getpid(), flush=True)\n    time.sleep(600)\nsys.exit(supervised(call))")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == (INTERRUPTED if number == signal.SIGINT else -number)
    end = time.monotonic() + LIMIT_S
    while is_running(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_process_with_a_session_of_its_own_ends_with_the_command():
    child = "import os, time; os.setsid(); os.write(1, b'%d' % os.getpid()); os.close(1); time.sleep(600)"
    starts = f"import subprocess\nsupervised_module.ORPHANS_S = 0.2\nstarts = [sys.executable, '-c', {child!r}]\n"
    waits = "print(subprocess.Popen(starts, stdout=subprocess.PIPE).stdout.read().decode())\nreturn 0"
    status, out, err = ending(starts + waits)
    assert (status, err) == (0, "")
    assert not is_running(int(out))
