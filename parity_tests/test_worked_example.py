"""The worked file of the documentation is right as it stands, and each of its six mistakes is called by its name."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from parity_tests.pages import blocks
from shardproof.declare.discover import schemes_of_file

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = "docs/how-to/verify-your-own-scheme.md"
READING = "docs/how-to/read-a-failure.md"  # explains the first report of PAGE
LONGEST = 60  # lines of a working file


def loaded(file):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mistakes = loaded(EXAMPLES / "mistakes.py")


def shardproof(*arguments, folder):
    command = [sys.executable, "-m", "shardproof", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def one_line(printed):
    """The printed text as one line: a terminal's width breaks sentences anywhere."""
    return " ".join(printed.split())


def comparable(text):
    """One line, without parts that differ between machines and folders: numbers with a point, the id of a replay.

    A mistake is larger than any rounding, so that the figures of a wrong tensor are the same on each machine.
    """
    text = re.sub(r"^[ ~^]+$", "", text, flags=re.MULTILINE)  # Pythons underline differently
    # Among right values the greatest rounding is elsewhere on another processor.
    text = re.sub(r"^( *equal .*)\([\d,]*\) \w+", r"\1", text, flags=re.MULTILINE)
    figure = re.compile(r"\d+\.\d+(e-?\d+)?|\d(\.\d)?e-?\d+|replay_\w+")
    lines = text.splitlines()
    return one_line("\n".join(line if line.startswith("  MISMATCH") else figure.sub("#", line) for line in lines))


@pytest.fixture(autouse=True)
def profile_of_the_page():
    """The page is printed with the profile that a script runs with; the suite may run with another."""
    before = settings.get_current_profile_name()
    settings.load_profile("dev")
    yield
    settings.load_profile(before)


@cache
def printed_of(mistake):
    return mistake.printed()


def test_the_file_is_short():
    assert len(mistakes.RIGHT.read_text().splitlines()) < LONGEST


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_the_file_is_right(engine):
    (scheme,) = schemes_of_file(str(mistakes.RIGHT))
    scheme.verify(engine=engine, examples=20).raise_if_failed()


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=lambda mistake: mistake.title)
def test_a_mistake_is_explained(mistake):
    printed = one_line(printed_of(mistake))
    assert [words for words in mistake.says if words not in printed] == []
    assert mistake.place is None or mistake.place in printed


@pytest.mark.fast_values(3)
@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=lambda mistake: mistake.title)
def test_the_page_has_the_printed_report(mistake):
    shown = [comparable(block.text) for block in blocks(PAGE)]
    assert comparable(mistake.difference) in shown
    # The search for edits has a limited time: on a busy machine it may not reach the second one.
    shown += [re.sub(r", or once my_scheme.py:\d+ has `[^`]*`, not `[^`]*`", "", text) for text in shown]
    assert comparable(printed_of(mistake)) in shown


@pytest.mark.slow
def test_the_page_on_reading_has_the_same_report():
    report = next(block.text for block in blocks(READING) if block.language == "text")
    assert report == next(block.text for block in blocks(PAGE) if "MISMATCH" in block.text)


def test_the_page_has_the_printed_report_of_the_right_file():
    (scheme,) = schemes_of_file(str(mistakes.RIGHT))
    assert comparable(str(scheme.verify(examples=20))) in [comparable(block.text) for block in blocks(PAGE)]


@pytest.mark.slow
def test_the_command_prints_equal(tmp_path):
    done = shardproof("verify", str(mistakes.RIGHT), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 scheme, 0 mismatches, 0 not run." in done.stdout


@pytest.mark.slow
def test_an_endless_loop_is_ended_on_lockstep_too():
    printed = one_line(replace(mistakes.HANGS, engine="lockstep").printed())
    assert "stalled: rank 1 has reached no collective" in printed
    assert "my_scheme.py" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "status"), [(mistakes.DROPPED, 1), (mistakes.RAISES, 3)])
def test_the_command_prints_what_is_wrong(mistake, status, tmp_path):
    (tmp_path / "my_scheme.py").write_text(mistake.source)
    done = shardproof("verify", "my_scheme.py", folder=tmp_path)
    assert done.returncode == status
    assert mistake.says[0] in one_line(done.stdout)
    (replay,) = tmp_path.glob("replay_*.py")
    again = subprocess.run([sys.executable, replay.name], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == status
    assert mistake.says[0] in one_line(again.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "status"), [(None, 0), (mistakes.DROPPED, 1), (mistakes.RAISES, 3)])
def test_the_same_file_under_torchrun(mistake, status, tmp_path):
    (tmp_path / "my_scheme.py").write_text(mistake.source if mistake else mistakes.RIGHT.read_text())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    verify = ["-m", "shardproof", "verify", "my_scheme.py", "--engine", "torchrun", "--examples", "6"]
    done = subprocess.run([*launch, *verify], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (status == 0), done.stderr
    assert f"exitcode  : {status}" in done.stderr or status == 0
    assert one_line(done.stdout).count("sharded_logprob cp=") == 1  # rank 0 alone speaks
    assert mistake is None or mistake.says[0] in one_line(done.stdout)
