"""The benchmarks' tools: the toy runs and fails as it should, and a page reports the measurements."""

import pytest

from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.evidence.benchmarks.page import machine, text, with_section
from parity_tests.evidence.benchmarks.survivors import PARENT
from parity_tests.evidence.benchmarks.toy import FAILING, killed, toy, toy_case
from shardproof.engines.engines import run
from shardproof.engines.failure import CollectiveMismatch, Deadlock, Died, Raised, RankFailure, Stalled

CAUSES = {
    "raises": (Raised, Raised),
    "other shape": (CollectiveMismatch, CollectiveMismatch),
    "other operation": (CollectiveMismatch, CollectiveMismatch),
    "collective left out": (Deadlock, Stalled),
    "killed": (None, Died),
}


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_the_toy_is_the_same_on_every_engine(engine):
    case = toy_case(2, engine)
    assert run(toy, case, engine).results == run(toy, case, "lockstep").results


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_a_toy_that_should_fail_fails_for_its_cause(name, engine):
    job = FAILING[name]
    if job is killed and engine == "lockstep":
        return  # it would kill this process
    with pytest.raises(RankFailure) as failure:
        run(job, toy_case(2, engine), engine)
    assert type(failure.value) is CAUSES[name][engine == "gloo"]


@pytest.mark.parametrize("state", ["idle", "collective", "loop"])
def test_the_parent_that_is_killed_is_a_program(state):
    compile(PARENT.format(state=state), "parent", "exec")


def test_a_spread_is_median_least_and_greatest():
    assert spread([3.0, 1.0, 2.0], " s") == "2 s (1 to 3)"


def test_a_page_shows_kept_missed_and_unpromised_figures():
    figures = [
        Figure("early", "<= 2 s", "1 s", True, "once"),
        Figure("late", "<= 2 s", "3 s", False, "twice"),
        Figure("free", "-", "4 s", None, "twice"),
    ]
    page = text([("Times", figures)], machine(), 7.0)
    assert "| early | <= 2 s | 1 s | kept |" in page
    assert "| late | <= 2 s | 3 s | MISSED |" in page
    assert "| free | - | 4 s | - |" in page
    assert "- early: once.\n- late; free: twice.\n" in page
    assert page.endswith("The run took 7 s.\n")


def test_a_section_that_cannot_run_here_keeps_its_figures():
    on_a_gpu = [Figure("kernel", "<= 2 s", "1 s", True, "once")]
    here = [Figure("kernel", "<= 2 s", "not run: needs CUDA", None, "-")]
    page = text([("Kernels", here)], "2026-01-01: here.", 7.0)
    assert "not run" in text([("Kernels", here)], "2026-01-03: here.", 7.0, page)
    measured = with_section(page, "Kernels", on_a_gpu, "2026-01-02: there.")
    assert with_section(measured, "Kernels", here, "2026-01-03: here.") == measured
    again = text([("Kernels", here)], "2026-01-03: here.", 7.0, measured)
    assert "Measured apart, 2026-01-02: there.\n\n" in again and "| 1 s | kept |" in again and "not run" not in again


def test_a_section_is_measured_apart():
    page = text([("Times", [Figure("early", "-", "1 s", None, "once")])] * 1, "2026-01-01: here.", 7.0)
    later = [Figure("early", "-", "2 s", None, "again")]
    replaced = with_section(page, "Times", later, "2026-02-02: there.")
    assert replaced.count("## Times") == 1 and "| early | - | 2 s |" in replaced and "1 s" not in replaced
    assert "\n2026-01-01: here.\n" in replaced and "## Times\n\nMeasured apart, 2026-02-02: there.\n\n|" in replaced
    added = with_section(replaced, "Sizes", later, "2026-02-02: there.")
    assert added.index("## Times") < added.index("## Sizes") < added.index("The run took 7 s.")
    assert with_section(added, "Sizes", later, "2026-02-02: there.") == added
