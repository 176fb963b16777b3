"""A supervised command ends as it would alone, and one that a fatal signal ends is reported by its parent."""

import os
import signal
import subprocess
import sys
import time

import pytest

from shardproof.engines.exit_status import RANK_FAILED

LIMIT_S = 60.0
HEAD = """
import ctypes, os, signal, sys, time
from shardproof.engines.supervised import supervised
"""


def python(source, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def ending(body, **environment):
    """Status, output and errors of a command with this body."""
    indented = body.replace("\n", "\n    ")
    process = python(f"{HEAD}\ndef call():\n    {indented}\nsys.exit(supervised(call))", **environment)
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("body", "status"),
    [("print('done'); return 0", 0), ("print('done'); return 4", 4), ("print('done'); sys.exit(130)", 130)],
)
def test_status_and_output_equal_the_calls(body, status):
    assert ending(body) == (status, "done\n", "")


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_fatal_signal_is_reported(number):
    status, _, err = ending(f"os.kill(os.getpid(), {int(number)})")
    assert status == RANK_FAILED
    assert err == f"shardproof: the process of the command was killed by {number.name}\n"


def test_another_signal_ends_the_command_as_it_would_alone():
    assert ending("signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM)")[0] == -15


def test_nothing_is_forked_under_a_launcher():
    body = "print(os.getppid() == int(os.environ['STARTER'])); return 0"
    assert ending(body, RANK="0", STARTER=str(os.getpid()))[1] == "True\n"
    assert ending(body, STARTER=str(os.getpid()))[1] == "False\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_parent_ends_both(number):
    # Tests that run in the background inherit that an interrupt is ignored.
    source = f"{HEAD}\nsignal.signal(signal.SIGINT, signal.default_int_handler)\ndef call():\n"
    process = python(f"{source}    print(os.getpid(), flush=True)\n    time.sleep(600)\nsys.exit(supervised(call))")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode in (-number, 1)  # Python makes an exception of an interrupt
    end = time.monotonic() + LIMIT_S
    while _is_running(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
