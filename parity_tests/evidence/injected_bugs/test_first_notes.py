"""The rule by which a first note is true of an injected bug, and the sample that it is measured on."""

import os
import signal
from dataclasses import replace

import pytest

from parity_tests.evidence.injected_bugs import first_notes
from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.first_notes import FALSE, NOTHING, TRUE, lines_of, measured, sample, truth
from parity_tests.evidence.injected_bugs.headlines import EXAMPLES, headlines
from parity_tests.evidence.injected_bugs.injected_bug import patched_text
from parity_tests.evidence.injected_bugs.trials import SchemeTrials
from shardproof.declare import discover
from shardproof.experiments.edited_lines import OR_CALLED


@pytest.mark.parametrize(
    ("kind", "note", "expected"),
    [
        ("reduction", "off by the constant factor 2 (= tp): a reduction is missing or repeated", TRUE),
        ("order", "off by the constant factor 2 (= tp): a reduction is missing or repeated", FALSE),
        ("reduction", "within what bfloat16 accumulation may do", FALSE),
        ("precision", "rounded to bfloat16: each element is the bfloat16 number next to the reference's", TRUE),
        ("precision", "within what bfloat16 accumulation may do", TRUE),
        ("precision", "wrong only where tp rank 1 owns (2 of 4 elements there)", FALSE),
        ("border", "wrong only where tp rank 1 owns (2 of 4 elements there)", TRUE),
        ("border", "a term sits 1 place off along v: an offset is wrong by 1", TRUE),
        ("scale", "a term sits 1 place off along v: an offset is wrong by 1", FALSE),
        ("scale", "no pattern; worst at (0,1)", NOTHING),
        ("reduction", "forward equal, gradient not", NOTHING),
        ("reduction", "forward equal, gradient not: all_reduce at x.py:7 [bwd] is one too many", TRUE),
        ("order", "forward equal, gradient not: all_reduce at x.py:7 [bwd] is one too many", FALSE),
        ("reduction", "right once all_reduce at x.py:7 takes AVG, not SUM", TRUE),
        ("order", "right once all_reduce at x.py:7 takes AVG, not SUM", FALSE),
        ("scale", "every output is the reference's with b times tp: it is counted tp times", TRUE),
        ("order", "every output is the reference's with b times tp: it is counted tp times", FALSE),
        ("order", "every tensor is the reference's with k one place later along s", TRUE),
        ("scale", "every tensor is the reference's with k one place later along s", FALSE),
        ("precision", "each rank computes the reference of its own shard", FALSE),
        ("call", "same values in another order, the order of memory: a view is read as if it were contiguous", TRUE),
        ("call", "same values in another order: a layout is not undone, or applied twice", FALSE),
        ("call", "right without the other call: state that depends on its sizes or values is kept between calls", TRUE),
        (
            "scale",
            "right without the other call: state that depends on its sizes or values is kept between calls",
            FALSE,
        ),
        ("buffer", "not finite first at (0), rank 0; read before its wait: all_reduce at x.py:7", TRUE),
        ("scale", "not finite first at (0), rank 0; read before its wait: all_reduce at x.py:7", FALSE),
        ("sequence", "no output of the function depends on lengths, as the reference's do", TRUE),
        ("group", "no output of the function depends on lengths, as the reference's do", TRUE),
        ("reduction", "no output of the function depends on lengths, as the reference's do", FALSE),
        ("precision", "a small error: bfloat16 accumulation could do as much", NOTHING),
    ],
)
def test_a_note_is_true_of_the_kinds_that_it_can_mean(kind, note, expected):
    assert truth(kind, note) == expected


def test_a_line_is_true_only_if_the_bug_stands_there():
    note = "right once schedule.py:8 has `a < b`, not `a <= b`, or once schedule.py:9 has `b`, not `c`"
    assert truth("order", note, ["schedule.py:8"]) == TRUE
    assert truth("order", note, ["schedule.py:9"]) == FALSE
    of_a_caller = f"right once scans.py:8 leaves out `f(x)`{OR_CALLED}"
    assert truth("order", of_a_caller, ["library.py:9"]) == NOTHING
    note = "bias is counted 2 times (= tp): each rank adds it before the sum, in linear.py:8"
    assert truth("reduction", note, ["linear.py:8"]) == TRUE
    assert truth("reduction", note, ["linear.py:9"]) == FALSE


def test_the_first_nan_is_true_only_of_a_bug_in_its_line():
    note = "not finite first at (0,1); first made by mul_ at rows.py:8"
    assert truth("border", note, ["rows.py:8"]) == TRUE
    assert truth("border", note, ["rows.py:9"]) == NOTHING


def test_a_backward_is_true_only_of_a_bug_in_its_file():
    note = "forward equal, gradient not: the backward of Sum at sums.py:8 is not the derivative of its forward"
    assert truth("scale", note, ["sums.py:12"]) == TRUE
    assert truth("scale", note, ["products.py:8"]) == FALSE


def test_the_lines_of_an_element_that_is_left_out_are_those_of_its_tuple():
    (bug,) = (bug for bug in CATALOGUE if bug.name == "the square below two triangles left out")
    file, first = patched_text(bug).file.rpartition("/")[2], patched_text(bug).first_line
    assert f"{file}:{first - 1}" in lines_of(bug) and f"{file}:{first + 1}" in lines_of(bug)


def test_the_lines_of_a_bug_are_those_of_its_own_text():
    (bug,) = (bug for bug in CATALOGUE if bug.name == "a window one key too wide")
    (line,) = lines_of(bug)
    file, number = line.split(":")
    text = patched_text(bug)
    assert text.file.endswith(file) and bug.new.strip() in text.text.splitlines()[int(number) - 1]


def _ends_its_process(bug):
    if bug.name == "first":
        os.kill(os.getpid(), signal.SIGFPE)


def test_a_bug_that_ends_the_process_is_passed_over(monkeypatch, capsys):
    monkeypatch.setattr(first_notes, "of_bug", _ends_its_process)
    bugs = [replace(CATALOGUE[0], name=name) for name in ("first", "second")]
    assert list(measured(bugs)) == [(bugs[1], None)]
    assert "first ends the process" in capsys.readouterr().out


def test_a_sample_is_drawn_across_components_and_repeats():
    drawn = sample(CATALOGUE, 60)
    assert len({bug.name for bug in drawn}) == 60 and drawn == sample(CATALOGUE, 60)
    components = {bug.component for bug in CATALOGUE if bug.expect.startswith("value") and not bug.survives}
    assert {bug.component for bug in drawn} >= components
    assert sample(CATALOGUE, 60, seed=1) != drawn


@pytest.mark.slow
def test_the_notes_of_a_sum_that_was_averaged():
    (bug,) = (bug for bug in CATALOGUE if bug.name == "sum averaged" and bug.component == "collectives")
    near = [SchemeTrials(scheme, EXAMPLES) for scheme in discover.built_in() if ".collectives." in scheme.key]
    said = headlines(bug, near)
    assert said is not None and not said.is_undecided
    assert [first_notes.truth_for(bug, note) for note in (said.alone, said.tested)] == [TRUE, TRUE]
