"""Schemes as tests of pytest, and tracebacks without lines of the harness: each in a run of pytest inside this one."""

import json
import re
from pathlib import Path

import pytest

from parity_tests.specimens.user_files import HEAD
from shardproof import pytest_plugin

DECLARED = (
    HEAD
    + """
@scheme(reference=double, mesh={"tp": (2,)}, inputs={"x": "b/tp"}, outputs="b/tp", dims={"b": (4,)},
        draw={"x": values("normal")}, dtypes=("float32",), engines=("lockstep",))
def {name}(mesh, x):
    return x * {factor}
"""
)
WRONG = "2 * mesh.size('tp')"  # a note explains the factor, so that no edit of the line is searched for


class Recorder:
    """Record pytest's reports of each test."""

    def __init__(self):
        self.reports, self.errors = [], []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.skipped:
            self.reports.append(report)

    def pytest_collectreport(self, report):
        if report.failed:
            self.errors.append(str(report.longrepr))


def outcomes(*arguments):
    recorder = Recorder()
    # unraisableexception would collect garbage five times, which takes long in a process that has imported all tests.
    absent = ("cacheprovider", "hypothesispytest", "shardproof", "unraisableexception")
    options = (*(part for name in absent for part in ("-p", f"no:{name}")), "-q", "--no-header")
    pytest.main([*options, *arguments], plugins=[pytest_plugin, recorder])
    return recorder


def scheme_file(file, name, factor=2):
    Path(file).write_text(DECLARED.replace("{name}", name).replace("{factor}", str(factor)))
    return file


@pytest.mark.parametrize("examples", ["0", "-1", "many"])
def test_an_unusable_number_of_examples_is_rejected(examples, capsys):
    outcomes(f"--shardproof-examples={examples}", ".")
    assert f"{examples!r}; give a number of cases of 1 or more" in capsys.readouterr().err


def test_the_schemes_of_a_file_are_its_tests():
    scheme_file("scheme_of_mine.py", "right")
    scheme_file("my_scheme.py", "wrong", WRONG)
    scheme_file("unrelated.py", "never")
    found = outcomes("--shardproof-examples", "2", ".").reports
    assert {report.nodeid: report.outcome for report in found} == {
        "scheme_of_mine.py::right": "passed",
        "my_scheme.py::wrong": "failed",
    }
    text = str(next(report.longrepr for report in found if report.failed))
    assert text.startswith("wrong    tp=2   lockstep") and "MISMATCH" in text and "Traceback" not in text


def test_a_file_on_the_command_line_may_have_any_name():
    found = outcomes("--shardproof-examples", "1", scheme_file("anything.py", "right") + "::right").reports
    assert [(report.nodeid, report.outcome) for report in found] == [("anything.py::right", "passed")]


@pytest.mark.parametrize("spelling", ["@shardproof.scheme(", "@sp.scheme(", "@s("])
def test_a_scheme_is_found_in_every_spelling(spelling):
    file = scheme_file("my_scheme.py", "wrong", WRONG)
    imports = "import shardproof, shardproof as sp\nfrom shardproof import scheme as s\n"
    text = Path(file).read_text().replace("import scheme, ", "import ").replace("def declare", "def unused")
    Path(file).write_text(imports + text.replace("return scheme(", "return s(").replace("@scheme(", spelling))
    found = outcomes("--shardproof-examples", "1", ".").reports
    assert [(report.nodeid, report.outcome) for report in found] == [("my_scheme.py::wrong", "failed")]


def test_a_file_that_only_uses_the_package_keeps_its_tests():
    Path("uses_a_scheme.py").write_text("import shardproof\ndef test_it():\n    assert shardproof.verify\n")
    recorder = outcomes("uses_a_scheme.py")
    assert ([each.nodeid for each in recorder.reports], recorder.errors) == (["uses_a_scheme.py::test_it"], [])


def test_an_engine_that_this_machine_lacks_is_skipped():
    file = Path(scheme_file("my_scheme.py", "right"))
    file.write_text(file.read_text().replace('("lockstep",)', '("nccl",)'))
    (report,) = outcomes("--shardproof-engine", "nccl", str(file)).reports
    assert report.skipped and "not run" in str(report.longrepr)


