"""The command in its own process: pipes that close, Ctrl-C, terminals and colours."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from parity_tests.training.started import Mark
from shardproof.engines.processes.forks import GONE, ServerGone
from shardproof.report.guard import guarded

COMMAND = [sys.executable, "-m", "shardproof"]
PLAIN = ["schedule", "zbv", "--pp", "2", "--microbatches", "2"]
WRONG = ["schedule", "nothing"]
LIMIT_S = 120
INTERRUPTED_S = 20.0  # from Ctrl-C to the end of the command, on a loaded machine; a compilation is not waited for
GONE_S = 10.0  # until the last process has ended, on a loaded machine
COLOUR = "\x1b[31m"


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("arguments", [PLAIN, ["--help"]])
def test_nothing_is_printed_where_nobody_reads(arguments):
    """Like `| head`: the reader is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, check=False, timeout=LIMIT_S
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")


@pytest.mark.slow
def test_output_that_is_closed_is_no_mistake():
    shell = ["sh", "-c", 'exec "$0" "$@" >&-', *COMMAND, *PLAIN]
    assert subprocess.run(shell, check=False, timeout=LIMIT_S, capture_output=True).returncode == 0


def in_a_terminal(arguments, **environment):
    """Output of a command on a terminal."""
    lead, follow = pty.openpty()
    settings = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=follow, stderr=follow, env={**settings, "TERM": "xterm", **environment}
    )
    os.close(follow)
    output = b""
    while True:
        try:
            piece = os.read(lead, 4096)
        except OSError:  # nobody has the other end
            break
        if not piece:
            break
        output += piece
    os.close(lead)
    assert process.wait(LIMIT_S) == 2
    return output.decode()


@pytest.mark.slow
def test_colours_are_for_terminals():
    assert COLOUR in in_a_terminal(WRONG)
    assert "\x1b[" not in in_a_terminal(WRONG, NO_COLOR="1")
    assert "\x1b[" not in in_a_terminal(WRONG, TERM="dumb")
    piped = subprocess.run([*COMMAND, *WRONG], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert piped.stderr.startswith("shardproof: schedule 'nothing' is not one of ") and "\x1b" not in piped.stderr


def test_losing_the_process_that_forks_the_ranks_is_no_traceback(capsys):
    def lost():
        raise ServerGone(GONE)

    assert guarded(lost) == 3
    assert capsys.readouterr().err == f"shardproof: {GONE}\n"


@pytest.mark.slow
def test_ctrl_c_ends_a_training_run(tmp_path):
    """At a terminal it goes to the ranks as well; they say nothing of it."""
    mark = Mark()
    small = [sys.executable, "-m", "parity_tests.training.small"]
    how = ["train", "--mesh", "dp=2", "--steps", "100000", "--checkpoint", str(tmp_path), "--every", "1"]
    process = subprocess.Popen(
        [*small, *how], env=mark.environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (tmp_path / "step_000001" / "done").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=INTERRUPTED_S)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err == "shardproof: interrupted; what was not printed was not judged\n"
    assert mark.left_after(GONE_S) == []
