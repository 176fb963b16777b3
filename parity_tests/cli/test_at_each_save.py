"""`shardproof verify FILE --watch`: each save gets the verdict of what was saved, and nothing is left of a version."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from parity_tests.training.started import Mark
from shardproof.cli import at_each_save, session
from shardproof.cli.at_each_save import IDLE_POLLS, PATIENCE_S, POLL_S, Saves, next_saves
from shardproof.report.summary import VerifyOptions

LIMIT_S = 120.0
GONE_S = 10.0  # until the last process has ended, on a loaded machine
IDLE_S = 4 * IDLE_POLLS * POLL_S
SAVES = 100
WARM = 10  # saves, after which it has imported all that a verdict needs
PAGE = os.sysconf("SC_PAGE_SIZE")
# A shell ignores Ctrl-C in the commands that it starts in the background, pytest for one.
HEARS_CTRL_C = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"""
OPTIONS = ("--watch", "--examples", "1")
SCHEME = """
from shardproof import scheme, values
from torch_impl.collectives import all_reduce
from my_factors import FACTOR


@scheme(
    reference=lambda x: 2.0 * x.sum(-1),
    mesh={{"tp": (2,)}},
    inputs={{"x": "b s/tp"}},
    outputs="b tp=I",
    draw={{"x": values("normal")}},
    engines={engines},
)
def doubled_sum(mesh, x):
    return all_reduce(FACTOR * x.sum(-1), mesh["tp"]){change}
"""  # the change is made in line 16
# The wrong factor has a meaning, the ranks of tp, so that no edit of a line is searched for.
RIGHT, WRONG = "FACTOR = 2.0\n", "FACTOR = 4.0\n"  # of one size, so that Python's bytecode cannot tell them apart
SLEEPS_IN_THE_SEARCH = """import itertools, time


class Factor:
    calls = itertools.count()

    def __mul__(self, x):
        time.sleep(0 if next(self.calls) < 2 else 60)  # two ranks have one call each
        return 4.0 * x


FACTOR = Factor()
"""
EQUAL, MISMATCH = "1 scheme, 0 mismatches", "1 scheme, 1 mismatch,"


