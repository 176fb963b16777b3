"""The benchmarks' tools: the toy runs and fails as it should, and a page reports the measurements."""

import pytest

from parity_tests.evidence.benchmarks import injected_bugs
from parity_tests.evidence.benchmarks.__main__ import SECTIONS
from parity_tests.evidence.benchmarks.cells import cells_of
from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.evidence.benchmarks.page import text
from parity_tests.evidence.benchmarks.reasons import reason
from parity_tests.evidence.benchmarks.stored import Run, Section, read, whole_run, with_section, write
from parity_tests.evidence.benchmarks.survivors import PARENT
from parity_tests.evidence.benchmarks.toy import FAILING, killed, toy, toy_case
from parity_tests.evidence.benchmarks.words import PROMISED, REASONS
from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.runner import Catch, Outcome
from shardproof.engines.engines import run
from shardproof.engines.failure import CollectiveMismatch, Deadlock, Died, Raised, RankFailure, Stalled
from shardproof.places import ROOT

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
def test_each_failing_toy_fails_for_its_cause(name, engine):
    job = FAILING[name]
    if job is killed and engine == "lockstep":
        return  # it would kill this process
    with pytest.raises(RankFailure) as failure:
        run(job, toy_case(2, engine), engine)
    assert type(failure.value) is CAUSES[name][engine == "gloo"]


@pytest.mark.parametrize("state", ["idle", "collective", "loop"])
def test_the_killed_parent_is_a_program(state):
    compile(PARENT.format(state=state), "parent", "exec")


def test_a_spread_is_median_least_and_greatest():
    assert spread([3.0, 1.0, 2.0], " s") == "2 s (1 to 3)"


GRAPHS = "## Call CompiledFxGraph ab12 ## 44% in 5 calls, ## Call CompiledFxGraph cd34 ## 37% in 5 calls"
PROFILE = "mm 61% in 2 calls, c10d::send 30% in 1 calls, add 9% in 1 calls"
SLOW = "0.6 times, by round 0.7 (0.5 to 1.2e+03); ours 2.33e+03 (1 to 3) ms; peer 9 (8 to 9) ms"
FIGURES = (
    Figure("early", "<= 2 s", "1 s (0.5 to 3)", True, "once; by hand"),
    Figure("late", "<= 0.5 times", SLOW, False, f"once; by hand; {PROFILE}"),
    Figure("free", "-", "4 s", None, "once; by foot"),
)
OURS = "error 0.5 budgets; 1 all_gather, 768 bytes per rank; memory 1.13; 50 (1 to 60) ms CPU, 70 (1 to 80) ms wall"
UNSEEN = "collectives and memory not seen through torch.compile"
THEIRS = f"error 3 budgets; {UNSEEN}; 100 (1 to 110) ms CPU, 1 ms wall; 2 (1 to 3) times ours"
ARMS = (
    Figure("logprob, bfloat16: ours", "error <= 1 budget", OURS, True, "of two ranks; n=7"),
    Figure("logprob, bfloat16: theirs", "-", THEIRS, None, "of two ranks; n=7"),
)


def test_a_page_begins_with_missed_promises_and_their_time():
    page = text(Run("2026-01-01: here. Load: 1.0.", 7.0, (Section("Times", FIGURES),)))
    assert page.startswith("# Benchmarks\n\nShardproof promises 2 figures: 1 are kept, and [1 are missed](#missed).")
    assert "| [late](#times) | <= 0.5 times | 0.6 times | 1.20 times | `mm` 61%, `send` 30% |" in page
    assert page.index("## Missed") < page.index("## Times\n\nOnce.\n")
    assert "| early |  |  | 1 s | <= 2 s | kept |" in page
    assert "| late | 2,330 ms | peer 9 ms | 0.6 times | <= 0.5 times | **missed** |" in page
    assert "| free |  |  | 4 s | - | - |" in page
    assert page.endswith("The run took 7 s.\n")


