"""Commands return the exit statuses of the manual, and no others."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity_tests.slow import slow_but
from parity_tests.specimens.user_files import RAISING, RIGHT, WRONG, written
from shardproof.endings import exit_status

MANUAL = Path(__file__).resolve().parents[2] / "docs" / "reference" / "command-line.md"
ONE_CASE = ("--mesh", "tp=1", "--examples", "1", "--quiet")
MAIN = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom shardproof import main\n"
LOST = "import shardproof.cli.scheme_list as table\ntable.show = lambda *arguments: {}['lost']\n"
LIMIT_S = 120.0


def command(*arguments, before="", **how):
    """A command in a process of its own; tests that run in the background inherit that an interrupt is ignored."""
    return subprocess.Popen([sys.executable, "-c", f"{MAIN}{before}main()", *arguments], stderr=subprocess.PIPE, **how)


def interrupted(shardproof):
    file = written("waits.py", "import os, time\nos.write(1, b'importing')\ntime.sleep(600)\n", RIGHT)
    with command("verify", file, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"i"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    return process.returncode


def unread(shardproof):
    reading, writing = os.pipe()
    os.close(reading)
    with command("verify", "--help", stdout=writing) as process:
        os.close(writing)
        assert process.communicate(timeout=LIMIT_S)[1] == b""
    return process.returncode


def internal(shardproof):
    with command("list", before=LOST, stdout=subprocess.DEVNULL) as process:
        errors = process.communicate(timeout=LIMIT_S)[1]
    assert b"shardproof: internal error at " in errors
    return process.returncode


def without_gpu(shardproof):
    return shardproof("verify", written("schemes.py", RIGHT), *ONE_CASE, "--engine", "nccl")[0]


def of(*parts):
    return lambda shardproof: shardproof("verify", written("schemes.py", *parts), *ONE_CASE)[0]


COMMANDS = {
    exit_status.EQUAL: of(RIGHT),
    exit_status.MISMATCH: of(RIGHT, WRONG),
    exit_status.USAGE: lambda shardproof: shardproof("verify", "none.py")[0],
    exit_status.RANK_FAILED: of(RIGHT, RAISING, WRONG),
    exit_status.NOTHING: without_gpu,
    exit_status.INTERNAL: internal,
    exit_status.INTERRUPTED: interrupted,
    exit_status.UNREAD: unread,
}


FAST = [0, 2, 4]  # the others cost a failing case or a process each; test_app, test_process and test_exits have them


@pytest.mark.parametrize("status", slow_but(FAST, list(COMMANDS)))
def test_a_command_returns_it(shardproof, status, tmp_path, monkeypatch):
    if status == exit_status.NOTHING and torch.cuda.device_count():
        pytest.skip("a GPU is here")
    monkeypatch.chdir(tmp_path)
    assert COMMANDS[status](shardproof) == status


def test_the_manual_has_these_and_no_others():
    numbers = re.findall(r"^\| (\d+) \|", MANUAL.read_text(), re.MULTILINE)
    assert [int(number) for number in numbers] == sorted(COMMANDS) == [0, 1, 2, 3, 4, 70, 130, 141]
