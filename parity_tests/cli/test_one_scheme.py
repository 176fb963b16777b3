"""The command on one scheme of a file, and the full traceback of a rank that raised."""

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from parity_tests.specimens.user_files import HEAD, LOCKSTEP, RIGHT, SCALED, TIMES_RANKS, WRONG, written
from shardproof.cli import session
from shardproof.cli.session import TimeLeft
from shardproof.declare.discover import UnusableTarget, find

DEEP = """
def deep(mesh, x):
    return outer.call(x)
declare(deep)
"""


def file_of_three_deep(engine):
    """Its modules have names of their own: a process imports each name from one folder only."""
    inner, middle, outer = names = [f"an_{place}_module_on_{engine}" for place in ("inner", "middle", "outer")]
    Path(f"{inner}.py").write_text("def call(x):\n    return {}['no such weight']\n")
    for name, called in ((middle, inner), (outer, middle)):
        Path(f"{name}.py").write_text(f"import {called}\n\ndef call(x):\n    return {called}.call(x)\n")
    return written(f"deep_on_{engine}.py", f"import {outer} as outer\n", DEEP), [f"deep_on_{engine}", *names[::-1]]


@pytest.mark.slow
def test_one_scheme_in_a_file(shardproof):
    written("several.py", RIGHT, WRONG)
    status, out, err = shardproof("verify", "several.py::right", "--examples", "2")
    assert (status, err) == (0, "") and out.startswith("right ")
    assert shardproof("verify", "several.py::wrong", "--examples", "2")[0] == 1
    assert shardproof("draw", "several.py::right")[1].startswith("right\n")


@pytest.mark.slow
def test_progress_of_a_single_scheme_counts_examples(shardproof, monkeypatch):
    bars, make = [], session.progress_bar
    monkeypatch.setattr(session, "progress_bar", lambda quiet: bars.append(make(quiet)) or bars[-1])
    written("alone.py", RIGHT)
    written("both.py", RIGHT, SCALED)
    for file, total in (("alone.py", 3), ("both.py", 2)):
        assert shardproof("verify", file, "--examples", "3")[0] == 0
        (task,) = bars.pop().tasks
        assert (task.completed, task.total) == (total, total)
    written("fails.py", WRONG)
    assert shardproof("verify", "fails.py", "--examples", "3")[0] == 1
    (task,) = bars.pop().tasks
    assert task.completed <= 3 and task.description == "fails; finding the cause: wrong"


@pytest.mark.slow
@pytest.mark.parametrize("others", [(), (RIGHT,)])
def test_the_bar_names_the_steps_after_a_failure(shardproof, others, monkeypatch):
    described, update = [], Progress.update

    def recorded(bar, task, **fields):
        update(bar, task, **fields)
        (shown,) = bar.tasks
        described.append((shown.description, str(TimeLeft().render(shown))[:5]))

    monkeypatch.setattr(Progress, "update", recorded)
    assert shardproof("verify", written("fails.py", WRONG, *others), "--examples", "3")[0] == 1
    steps = [step for step in described if step[0].startswith("fails")]
    doing = ("making it smaller", "confirming on gloo", "finding the cause")
    assert list(dict.fromkeys(steps)) == [(f"fails; {each}: wrong", "") for each in doing]
    assert {left for name, left in described if name in ("right", "wrong")} == {"left:"}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_long_name_gives_way_to_the_times(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    bar = session.progress_bar()
    bar.add_task("a_scheme_of_a_name_that_is_too_long_for_each_of_the_widths_of_a_terminal", total=2000, completed=1999)
    out = Console(file=StringIO(), width=width)
    out.print(bar.get_renderable())
    (line,) = out.file.getvalue().splitlines()
    assert re.search(r" 1999/2000 0:00:0\d left: [-:\d]{7} a_", line) and line.rstrip().endswith("…")


def test_a_scheme_that_the_file_has_imported():
    Path("declaring.py").write_text(HEAD + RIGHT.replace("\ndeclare(right)", "\nimported = declare(right)"))
    Path("importing.py").write_text("from declaring import imported, imported as renamed\n")
    assert [scheme.name for scheme in find(["importing.py::imported"])] == ["right"]
    assert find(["importing.py::renamed"]) == find(["importing.py::imported"])


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("several.py::rigth", "several.py::rigth: no scheme of this name; did you mean right? (it has right, wrong)"),
        ("absent.py::right", "absent.py: no such file"),
        ("empty.py::right", "empty.py::right: no scheme of this name (it declares and imports none)"),
    ],
)
def test_a_name_that_the_file_lacks(target, sentence):
    written("several.py", RIGHT, WRONG)
    Path("empty.py").touch()
    with pytest.raises(UnusableTarget) as caught:
        find([target])
    assert str(caught.value) == sentence


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_the_full_traceback_on_request(engine, shardproof):
    file, names = file_of_three_deep(engine)
    arguments = ("verify", file, "--mesh", "tp=2", "--examples", "1", "--engine", engine)
    status, out, _ = shardproof(*arguments)
    assert status == 3 and "Traceback" not in out
    _, out, _ = shardproof(*arguments, "--traceback")
    traceback = out[out.index("Traceback (most recent call last)") :]
    places = [traceback.index(f"/{name}.py") for name in names]
    assert places == sorted(places) and "KeyError: 'no such weight'" in traceback
    (replay,) = Path().glob("replay_*.py")
    assert f"{names[-1]}.py" in shardproof("replay", str(replay), "--traceback")[1].partition("Traceback")[2]


def test_a_mismatch_has_no_traceback(shardproof):
    file = written("wrong_alone.py", TIMES_RANKS, **LOCKSTEP)
    out = shardproof("verify", file, "--mesh", "tp=2", "--examples", "1", "--traceback")[1]
    assert "MISMATCH" in out and "Traceback" not in out
