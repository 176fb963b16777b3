"""A verdict as a page: well-formed, whole in one file, with every rank, step, transfer and byte of the ledger in it."""

import re
from dataclasses import replace

import pytest

from parity_tests.specimens.page_reader import read
from shardproof import scheme, values
from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Cost
from shardproof.engines.failure import Deadlock, Raised
from shardproof.engines.ledger import CallSite, Finding, Ledger, LedgerRow
from shardproof.engines.movement import steps
from shardproof.explain.note import Note
from shardproof.report.html_page import page
from shardproof.report.movement_picture import Grid
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case
from torch_impl.collectives import all_gather, all_reduce

NASTY = "<b>&\"x'</b>\x1b[31m"
BYTES = 8  # of a float64


def gathered_twice(mesh, x):
    whole = all_gather(x, mesh["tp"], out="R", dim=0)
    return all_reduce(whole, mesh["tp"], out="R")  # each rank has it all already


@pytest.fixture(scope="module")
def wrong():
    declaration = scheme(
        reference=lambda x: x, mesh={"tp": (2, 4)}, inputs={"x": "b/tp"}, outputs="b tp=R",
        draw={"x": values("normal")}, dtypes=("float64",),
    )(gathered_twice)  # fmt: skip
    report = verify_case(declaration, declaration.case(tp=4, b=8))
    return replace(report, replay="replay_12345678.py")


@pytest.fixture(scope="module")
def equal():
    declaration = scheme(
        reference=lambda x: x, mesh={"tp": (2, 4)}, inputs={"x": "b/tp"}, outputs="b tp=R",
        draw={"x": values("normal")}, dtypes=("float64",),
        cost=lambda case: Cost({"all_gather": (1, 16)}, {"reduce_scatter": (1, 64)}),
    )(gathered)  # fmt: skip
    return verify_case(declaration, declaration.case(tp=4, b=8))


def gathered(mesh, x):
    return all_gather(x, mesh["tp"], out="R", dim=0)


def report_by_hand(**fields):
    case = CaseSpec("m:by_hand", {"tp": 2}, {"b": 2})
    rows = [
        LedgerRow(rank, 0, "all_reduce", (0, 1), "tp", ("float32",), ((3,),), 12, 12, source="my.py:28")
        for rank in (0, 1)
    ]
    return Report("m:by_hand", case, ledger=Ledger(rows), **fields)


def test_the_verdict_comes_first_and_then_the_findings(wrong):
    body = read(page([wrong])).all("body")[0]
    assert body.text.startswith("gathered_twice \N{BALLOT X} mismatch" + "out, d/d x: off by the constant factor 4")
    headings = [heading.text for heading in body.all("h2")]
    assert headings == ["The failing case: tp=4 b=8 float64 seed=0", "Tensors", "Run it again"]
    assert body.all("pre")[-1].text == str(wrong)


def test_what_is_wrong_is_said_once(wrong):
    """Beside the drawing, and except for the terminal's report, which is folded."""
    (terminal,) = [each for each in read(page([wrong])).all("details") if each.all("pre", "terminal")]
    assert "open" not in terminal.attributes
    unfolded = read(page([wrong])).all("body")[0].text.replace(terminal.text, "")
    for note in {note for notes in wrong.notes.values() for note in notes}:
        assert unfolded.count(note) == 1, note


def test_errors_come_before_owners_and_wrong_tensors_before_equal_ones(wrong):
    """Also on a phone, where they are below each other."""
    equal_first = replace(wrong, tensors=(replace(wrong.tensors[0], ratio=0.0), *wrong.tensors[1:]))
    drawn = read(page([equal_first])).all("div", "tensor")
    captions = [[caption.text.partition(":")[0] for caption in each.all("figcaption")] for each in drawn]
    assert {each[0] for each in captions} == {"error over budget"} and all(len(each) == 2 for each in captions)
    assert [bool(each.all("span", "badge")) for each in drawn] == [True, False]


def test_one_file_without_scripts_and_network(wrong, equal):
    for text in (page([wrong]), page([equal]), page([wrong, equal])):
        tree = read(text)
        assert not tree.all("script") and not tree.all("link") and not tree.all("img")
        assert re.findall(r"https?:|url\(|@import|src=", text) == []
        assert "prefers-color-scheme: dark" in tree.all("style")[0].text