def test_the_figure_farthest_from_its_promise_comes_first():
    promises = {"near": ("<= 2 s", "3 s"), "far": (">= 10 per second", "2"), "part": (">= 85% of a copy", "0.5 of it")}
    promises["nearest"] = ("<= 1.15 times", "1.15 times")  # both rounded
    figures = [Figure(name, *texts, False, "once") for name, texts in promises.items()]
    page = text(Run("2026-01-01: here. Load: 1.0.", 7.0, (Section("Times", tuple(figures)),)))
    far, part, near = (page.index(f"| [{name}]") for name in ("far", "part", "near"))
    assert far < part < near and "| 5.00 times |" in page and "| 1.70 times |" in page
    assert "| less than 1.01 times |" in page


def test_compiled_graphs_of_one_profile_count_together():
    figure = Figure("compiled", "<= 0.4 times", "0.5 times", False, f"once; {GRAPHS}, mm 11% in 5 calls")
    assert reason(figure, Section("Times", ())) == "compiled graphs 81%, `mm` 11%"


LATE = "10 times, by round 9 (8 to 12)"
TRACED = "8 examples in 9 s, 3% of it tracing references and 5% running ranks; slowest: a 4 s, b 2 s, c 1 s"


@pytest.mark.parametrize(
    ("name", "measured", "how", "expected"),
    [
        ("loop, 4 rows, alone", LATE, "once", "of the whole: `mm` 61%, `send` 30%"),
        (
            "loop, 5 rows",
            f"{LATE}; the exchange alone 23.2; 5 ms",
            "once",
            "its messages, which alone are 23.2 ",
        ),
        ("tour", "9 s", TRACED, "3% tracing references and 5% running ranks; slowest: `a` 4 s, `b` 2 s"),
        ("rate", "79 (70 to 84) examples/s", "once", "within the spread of the rounds, 70 to 84"),
        ("rate", "69 (60 to 74) examples/s", "once", "not profiled"),
    ],
)
def test_a_figure_without_a_profile_has_another_reason(name, measured, how, expected):
    profiled = Figure("loop, 4 rows, over its exchange", "<= 2 times", LATE, False, f"once; {PROFILE}")
    late = Figure(name, "80 examples/s", measured, False, how)
    assert reason(late, Section("Times", (profiled, late))).startswith(expected)


def test_every_section_states_its_promise():
    assert list(PROMISED) == list(SECTIONS.values()) and set(REASONS) <= set(PROMISED)


def test_a_page_names_the_comparison_of_each_section():
    def figure(name, promised, is_met=True):
        return Figure(name, promised, "1 times", is_met, "s=64 v=8; once")

    ring = Section(
        "Ring", (figure("ring over 2 ranks", "<= 1.15 times SDPA's"), figure("dispatch over wire, bf16", "less"))
    )
    kernel = Section(
        "Kernel", (figure("triton", ">= 85% of the copy bound", False), figure("free over liger", "-", None))
    )
    page = text(Run("2026-01-01: here. Load: 1.0.", 7.0, (ring, kernel, Section("Gate", (figure("tests", "<= 3 s"),)))))
    assert "| [Ring](#ring) | SDPA's, wire | 2 | 0 | 0 |\n| [Kernel](#kernel) | copy bound | 0 | 1 | 0 |" in page
    assert "| [Gate](#gate) | - | 1 | 0 | 0 |" in page and "\n\ns=64 v=8; once.\n\n" in page


def test_a_section_measured_on_the_same_machine_does_not_repeat_it():
    run = Run("2026-01-01: a CPU; torch 2. Load: 1.0.", 7.0, ())
    for there, printed in (("a CPU; torch 2", "machine and versions as above"), ("a GPU; torch 3", "a GPU; torch 3")):
        page = text(with_section(run, Section("Times", FIGURES, f"2026-02-02: {there}. Load: 3.0.")))
        assert f"\n\nMeasured separately, 2026-02-02: {printed}. Load: 3.0.\n\n" in page


def test_each_implementation_has_a_bar_and_a_row():
    page = text(Run("2026-01-01: here. Load: 1.0.", 7.0, (Section("Peers", ARMS),)))
    space, bar = "\N{NO-BREAK SPACE}", "█" * 8
    assert f"| ours | 50{space}ms | 1 | {bar} |\n| theirs | 100{space}ms | 2 | {bar * 2} |\n" in page
    assert "**logprob, bfloat16**: of two ranks; n=7." in page
    assert "| ours | 50 ms | 1 | 1.13 | 1 all_gather | 768 | 0.5 | kept |" in page
    assert "| theirs | 100 ms | 2 | not seen | not seen |  | 3 | - |" in page


