"""What a command prints reaches its reader, whatever a file, a disk, a pipe or a locale does to the output."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity_tests import warm_python
from parity_tests.specimens import user_files
from parity_tests.specimens.user_files import LOCKSTEP
from parity_tests.specimens.user_files import TIMES_RANKS as WRONG
from shardproof.endings.exit_status import MISMATCH, USAGE

LIMIT_S = 600.0
PATH = os.pathsep.join(entry for entry in sys.path if entry)
written = functools.partial(user_files.written, **LOCKSTEP)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


OUTPUTS = {
    "kept in memory": "sys.stdout = sys.stderr = io.StringIO()\n",
    "in a log": "sys.stdout = sys.stderr = open('log.txt', 'w')\n",
    "none": "sys.stdout = sys.stderr = None\n",
    "wrapped": "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\n",
    "taken apart": "sys.stdout = codecs.getwriter('utf-8')(sys.stdout.detach())\n",
    "closed below": "os.close(1)\nos.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n",
    "closed with others": "os.closerange(0, 100)\n",
    "without a console": "import rich.console\nrich.console.Console.print = lambda *words, **how: None\n",
    "silent": "builtins.print = lambda *words, **how: None\n",
    "not written": "for stream in (sys.stdout, sys.stderr, sys.__stdout__): stream.write = len\n",
    "not written below": "sys.__stdout__.buffer.write = len\n",
    "of no text": "json.dumps = lambda *content, **how: '{}'\njson.loads = lambda text: {}\n",
}


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_verdict_is_printed_whatever_the_file_prints_to(output):
    file = written("wrong.py", "import builtins, codecs, io, json, os, sys\n", OUTPUTS[output], WRONG)
    done = warm_python.run("-m", "shardproof", "verify", file, "--mesh", "tp=2", "--examples", "1")
    assert done.returncode == MISMATCH and done.stdout.splitlines()[-1] == "1 scheme, 1 mismatch, 0 not run."
    [replay] = Path().glob("replay_*.py")
    for arguments in ((str(replay),), ("-m", "shardproof", "replay", str(replay))):
        done = warm_python.run(*arguments)
        assert done.returncode == MISMATCH and "MISMATCH" in done.stdout


@pytest.mark.parametrize("arguments", [("none.py",), ("--no-such-option",)])
def test_a_full_disk_of_standard_error_changes_no_status(arguments):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "shardproof", "verify", *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (USAGE, b"")


def test_errors_that_nobody_reads_change_no_status():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "shardproof", "verify", "none.py"]
    with os.fdopen(writing, "w") as unread:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=unread, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (USAGE, b"")


def test_a_name_that_the_locale_cannot_write_costs_no_verdict():
    file = written("named.py", WRONG.replace("wrong", "größe"))
    ascii_only = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONPATH": PATH}
    command = [sys.executable, "-m", "shardproof", "verify", file, "--mesh", "tp=2", "--examples", "1"]
    done = subprocess.run(command, capture_output=True, encoding="ascii", env=ascii_only, check=False)
    assert done.returncode == MISMATCH and r"gr\xf6\xdfe" in done.stdout, done.stderr
    [replay] = Path().glob("replay_*.py")
    assert "größe" in replay.read_text(encoding="utf-8")