def test_each_rank_step_and_transfer_is_drawn(wrong):
    picture = read(page([wrong])).all("div", "movement")[0]
    head, *drawn = picture.all("div", "step")
    assert [name.text for name in head.all("text")] == [f"rank {rank}" for rank in range(4)]
    expected = steps(wrong.ledger)
    assert len(drawn) == len(expected) == 4  # two of the forward, two of the backward
    assert [("bwd" in step.classes) for step in drawn] == [False, False, True, True]
    assert [step.phase for step in expected] == ["fwd", "fwd", "bwd", "bwd"]
    for step, element in zip(expected, drawn, strict=True):
        assert step.rows[0].source in element.all("code")[0].text
        names = {None: "sum"} | {rank: f"rank {rank}" for rank in range(4)}
        titles = sorted(title.text for path in element.all("path") for title in path.all("title"))
        assert titles == sorted(
            f"{names[move.source]} to {names[move.target]}: {move.size} B" for move in step.transfers
        )
        boxes = [title.text for box in element.all("rect", "cell") for title in box.all("title")]
        assert {box.partition(":")[0] for box in boxes} == {f"rank {rank}" for rank in range(4)}


def test_the_drawing_names_the_reduction():
    report = report_by_hand()
    rows = [replace(row, reduce_op="MAX") for row in report.ledger.rows]
    step = read(page([replace(report, ledger=Ledger(rows))])).all("div", "step")[1]
    titles = {title.text for path in step.all("path") for title in path.all("title")}
    assert titles == {f"rank {rank} to max: 12 B" for rank in (0, 1)} | {f"max to rank {rank}: 12 B" for rank in (0, 1)}


def test_a_phone_shows_every_rank_and_wraps_commands_and_python(wrong):
    """At 420 pixels: drawings of up to 8 ranks shrink, commands and code wrap, the terminal's columns scroll."""
    tree = read(page([wrong]))
    narrow = tree.all("style")[0].text.partition("@media (max-width: 760px)")[2]
    assert ".movement svg { max-width: 100%; height: auto; }" in narrow
    assert [rule for rule in narrow.splitlines() if "white-space: pre;" in rule] == [
        "  .shardproof pre.terminal { white-space: pre; overflow-wrap: normal; }"
    ]
    assert [block.text for block in tree.all("pre", "terminal")] == [str(wrong)]
    assert any(block.text.startswith("python replay_") for block in tree.all("pre"))
    picture = tree.all("div", "movement")[0]
    least = [float(re.search(r"min-width: (\d+)px", drawn.attributes["style"])[1]) for drawn in picture.all("svg")]
    assert len(least) == len(picture.all("div", "step"))
    assert Grid(tuple(range(8)), 1).style == "min-width: 358px" and max(least) < 358  # of 420 less borders


def test_lines_are_as_wide_as_their_bytes(wrong):
    widths = {}
    for line in read(page([wrong])).all("path", "transfer"):
        size = int(re.search(r"(\d+) B$", line.all("title")[0].text)[1])
        widths.setdefault(size, set()).add(float(line.attributes["stroke-width"]))
    assert sorted(widths) == [2 * BYTES, 8 * BYTES] and all(len(found) == 1 for found in widths.values())
    assert min(widths[2 * BYTES]) < min(widths[8 * BYTES])


def test_the_bytes_equal_the_ledgers(wrong, equal):
    for report in (wrong, equal):
        table = read(page([report])).all("table")[-1]
        lines = [[cell.text for cell in line.all("td")] for line in table.all("tr")[1:]]
        drawn = {}
        for phase, op, ranks, calls, size, _ in lines:
            first, _, last = ranks.partition("-")
            count = int(last or first) - int(first) + 1
            drawn[{"forward": "fwd", "backward": "bwd"}[phase], op] = (count * int(calls), count * int(size))
        issued = {}
        for row in report.ledger.rows:
            calls, size = issued.get((row.phase, row.op), (0, 0))
            issued[row.phase, row.op] = (calls + 1, size + row.payload)
        assert drawn == issued
        total = sum(row.payload for row in report.ledger.rows)
        assert f"{total} bytes of all ranks together" in page([report])


def test_a_pass_has_its_ledger_beside_the_declared_cost(equal):
    tree = read(page([equal]))
    assert tree.text.count("\N{CHECK MARK} equal") == 1 and not tree.all("span", "badge")
    assert [line.all("td")[-1].text for line in tree.all("table")[-1].all("tr")[1:]] == ["\N{CHECK MARK} the same"] * 2
    assert "verify_case(gathered, CaseSpec.from_json(" in tree.text


def test_another_cost_than_declared_is_said_beside_it(equal):
    declared = (Cost({"all_gather": (1, 99), "broadcast": (1, 4)}, {"reduce_scatter": (1, 64)}),) * 4
    tree = read(page([replace(equal, declared_costs=declared, cost=("forward all_gather: ...",))]))
    lines = [[cell.text for cell in line.all("td")] for line in tree.all("table")[-1].all("tr")[1:]]
    assert lines == [
        ["forward", "all_gather", "0-3", "1", "16", "\N{BALLOT X} 1 call of 99 bytes"],
        ["forward", "broadcast", "0-3", "0", "0", "\N{BALLOT X} 1 call of 4 bytes"],
        ["backward", "reduce_scatter", "0-3", "1", "64", "\N{CHECK MARK} the same"],
    ]
    assert len(tree.all("div", "blamed")) == 1