def test_the_committed_page_shows_the_committed_figures():
    run = read(ROOT / "docs" / "benchmarks.json")
    assert run is not None and text(run) == (ROOT / "docs" / "benchmarks.md").read_text()
    for section in run.sections:
        for figure in section.figures:
            assert "e+" not in str(cells_of(figure)), figure


def test_figures_are_stored_whole(tmp_path):
    run = Run(
        "2026-01-01: here. Load: 1.0.",
        7.0,
        (Section("Times", FIGURES), Section("Peers", ARMS, "2026-01-02: there. Load: 1.0.")),
    )
    write(run, tmp_path / "figures.json")
    assert read(tmp_path / "figures.json") == run and read(tmp_path / "none.json") is None


def test_a_section_that_cannot_run_here_keeps_its_other_measurement():
    here = Section(
        "Kernels", (Figure("kernel", "<= 2 s", "not run: needs CUDA", None, "-"),), "2026-01-03: here. Load: 1.0."
    )
    there = Section("Kernels", (Figure("kernel", "<= 2 s", "1 s", True, "once"),), "2026-01-02: there. Load: 1.0.")
    run = Run("2026-01-01: here. Load: 1.0.", 7.0, (here,))
    assert whole_run([here], "2026-01-04: here. Load: 1.0.", 8.0, run).sections == (here,)
    measured = with_section(run, there)
    assert measured.sections == (there,) and with_section(measured, here) == measured
    assert whole_run([here], "2026-01-04: here. Load: 1.0.", 8.0, measured) == Run(
        "2026-01-04: here. Load: 1.0.", 8.0, (there,)
    )
    assert "## Kernels\n\nMeasured separately, 2026-01-02: there. Load: 1.0.\n\nOnce.\n" in text(measured)


def test_a_section_is_measured_separately():
    run = Run("2026-01-01: here. Load: 1.0.", 7.0, (Section("Times", FIGURES), Section("Peers", ARMS)))
    later = Section("Times", ARMS, "2026-02-02: there. Load: 1.0.")
    assert with_section(run, later).sections == (later, run.sections[1])
    sizes = Section("Sizes", FIGURES, "2026-02-02: there. Load: 1.0.")
    assert with_section(run, sizes) == Run(run.on, 7.0, (*run.sections, sizes))


def test_a_promise_of_which_too_little_is_tried_is_neither_kept_nor_missed():
    few = Figure("alarms", "0 in 100 examples", "0 in 7 examples", None, "once")
    page = text(Run("2026-01-01: here. Load: 1.0.", 7.0, (Section("Alarms", (few,)), Section("Times", FIGURES))))
    assert "promises 2 figures: 1 are kept, and [1 are missed](#missed)." in page and "1 more\ncannot be judged" in page
    assert "| 0 in 7 examples | 0 in 100 examples | not judged |" in page
    assert "| [Alarms](#alarms) | - | 0 | 0 | 1 |\n| [Times](#times) | - | 1 | 1 | 0 |" in page


@pytest.mark.parametrize(
    ("tried", "caught", "is_met"), [(68, 67, None), (100, 95, True), (100, 94, False), (99, 99, None)]
)
def test_a_share_of_injected_bugs_is_judged_if_enough_are_tried(monkeypatch, tried, caught, is_met):
    catch = Catch("scheme", 1, ("values",), "")
    outcomes = [
        Outcome(bug, 1, 1, (catch,) if number < caught else (), False, False, 0.0)
        for number, bug in enumerate([bug for bug in CATALOGUE if not bug.equivalent][:tried])
    ]
    monkeypatch.setattr(injected_bugs, "run_bugs", lambda bugs, runner: outcomes)
    monkeypatch.setattr(injected_bugs, "BugRunner", lambda cache: None)  # it would set JAX's cache for all later tests
    share, _ = injected_bugs.figures()
    assert share.is_met is is_met and share.measured.startswith(f"{caught} of {tried} ")


def test_a_run_tries_as_many_injected_bugs_as_are_promised():
    tried = [bug for bug in CATALOGUE[:: injected_bugs.EVERY] if not bug.equivalent]
    assert len(tried) >= injected_bugs.LEAST
