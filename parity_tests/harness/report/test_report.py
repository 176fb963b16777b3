"""The forms of a verdict: text, HTML, JSON, JUnit, and an exception."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from shardproof import integers, permutation, scheme, values
from shardproof.cli import expected
from shardproof.engines.failure import Raised
from shardproof.report import summary
from shardproof.report.html_page import fragment, page
from shardproof.report.merging import merge_reports
from shardproof.report.report import GradientMismatch, ValueMismatch
from shardproof.report.sentence import Sentence, as_text
from shardproof.report.summary import Outcome, Place
from shardproof.verify_one_case import verify_case


def identity(x):
    return x


def of_ones(function, **more):
    """Ones, so that every number of the report can be computed by hand."""
    return scheme(
        **{
            "reference": identity, "mesh": {"tp": (1, 2)}, "inputs": {"x": "b/tp"}, "outputs": "b/tp",
            "draw": {"x": values("ones")}, "nograd": ("x",), "dtypes": ("float32",), **more,
        }
    )(function)  # fmt: skip


def doubled(mesh, x):
    return x + x


def tripled_on_rank_1(mesh, x):
    return x * (3.0 if mesh.rank("tp") == 1 else 1.0)


def unharmed(mesh, x):
    return x * 1


def broken(mesh, x):
    raise ValueError("no such thing")


def report_of(function, b=4, **more):
    declaration = of_ones(function, **more)
    return verify_case(declaration, declaration.case(tp=2, b=b, dtype="float32"))


# The budget of 1, where four elements stand for four terms: 4 u sqrt(4) 1 + u 1 = 9 u = 5.4e-7, u = 2^-24.
DOUBLED = """\
doubled    tp=2   lockstep   1 example   float32
  verdict   tensor  error    budget   ratio  where
  MISMATCH  out     1.0e+00  5.4e-07  1.9e6  (0) float32, owner tp 0
    off by the constant factor 2 (= tp): a reduction is missing or repeated, or a mean divides by a local count
  protocol ok   cost not declared   hygiene ok