def test_the_line_that_is_blamed_is_marked():
    note = Note("forward equal, gradient not", sites=(CallSite("all_reduce", "my.py:28"),))
    tree = read(page([report_by_hand(notes={"d/d x": (note,)}, protocol=(Finding("x"),))]))
    (step,) = tree.all("div", "blamed")
    assert "my.py:28" in step.text and len(step.all("rect", "culprit")) == 2
    assert [badge.text for badge in tree.all("span", "badge")] == ["blamed", "blamed"]


def test_a_rank_that_is_missing_has_an_empty_box():
    report = report_by_hand(failure=Deadlock("no rank can run", rank=0, op="all_reduce", source="my.py:28"))
    report = replace(report, ledger=Ledger(report.ledger.rows[:1]))
    tree = read(page([report]))
    assert [box.all("title")[0].text for box in tree.all("rect", "absent")] == ["rank 1 has not issued it"]
    assert "deadlock: no rank can run" in tree.all("ul", "wrong")[0].text


def test_the_case_that_explains_is_drawn_before_the_smallest(wrong):
    small = report_by_hand(notes=wrong.notes, protocol=(Finding("x"),), clearer_report=wrong, smallest=True)
    tree = read(page([small]))
    titles = [heading.text for heading in tree.all("h2")]
    assert "The clearest case: tp=4 b=8 float64 seed=0" in titles
    assert tree.all("summary")[0].text == "The smallest case: tp=2 b=2 float32 seed=0"
    assert len(tree.all("div", "movement")) == 2 and wrong.case.json in tree.text


def test_the_replay_is_there_as_commands(wrong):
    commands = next(block.text for block in read(page([wrong])).all("pre"))
    assert commands == "python replay_12345678.py\nshardproof replay replay_12345678.py --engine gloo"


def test_several_schemes_have_a_table_with_failures_first(wrong, equal):
    tree = read(page([equal, wrong], "2 schemes, 1 mismatch, 0 not run."))
    table = tree.all("table")[0]
    assert [line.all("td")[0].text for line in table.all("tr")[1:]] == ["gathered_twice", "gathered"]
    anchors = {node.attributes["id"] for node in tree.all() if "id" in node.attributes}
    assert {link.attributes["href"].removeprefix("#") for link in table.all("a")} <= anchors
    assert tree.all("title")[0].text == "2 schemes, 1 mismatch, 0 not run. - shardproof"
    assert [title.text.split()[0] for title in tree.all("h1")[1:]] == ["gathered_twice"]
    assert page([equal, wrong]).index('id="scheme-gathered_twice"') < page([equal, wrong]).index('id="scheme-gathered"')
    assert "No verdict" in page([])


def test_a_page_names_the_schemes_that_have_no_report(equal, wrong):
    sentences = ("not run: narrow: is declared for gloo only", "not judged: bad.py:9: scheme 'typo': spec 'b/tq'")
    for reports in ([equal], [equal, wrong], []):
        paragraphs = [each.text for each in read(page(reports, "closing", sentences)).all("p")]
        assert set(sentences) <= set(paragraphs)


def test_whatever_a_user_wrote_is_escaped():
    failure = Raised(f"rank 0 raised ValueError: {NASTY}", rank=0, op=NASTY, source=NASTY)
    case = CaseSpec(f"m:{NASTY}", {"tp": 2}, options={"name": NASTY})
    row = LedgerRow(0, 0, NASTY, (0, 1), NASTY, (NASTY,), ((1,),), 4, 4, reduce_op=NASTY, source=NASTY)
    report = Report(f"m:{NASTY}", case, ledger=Ledger([row]), failure=failure, notes={NASTY: (Note(NASTY),)})
    for text in (page([report]), page([report, report])):
        tree = read(text)
        assert not tree.all("b") or all(
            node.text == NASTY.replace("\x1b", "\N{REPLACEMENT CHARACTER}") for node in tree.all("b")
        )
        assert "\x1b" not in text and tree.all("h1")[0].text


def test_code_in_a_note_is_set_as_code():
    note = Note("right once my.py:28 has `a < b`, not `a`")
    body = read(page([report_by_hand(notes={"out": (note,)})])).all("body")[0]
    (item,) = body.all("li")
    assert item.text == "out: right once my.py:28 has a < b, not a"
    assert [code.text for code in item.all("code")] == ["a < b", "a"]


def test_a_notebook_has_the_text_first(wrong):
    tree = read(wrong._repr_html_())
    assert tree.all("pre")[0].text == str(wrong)
    assert len(tree.all("div", "movement")) == 1 and len(tree.all("style")) == 1