class Watch:
    """A command that watches `my_scheme.py`, which imports `my_factors.py`, in a folder of its own."""

    def __init__(self, folder: Path, engines: str = '("lockstep",)', target: str = "my_scheme.py") -> None:
        self.folder, self._engines, self._mark = folder, engines, Mark()
        self.save_factor(RIGHT)
        self.save_scheme()
        self.process = subprocess.Popen(
            [sys.executable, "-c", HEARS_CTRL_C, "-m", "shardproof", "verify", target, *OPTIONS],
            cwd=folder,
            env=self._mark.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self._mark.kill()
        self.process.wait()
        self.process.stdout.close()

    def save_factor(self, text: str) -> None:
        self._save("my_factors.py", text)

    def save_scheme(self, change: str = "") -> None:
        self._save("my_scheme.py", SCHEME.format(engines=self._engines, change=change))

    def _save(self, name: str, text: str) -> None:
        """Write a file beside and rename it, as most editors do: a file written in place may count as two saves."""
        beside = self.folder / f".{name}.new"
        beside.write_text(text)
        beside.replace(self.folder / name)

    def verdict(self) -> str:
        """What is printed until it waits for the next save."""
        lines = list[str]()
        while not lines or "Ctrl-C ends" not in lines[-1]:
            line = self.process.stdout.readline()
            assert line, "".join(lines)
            lines.append(line)
        return "".join(lines)

    def stays(self) -> int:
        """The process that forks: the child of the one that was started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children)

    def held(self) -> tuple[int, int]:
        """Open files of that process, and the bytes of its heap, whether in memory or swapped out."""
        folder = Path(f"/proc/{self.stays()}")
        return len(list((folder / "fd").iterdir())), int((folder / "statm").read_text().split()[5]) * PAGE

    def interrupt(self) -> tuple[int, str]:
        """Press Ctrl-C: the status, and what is printed then. No process is left."""
        os.killpg(self.process.pid, signal.SIGINT)
        out, _ = self.process.communicate(timeout=LIMIT_S)
        assert self._mark.left_after(GONE_S) == []
        return self.process.returncode, out


def test_each_save_gets_the_verdict_of_what_was_saved(tmp_path):
    with Watch(tmp_path) as watch:
        assert EQUAL in watch.verdict()
        watch.save_factor(WRONG)
        first, *report = watch.verdict().splitlines()
        assert "doubled_sum: mismatch in out, d/d x at tp=2 " in first and first.endswith("; looking for its cause")
        assert MISMATCH in "".join(report)
        watch.save_scheme(change="(")
        verdict = watch.verdict()
        assert "cannot import my_scheme.py:16: SyntaxError" in verdict and verdict.endswith(
            " s. Waiting for a save of my_scheme.py or my_factors.py; Ctrl-C ends.\n"
        )
        assert re.fullmatch(r"\d\d:\d\d:\d\d  \d+\.\d s\. Waiting .*", verdict.splitlines()[-1])
        watch.save_scheme(change=" * 0.25")
        verdict = watch.verdict()
        assert MISMATCH in verdict and "off by the constant factor 0.5" in verdict
        watch.save_factor("FACTOR =\n")
        assert "SyntaxError" in watch.verdict()
        watch.save_factor("FACTOR = 8.0\n")
        assert EQUAL in watch.verdict()
        assert watch.interrupt() == (0, "")


@pytest.mark.slow
def test_a_save_ends_a_verdict_that_never_comes(tmp_path):
    with Watch(tmp_path) as watch:
        assert EQUAL in watch.verdict()
        watch.save_factor("while True:\n    pass\n")
        time.sleep(1.0)
        watch.save_factor(WRONG)
        verdict = watch.verdict()
        assert "a file has been saved meanwhile" in verdict and MISMATCH in verdict
        assert watch.interrupt() == (1, "")


@pytest.mark.slow
def test_a_save_ends_the_search_for_a_cause(tmp_path):
    """The first failing case has been told, and its search sleeps in a rank."""
    with Watch(tmp_path) as watch:
        assert EQUAL in watch.verdict()
        watch.save_factor(SLEEPS_IN_THE_SEARCH)
        assert "looking for its cause" in watch.process.stdout.readline()
        saved = time.monotonic()
        watch.save_factor(RIGHT)
        assert "a file has been saved meanwhile" in watch.process.stdout.readline()
        assert time.monotonic() - saved < PATIENCE_S / 2
        assert EQUAL in watch.verdict()
        assert watch.interrupt() == (0, "")


@pytest.mark.slow
def test_a_replay_that_a_verdict_writes_is_no_save(tmp_path):
    with Watch(tmp_path, target=".") as watch:
        watch.verdict()
        watch.save_factor(WRONG)
        assert MISMATCH in watch.verdict() and list(tmp_path.glob("replay_*.py"))
        time.sleep(IDLE_S)
        assert watch.interrupt() == (1, "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_saves_get_a_hundred_right_verdicts_and_leave_nothing(tmp_path):
    with Watch(tmp_path) as watch:
        assert EQUAL in watch.verdict()
        held = list[tuple[int, int]]()
        for number in range(SAVES):
            if number == WARM:
                time.sleep(IDLE_S)  # it starts the server for the next failure once
            watch.save_factor(RIGHT if number % 2 else WRONG)
            assert (EQUAL if number % 2 else MISMATCH) in watch.verdict(), number
            held.append(watch.held())
        descriptors, memory = zip(*held[WARM:], strict=True)
        assert max(descriptors) == min(descriptors)
        # The heap takes a further piece now and then; versions that were kept would fill one every few saves.
        assert sum(later > before for before, later in pairwise(memory)) <= len(memory) // 20
        assert len(list(tmp_path.glob("replay_*"))) == 1
        assert watch.interrupt() == (0, "")


@pytest.mark.slow
def test_a_failure_is_confirmed_on_fresh_processes_each_time(tmp_path):
    with Watch(tmp_path, engines='("lockstep", "gloo")') as watch:
        assert EQUAL in watch.verdict()
        for _ in range(3):
            watch.save_factor(WRONG)
            verdict = watch.verdict()
            assert MISMATCH in verdict and "confirmed on gloo, in fresh processes" in verdict
            watch.save_factor(RIGHT)
            assert EQUAL in watch.verdict()
            time.sleep(IDLE_S)  # a server for the next failure starts meanwhile
        assert watch.interrupt() == (0, "")


@pytest.mark.slow
def test_ctrl_c_during_a_verdict_is_an_interruption(tmp_path):
    with Watch(tmp_path) as watch:
        watch.verdict()
        watch.save_scheme(change="\n\n\nimport time\nprint('imported', flush=True)\ntime.sleep(600)")
        assert watch.process.stdout.readline() == "imported\n"
        status, out = watch.interrupt()
        assert status == 130 and out.count("interrupted") == 1


def test_a_save_is_taken_once_it_is_whole(tmp_path):
    """Also one that empties the file first, and one of a file that is not there for a moment."""
    file, other = tmp_path / "a.py", tmp_path / "b.py"
    file.write_text("1")
    other.write_text("1")
    saves = Saves(lambda: [str(file), str(other)])
    assert saves.changed() == []
    other.unlink()
    assert saves.changed() == [str(other)]
    file.write_text("")
    stages = iter(["2", "22"])

    def next_stage(_: float) -> None:
        file.write_text(text) if (text := next(stages, None)) else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", next_stage)
        assert next_saves(saves, Saves(list), when_idle=list) == [str(file)] * 3
    assert file.read_text() == "22"


def test_a_file_that_was_saved_while_it_was_imported_counts_as_changed(tmp_path):
    early, late = tmp_path / "early.py", tmp_path / "late.py"
    early.write_text("")
    begun_ns = early.stat().st_mtime_ns + 1
    late.write_text("")
    os.utime(late, ns=(begun_ns, begun_ns))
    saves = Saves(list)
    saves.add([str(early), str(late)], unless_saved_since_ns=begun_ns)
    assert saves.changed() == [str(late)]


WRONG_FACTOR, NAME_ERROR = SCHEME.replace("FACTOR *", "4.0 *"), SCHEME.replace("FACTOR *", "factor *")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (WRONG_FACTOR, ["doubled_sum: mismatch in out, d/d x at tp=2 "]),
        (
            NAME_ERROR,
            ["doubled_sum: raised at tp=2 ", "NameError: name 'factor' is not defined", "line 16, in doubled_sum"],
        ),
    ],
)
def test_the_first_failing_case_is_told_in_lines_of_its_own(tmp_path, monkeypatch, source, told):
    """Also on a terminal, where the bar that counts examples makes room for them; an exception comes with its line."""
    text = source.format(engines='("lockstep",)', change="").replace("from my_factors import FACTOR\n", "\n")
    (tmp_path / "my_scheme.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    lead, follow = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(follow, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        session.verify(
            ["my_scheme.py"], VerifyOptions(examples=1), fails=partial(at_each_save._tell_failure, io.StringIO())
        )
        terminal.flush()
        printed = os.read(lead, 1 << 16).decode(errors="replace")  # one read may end inside a character
    os.close(lead)
    assert re.search(r"\x1b\[2K(\x1b\[[0-9;?]*[a-zA-Z])*doubled_sum", printed), printed
    early = re.split(r"tp=2 +lockstep", printed)[0]
    assert all(words in early for words in told), early


@pytest.mark.parametrize("inside_subgroup", [False, True])
def test_the_first_failing_case_says_what_its_spare_axis_is(tmp_path, monkeypatch, capsys, inside_subgroup):
    text = WRONG_FACTOR.format(engines='("lockstep",)', change="").replace("from my_factors import FACTOR\n", "\n")
    (tmp_path / "my_scheme.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    options = VerifyOptions(examples=1, inside_subgroup=inside_subgroup)
    session.verify(["my_scheme.py"], options, fails=partial(at_each_save._tell_failure, io.StringIO()))
    early = " ".join(capsys.readouterr().out.partition("looking for its cause")[2].partition("lockstep")[0].split())
    assert ("spare is not an axis of the scheme" in early) == inside_subgroup, early


def test_options_that_a_watch_cannot_keep():
    for targets, options, sentence in (
        ([], VerifyOptions(), "--watch needs a target"),
        (["my_scheme.py"], VerifyOptions(engine="torchrun"), "--watch does not go with --engine torchrun"),
    ):
        with pytest.raises(ValueError, match=sentence):
            at_each_save.watch(targets, options)


@pytest.mark.parametrize(
    ("target", "files", "named"),
    [
        ("a.py", ["a.py", "../elsewhere.py"], "a.py"),
        ("a.py::right", ["a.py", "b.py", "sub/c.py"], "a.py::right or b.py or sub/c.py"),
        ("a.py", ["a.py", "b.py", "c.py", "d.py", "e.py", "f.py"], "a.py or b.py or c.py or d.py or 2 more"),
        ("sub", ["b.py", "sub/c.py"], "sub or b.py"),
    ],
)
def test_the_files_that_are_waited_for_have_names(tmp_path, monkeypatch, target, files, named):
    monkeypatch.chdir(tmp_path)
    verdict = at_each_save.Verdict(0, files=tuple(os.path.realpath(file) for file in files))
    assert at_each_save._waiting([target], verdict) == f"Waiting for a save of {named}; Ctrl-C ends."