def test_a_file_that_cannot_be_used_is_an_error_in_one_sentence():
    Path("bad_scheme.py").write_text("# @scheme\n1 / 0\n")
    (error,) = outcomes("bad_scheme.py").errors[:1]
    assert "cannot import bad_scheme.py" in error or "ZeroDivisionError" in error


@pytest.mark.parametrize("target", [".", "both_scheme.py"])
def test_a_declaration_that_is_wrong_fails_as_its_own_test_alone(target):
    scheme_file("both_scheme.py", "right")
    with Path("both_scheme.py").open("a") as file:
        file.write(
            DECLARED.removeprefix(HEAD)
            .replace("{name}", "typo")
            .replace("{factor}", "2")
            .replace('outputs="b/tp"', 'outputs="b/tq"')
        )
        file.write("\n\ndef test_of_its_own():\n    assert right\n")
    recorder = outcomes("--shardproof-examples", "1", target)
    found, function_outcomes = recorder.reports, {} if target == "." else {"both_scheme.py::test_of_its_own": "passed"}
    assert recorder.errors == []
    assert {report.nodeid: report.outcome for report in found} == {
        "both_scheme.py::right": "passed",
        "both_scheme.py::typo": "failed",
        **function_outcomes,
    }
    text = str(next(report.longrepr for report in found if report.failed))
    assert text.startswith("both_scheme.py:") and "scheme 'typo': spec 'b/tq' (output 'out'): axis 'tq' is not" in text


def test_a_scheme_that_raises_has_its_case_and_its_replay():
    scheme_file("raising_scheme.py", "raising", "{}['absent']")
    (found,) = outcomes("--shardproof-examples", "1", ".").reports
    text = str(found.longrepr)
    assert "KeyError: 'absent'" in text and "smallest case: tp=2 b=4 " in text
    assert f"replay: python {next(Path().glob('replay_*.py'))}" in text


def test_a_traceback_has_no_line_of_the_harness():
    scheme_file("of_mine.py", "right", WRONG)
    Path("test_mine.py").write_text(
        "from shardproof import schemes_of_file\n\n"
        "def test_mine():\n    schemes_of_file('of_mine.py')[0].verify(examples=1).raise_if_failed()\n\n"
        "def test_misspelt():\n    schemes_of_file('of_mine.py')[0].verify(tq=2)\n"
    )
    mismatch, misspelt = (str(report.longrepr) for report in outcomes("test_mine.py").reports)
    for text, kind in ((mismatch, "ValueMismatch"), (misspelt, "'tq' is not a mesh axis")):
        assert "raise_if_failed()" in text or ".verify(tq=2)" in text
        assert kind in text and "harness/" not in text


LONG = "a term that is summed on each rank of the tensor-parallel group and then on all ranks once more"
SUMMARY = {
    "my_scheme.py::wrong": "out, d/d x: off by the constant factor 2 (= tp): a reduction is missing",
    "raising_scheme.py::raising": "raised: rank 0 raised KeyError: 'a term that is summed on each rank",
    "test_verdicts.py::test_verdict": "wrong: out, d/d x: off by the constant factor 2 (= tp)",
    "test_verdicts.py::test_assertion": "wrong: out, d/d x: off by the constant factor 2 (= tp)",
    "test_verdicts.py::test_check": "wrong: out, d/d x: off by the constant factor ",
    "test_verdicts.py::test_raising": "raised: rank 0 raised KeyError: 'a term that is summed on each rank",
}


