"""A script, a replay or a run of pytest verifies a scheme: no exit of a user's code makes it end with status 0."""

import re
from pathlib import Path

import pytest

from parity_tests import warm_python
from parity_tests.specimens.user_files import HEAD
from shardproof.endings.exit_status import RANK_FAILED

LEAVING = (
    "import os, threading\n"
    + HEAD
    + """
def reference(x):
    BODY

@scheme(reference=reference, mesh={"tp": (2,)}, inputs={"x": "b/tp"}, outputs="b/tp", dims={"b": (4,)},
        draw={"x": values("normal")}, dtypes=("float32",))
def wrong(mesh, x):
    return x * 3
"""
)
CALL = "os._exit(0)"
THREAD = "thread = threading.Thread(target=os._exit, args=(0,)); thread.start(); thread.join()"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def leaving(file, body, *below):
    Path(file).write_text(LEAVING.replace("BODY", body) + "".join(below))
    return file


def test_a_script_that_verifies_is_not_ended():
    done = warm_python.run(leaving("script.py", CALL, "wrong.verify()\n"))
    assert done.returncode == 1
    assert re.search(
        r"reference raised SystemExit at script.py:\d+: os\._exit\(0\), which ends the process", done.stderr
    )


def test_a_script_that_a_thread_ends_has_no_verdict():
    done = warm_python.run(leaving("script.py", THREAD, "wrong.verify()\n"))
    assert (done.returncode, done.stdout) == (RANK_FAILED, "")
    assert re.search(r"^shardproof: os\._exit\(0\) .*ends this process without a verdict$", done.stderr, re.MULTILINE)


@pytest.mark.slow
def test_a_run_of_pytest_is_not_ended():
    done = warm_python.run("-m", "pytest", "-q", "-p", "no:cacheprovider", leaving("my_scheme.py", CALL))
    assert done.returncode == 1 and "reference raised SystemExit at my_scheme.py" in done.stdout
    done = warm_python.run("-m", "pytest", "-q", "-p", "no:cacheprovider", leaving("my_scheme.py", "return x", CALL))
    assert done.returncode != 0 and "exits" in done.stdout
    at_exit = "import atexit\natexit.register(lambda: os._exit(0))\n"
    done = warm_python.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", leaving("my_scheme.py", "return 2 * x", at_exit)
    )
    assert done.returncode == 1 and "1 failed" in done.stdout


@pytest.mark.slow
def test_a_replay_is_not_ended(shardproof):
    file = leaving("kept.py", "return 2.0 * x")
    assert shardproof("verify", file, "--examples", "1")[0] == 1
    [replay] = Path().glob("replay_*.py")
    for body in ("return 2.0 * x", CALL, THREAD):
        leaving(file, body, "import atexit\natexit.register(lambda: os._exit(0))\n")
        done = warm_python.run(str(replay), imported=(*warm_python.TORCH, "typer", "rich.table"))
        assert done.returncode == RANK_FAILED, (body, done)
