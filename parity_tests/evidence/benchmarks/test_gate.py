"""The gate's figures come from its record; a gate that did not pass has no figures."""

import pytest

from parity_tests.evidence.benchmarks import gate

RECORD = "60\tpassed\tverify\n360\tpassed\ttests\n361\tpassed\tdocs\n"
CASES = [
    ("parity_tests.mamba.test_mixer", "test_parity[lockstep]", 6.0),
    ("parity_tests.test_pages", "test_links", 2.0),
]
REPORT = "<testsuites><testsuite>{}</testsuite></testsuites>".format(
    "".join(f'<testcase classname="{file}" name="{name}" time="{seconds}"/>' for file, name, seconds in CASES)
)


def figures_of_record(folder, record=RECORD):
    (folder / gate.STEPS).write_text(record)
    (folder / gate.TESTS).write_text(REPORT)
    return list(gate.figures(folder))


def test_the_figures_of_a_record(tmp_path):
    tests, whole = figures_of_record(tmp_path)
    assert (tests.measured, tests.is_met) == ("360 s of wall-clock time", True)
    assert (whole.measured, whole.is_met) == ("781 s of wall-clock time", False)
    assert whole.how == "verify 60 s, tests 360 s, docs 361 s"
    assert tests.how == (
        "2 tests in 8 s of all processes together; mamba 75%, test_pages 25%; parity tests 75%, without them 2 s; "
        "1 test of more than 2 s 75%; all but the 80 longest take 0 s"
    )


def test_a_gate_that_did_not_pass_has_no_figures(tmp_path):
    with pytest.raises(ValueError, match=r"the gate did not pass: tests; run \.ci/run again"):
        figures_of_record(tmp_path, "60\tpassed\tverify\n360\tFAILED (2)\ttests\n1\tNOT RUN\tbrowser\n")


@pytest.mark.parametrize(("seconds", "is_met"), [(360, None), (721, False)])
def test_a_gate_with_a_step_that_could_not_run_is_never_kept(seconds, is_met, tmp_path):
    tests, whole = figures_of_record(tmp_path, f"{seconds}\tpassed\ttests\n0\tNOT RUN\tbrowser\n")
    assert (tests.is_met, whole.is_met) == (seconds == 360, is_met)
    assert whole.how == f"tests {seconds} s, browser not run"


def test_a_file_that_was_skipped_as_a_whole_is_counted():
    report = REPORT.replace(
        "<testsuite>", '<testsuite><testcase classname="" name="parity_tests.evidence.peers.test_x" time="0"/>'
    )
    assert gate.profile(gate.tests_of(report)).startswith("3 tests in 8 s of all processes together; mamba 75%")


def test_without_a_record_nothing_is_judged(tmp_path):
    figures = list(gate.figures(tmp_path))
    assert [figure.is_met for figure in figures] == [None, None]
    assert {figure.how for figure in figures} == {f"no {tmp_path / gate.STEPS}: `.ci/run` writes it"}