def test_the_output_fits_into_80_columns_and_the_summary_names_tensor_and_cause(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    scheme_file("my_scheme.py", "wrong", WRONG)
    scheme_file("raising_scheme.py", "raising", f"{{}}[{LONG!r}]")
    Path("test_verdicts.py").write_text(
        "from shardproof import check, schemes_of_file\n\n"
        "def test_verdict():\n    schemes_of_file('my_scheme.py')[0].verify(examples=1).raise_if_failed()\n\n"
        "def test_assertion():\n    assert schemes_of_file('my_scheme.py')[0].verify(examples=1)\n\n"
        "def test_check():\n    check(schemes_of_file('my_scheme.py')[0].case())\n\n"
        "def test_raising():\n    schemes_of_file('raising_scheme.py')[0].verify(examples=1).raise_if_failed()\n"
    )
    found = {report.nodeid: report.longrepr for report in outcomes("--shardproof-examples", "1", ".").reports}
    assert found.keys() == SUMMARY.keys()
    for name, longrepr in found.items():
        assert longrepr.reprcrash.message.startswith(SUMMARY[name]), longrepr.reprcrash.message
        verdict_text = str(longrepr).rpartition("direct cause")[2]  # the user's own exception is not of it
        printed = [line for line in verdict_text.splitlines() if not line.startswith(">")]  # nor are the test's lines
        assert [line for line in printed if len(line) > 80] == []
        assert "raising" in name or "  MISMATCH  d/d x" in str(longrepr)
        assert "contextlib" not in str(longrepr)


@pytest.mark.parametrize("colour", ["yes", "no"])
def test_a_line_of_the_summary_has_the_width_of_the_terminal(colour, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("CI", "BUILD_NUMBER"):  # where pytest cuts no line
        monkeypatch.delenv(name, raising=False)
    scheme_file("my_scheme.py", "wrong", WRONG)
    Path(f"test_in_colour_{colour}.py").write_text(
        "from shardproof import schemes_of_file\n\n"
        "def test_verdict():\n    assert schemes_of_file('my_scheme.py')[0].verify(examples=1)\n"
    )
    outcomes("--shardproof-examples", "1", f"--color={colour}", "-p", "no:terminalprogress", ".")
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = [line for line in printed.splitlines() if line.startswith("FAILED")]
    assert [len(line) for line in lines] == [80, 80], printed
    assert all(line.endswith("...") for line in lines)


def test_a_failure_is_the_same_in_a_worker(monkeypatch):
    """pytest-xdist sends a failure to the process that prints it."""
    scheme_file("my_scheme.py", "wrong", WRONG)
    (here,) = outcomes("--shardproof-examples", "1", ".").reports
    there = pytest.TestReport._from_json(json.loads(json.dumps(here._to_json())))
    assert str(there.longrepr) == str(here.longrepr)
    assert there.longrepr.reprcrash.message == here.longrepr.reprcrash.message


SKIPPING = """
import pytest, unittest
from shardproof import drawn

def draws(generator, shape):
    {call}

@scheme(reference=double, mesh={{"tp": (2,)}}, inputs={{"x": "b/tp"}}, outputs="b/tp", dims={{"b": (4,)}},
        draw={{"x": drawn(draws)}}, dtypes=("float32",))
def unjudged(mesh, x):
    return x * 3
"""


@pytest.mark.parametrize(
    "call", ["pytest.skip('no')", "pytest.xfail('no')", "pytest.exit('no', 0)", "raise unittest.SkipTest('no')"]
)
def test_a_scheme_is_neither_skipped_nor_ended_by_its_own_functions(call):
    Path("my_scheme.py").write_text(HEAD + SKIPPING.format(call=call))
    (found,) = outcomes("--shardproof-examples", "1", ".").reports
    assert found.failed and "scheme 'unjudged': my_scheme.py:" in str(found.longrepr), found.longrepr


def test_an_import_that_exits_fails_beside_the_schemes_above_it():
    scheme_file("exiting_scheme.py", "right")
    with Path("exiting_scheme.py").open("a") as file:
        file.write("raise SystemExit(0)\n")
    options = ("--shardproof-examples", "1", "--continue-on-collection-errors")
    found = outcomes(*options, "exiting_scheme.py").reports
    assert {report.nodeid: report.outcome for report in found} == {
        "exiting_scheme.py::right": "passed",
        "exiting_scheme.py::exiting_scheme.py": "failed",
    }
    assert "it exits" in next(report.longrepr for report in found if report.failed).reprcrash.message