failing case: tp=2 b=4 float32 seed=0"""

UNHARMED = """\
unharmed    tp=2   lockstep   1 example   float32
  verdict  tensor  error    budget   ratio  where
  equal    out     0.0e+00  5.4e-07  0      (0) float32
  protocol ok   cost not declared   hygiene ok"""


def test_text():
    assert str(report_of(doubled)) == DOUBLED
    assert str(report_of(unharmed)) == UNHARMED


def test_the_gpus_that_ranks_share_are_shown(monkeypatch):
    report = report_of(unharmed)
    on_nccl = replace(report, case=report.case.replace(engine="nccl"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert str(on_nccl).startswith("unharmed    tp=2   nccl on 1 GPU   1 example   float32")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(on_nccl).startswith("unharmed    tp=2   nccl   1 example   float32")


def scaled(mesh, x, scale, count):
    return x * scale * (2.0 if mesh.size("tp") == 2 else 1.0)


def test_a_failing_case_is_shown_with_its_scalar_inputs():
    declared = {"reference": lambda x, scale, count: x * scale, "inputs": {"x": "b/tp", "scale": "", "count": ""}}
    draw = {"x": values("ones"), "scale": values("ones"), "count": integers(3, 3)}
    report = report_of(scaled, **declared, draw=draw, nograd=("x", "scale"))
    assert "failing case: tp=2 b=4 float32 seed=0, scale=1 count=3" in str(report).splitlines()
    assert report.to_dict()["scalars"] == {"scale": 1.0, "count": 3}
    assert "tp=2 b=4 float32 seed=0, scale=1 count=3" in fragment(report).replace("\n", " ")


def test_text_names_the_owner_of_the_worst_element():
    line = str(report_of(tripled_on_rank_1)).splitlines()[2]
    assert line == "  MISMATCH  out     2.0e+00  5.4e-07  3.7e6  (2) float32, owner tp 1"


def test_text_of_a_failed_rank():
    lines = str(report_of(broken)).splitlines()
    assert lines[0] == "broken    tp=2   lockstep   1 example   float32"
    assert lines[1].startswith("  raised: rank ") and lines[1].endswith(" raised ValueError: no such thing")
    assert lines[-1] == "failing case: tp=2 b=4 float32 seed=0"


def test_findings_stand_on_separate_lines():
    def noisy(mesh, x):
        x.data.add_(1)
        return x - 1

    assert str(report_of(noisy)).splitlines()[3:6] == [
        "  protocol ok",
        "  cost not declared",
        "  hygiene: ranks 0, 1: input 'x' was modified, first at (0,)",
    ]


def test_verdicts_and_exceptions():
    assert [report_of(f).verdict for f in (unharmed, doubled, broken)] == ["equal", "mismatch", "raised"]
    report_of(unharmed).raise_if_failed()
    with pytest.raises(ValueMismatch) as caught:
        report_of(doubled).raise_if_failed()
    assert str(caught.value) == "\n" + DOUBLED
    with pytest.raises(Raised):
        report_of(broken).raise_if_failed()

    def wrong_backwards(mesh, x):
        return x.detach() * 1 + 0 * x

    with pytest.raises(GradientMismatch):
        report_of(wrong_backwards, nograd=()).raise_if_failed()


def test_only_a_report_that_is_equal_is_true():
    """As in `assert scheme.verify()`."""
    assert report_of(unharmed) and not report_of(doubled) and not report_of(broken)


def test_short_numbers():
    tensor = report_of(doubled).tensors[0]
    assert (tensor.error, tensor.where, tensor.label, tensor.dtype) == (1.0, (0,), "out", "float32")
    assert tensor.ratio == tensor.error / tensor.budget
    assert tensor.budget == 9 * 2.0**-24 + 4 * 2.0**-126


def test_html():
    html = report_of(doubled)._repr_html_()
    assert "<pre>doubled    tp=2   lockstep" in html and "MISMATCH" in html
    assert html.count("<figure>") == 2  # the owners of its one tensor, and its errors
    named = report_of(broken)._repr_html_()
    assert "<figure>" not in named and "raised ValueError: no such thing" in named


def test_html_is_escaped():
    def angry(mesh, x):
        raise ValueError("<b>x</b>")

    html = report_of(angry)._repr_html_()
    assert "&lt;b&gt;x" in html and "<b>" not in html


def test_trace_has_a_line_for_each_collective():
    def total(mesh, x):
        import torch.distributed as dist

        y = x.clone()
        dist.all_reduce(y, group=mesh["tp"])
        return y

    report = report_of(total, inputs={"x": "b tp=P"}, outputs="b tp=I")
    ranks = sorted(line.partition(":")[0] for line in report.ledger_text().splitlines())
    assert ranks == ["rank 0", "rank 1"]
    assert "all_reduce float32[4] SUM (group tp, #0) at test_report.py:" in report.ledger_text()
    assert report_of(unharmed).ledger_text() == ""


def test_json():
    record = json.loads(json.dumps(report_of(doubled).to_dict()))
    assert record["verdict"] == "mismatch" and record["ok"] is False
    assert record["case"]["mesh"] == {"tp": 2}
    [tensor] = record["tensors"]
    assert (tensor["tensor"], tensor["error"], tensor["where"], tensor["ok"]) == ("out", 1.0, [0], False)
    assert tensor["notes"] == [
        "off by the constant factor 2 (= tp): a reduction is missing or repeated, or a mean divides by a local count"
    ]
    assert json.loads(json.dumps(report_of(broken).to_dict()))["failure"].startswith("raised: rank ")


def test_junit():
    reports = [report_of(f) for f in (unharmed, doubled, broken)]
    outcome = Outcome(reports, {"here:absent": "has no GPU"}, {reports[0].scheme: 1.25})
    suite = ElementTree.fromstring(summary.as_junit(outcome))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    passed, mismatch, failed, skipped = suite.findall("testcase")
    assert (passed.get("name"), passed.get("time"), passed.find("failure")) == ("unharmed", "1.250", None)
    assert suite.get("time") == "1.250" and passed.get("classname") is None
    assert {p.get("name") for p in passed.iter("property")} == {"ratio", "examples", "undecided", "trace_seconds"}
    assert mismatch.find("failure").get("message") == "mismatch"
    assert "off by the constant factor 2" in mismatch.find("failure").text
    assert failed.find("failure").get("message") == "raised"
    assert skipped.find("skipped").get("message") == "has no GPU"


def test_junit_says_where_a_scheme_stands():
    report, here = report_of(unharmed), str(Path("schemes/mine.py").absolute())
    places = {report.scheme: Place("unharmed", here, 7), "b:absent": Place("absent", "/a/b.py", 9)}
    outcome = Outcome([report], {"b:absent": "has no GPU"}, places=places)
    cases = ElementTree.fromstring(summary.as_junit(outcome)).findall("testcase")
    assert [[case.get(key) for key in ("classname", "name", "file", "line")] for case in cases] == [
        ["schemes.mine", "unharmed", "schemes/mine.py", "7"],
        ["a.b", "absent", "/a/b.py", "9"],
    ]


def of_two_files():
    """A scheme that passes, and one of the same name in another file that does not."""
    right = report_of(unharmed)
    wrong = replace(report_of(doubled), scheme="new:unharmed")
    places = {
        right.scheme: Place("unharmed", "/schemes/old.py", 3),
        wrong.scheme: Place("unharmed", "/schemes/new.py", 4),
    }
    return Outcome([right, wrong], seconds={right.scheme: 1.0, wrong.scheme: 2.0}, places=places), right, wrong


def test_schemes_of_one_name_in_two_files_are_two_test_cases():
    outcome, _, _ = of_two_files()
    suite = ElementTree.fromstring(summary.as_junit(outcome))
    assert (suite.get("tests"), suite.get("failures"), suite.get("time")) == ("2", "1", "3.000")
    passed, failed = suite.findall("testcase")
    assert (passed.get("file"), passed.get("time"), passed.find("failure")) == ("/schemes/old.py", "1.000", None)
    assert (failed.get("file"), failed.get("time")) == ("/schemes/new.py", "2.000")
    assert failed.find("failure").get("message") == "mismatch"


def test_schemes_of_one_name_are_told_apart_wherever_they_are_printed():
    outcome, _, _ = of_two_files()
    titles = ["/schemes/old.py::unharmed", "/schemes/new.py::unharmed"]
    assert list(outcome.titles.values()) == titles
    assert all(title in summary.timing(outcome) for title in titles)
    console = Console(width=120, record=True, file=io.StringIO())
    summary.show(console, outcome, summary.VerifyOptions())
    text = console.export_text()
    assert all(title in text for title in titles) and f"{titles[1]}:\nunharmed " in text
    html = page(outcome.reports, titles=outcome.titles)
    for title in titles:
        assert html.count(f'id="scheme-{title}"') == html.count(f'href="#scheme-{title}"') == 1


def test_an_expected_failure_is_that_of_one_file(tmp_path):
    outcome, right, wrong = of_two_files()
    file = tmp_path / "expected.txt"
    file.write_text("/schemes/new.py::unharmed mismatch # issue 12\n")
    outcome.expected = expected.read(str(file), outcome.places, {})
    assert outcome.expected.keys() == {wrong.scheme}
    assert outcome.is_expected(wrong) and outcome.status == 0 and outcome.unexpected_passes == []
    suite = ElementTree.fromstring(summary.as_junit(outcome))
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    file.write_text("unharmed mismatch")
    with pytest.raises(ValueError, match="2 schemes are called 'unharmed'; write /schemes/old"):
        expected.read(str(file), outcome.places, {})
    only = {right.scheme: outcome.places[right.scheme]}
    assert expected.read(str(file), only, outcome.places).keys() == only.keys()  # a name of this run comes first


def test_junit_names_the_meshes_that_were_left_out():
    report = replace(report_of(unharmed), left_out={"tp=2": "b=7 cannot be sharded"})
    properties = ElementTree.fromstring(summary.as_junit(Outcome([report]))).iter("property")
    assert {p.get("name"): p.get("value") for p in properties}["left_out"] == "tp=2: b=7 cannot be sharded"


def test_many_examples_become_one_report():
    declaration = of_ones(unharmed, draw={"x": values("normal")})
    reports = [verify_case(declaration, declaration.case(seed=seed, dtype="float32")) for seed in range(5)]
    report = merge_reports(reports)
    assert report.ok and report.examples == 5 and report.meshes == ("tp=1", "tp=2")
    assert report.tensors[0].ratio == max(r.tensors[0].ratio for r in reports)
    failing = merge_reports([*reports, report_of(doubled)])
    assert failing.examples == 6 and failing.meshes == ("tp=2",)
    assert failing.tensors[0].error == 1.0 and not failing.ok


def test_a_report_of_many_examples_shows_the_last_one_on_the_largest_mesh():
    declaration = of_ones(unharmed)
    meshes = [(2, 0), (2, 1), (1, 2)]
    reports = [verify_case(declaration, declaration.case(tp=tp, seed=seed, dtype="float32")) for tp, seed in meshes]
    assert merge_reports(reports).case == reports[1].case
    assert merge_reports(reports[2:]).case == reports[2].case


def test_a_report_of_many_examples_shows_a_plain_call_with_gradients():
    declaration = of_ones(unharmed, mesh={"tp": (1, 2, 4)}, nograd=())
    calls = [(1, {}), (2, {}), (2, {"overwritten": True}), (4, {"no_grad": True})]
    cases = [declaration.case(tp=tp, dtype="float32").replace(conditions=conditions) for tp, conditions in calls]
    reports = [verify_case(declaration, case) for case in cases]
    assert all(report.ok for report in reports) and merge_reports(reports).case == cases[1]
    long = verify_case(declaration, declaration.case(tp=4, b=400, dtype="float32"))
    assert merge_reports([*reports, long]).case == cases[1]
    assert merge_reports([reports[0], *reports[2:]]).case == cases[2]
    assert merge_reports([reports[0], reports[3]]).case == cases[3]


def test_a_terminal_breaks_sentences_at_80_columns_below_their_beginning():
    note = "    off by the constant factor 0.5 (= 1/tp): a reduction is missing or repeated, or a mean divides by 2"
    for width in (80, 200):
        terminal = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        terminal.print(Sentence(note))
        first, second = terminal.file.getvalue().splitlines()
        assert len(first) <= 80 and first.startswith("    off") and second.startswith("      ")
        assert " ".join((first + " " + second).split()) == note.strip()
    file = Console(file=io.StringIO(), width=80, color_system=None)
    file.print(Sentence(note), soft_wrap=True)
    assert file.file.getvalue() == note + "\n"


def test_a_pipe_breaks_sentences_at_the_columns_that_are_set(capsys, monkeypatch):
    note = "    off by the constant factor 0.5 (= 1/tp): a reduction is missing or repeated, or a mean divides by 2"
    monkeypatch.delenv("COLUMNS", raising=False)
    Console().print(Sentence(note), soft_wrap=True)
    assert capsys.readouterr().out == note + "\n"
    for columns in (60, 90):
        monkeypatch.setenv("COLUMNS", str(columns))
        Console().print(Sentence(note), soft_wrap=True)
        first, second = capsys.readouterr().out.splitlines()
        assert columns - 20 < len(first) <= columns and second.startswith("      ")
        assert as_text(Sentence(note)) == note  # of a replay file


def test_a_heading_of_80_columns_narrows_its_gaps_before_it_breaks():
    heading = "vocab_parallel_logprob    tp=1 tp=2 tp=4   lockstep   20 examples   float32 bfloat16"
    for width, printed in ((80, re.sub(" {3,}", "  ", heading)), (60, None)):
        terminal = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        terminal.print(Sentence(heading))
        lines = terminal.file.getvalue().splitlines()
        assert lines == [printed] if printed else len(lines) == 2 and lines[1].startswith("  ")


def test_a_narrow_terminal_indents_the_owner_of_a_wrong_element():
    report = report_of(doubled)
    for width, lines in ((60, 2), (120, 1)):
        terminal = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        terminal.print(report)
        shown = terminal.file.getvalue().splitlines()
        start = next(number for number, line in enumerate(shown) if line.startswith("  MISMATCH"))
        row = shown[start : start + lines]
        assert " ".join(row).split()[-3:] == ["owner", "tp", "0"] and max(map(len, row)) <= width
        assert row[1:] == ["    owner tp 0"][: lines - 1]


def test_a_report_of_a_rank_that_raised_has_its_small_integers():
    """Ids and offsets, of which a function may reject a few values only."""

    def picky(mesh, x, place):
        if place.max() >= 1:
            raise ValueError("no such place")
        return x * 2.0

    declared = scheme(
        reference=lambda x, place: x * 2.0, mesh={"tp": (2,)}, inputs={"x": "b/tp", "place": "n"}, outputs="b/tp",
        dims={"n": (3, 30)}, draw={"x": values("normal"), "place": permutation()}, dtypes=("float32",),
    )(picky)  # fmt: skip
    few, many = (verify_case(declared, declared.case(b=2, n=n)) for n in (3, 30))
    shown = re.search(r"place \(3\) of 'n' = \[(\d), (\d), (\d)\]", few.shards)
    assert shown and sorted(shown.groups()) == ["0", "1", "2"]
    assert many.shards.endswith("place (30) of 'n'")
