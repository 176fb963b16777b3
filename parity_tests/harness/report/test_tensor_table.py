"""Notes in a report's table: under the line of one tensor, or once for all that share them."""

from dataclasses import replace

from parity_tests.harness.report.test_report import doubled, report_of
from shardproof.explain.note import Note

FACTOR, LINE = "off by the constant factor 2 (= tp)", "forward equal, gradient not: all_reduce at a.py:1 [bwd]"
THREE = ("out", "d/d x", "d/d scale")


def noted(**notes_of_tensor):
    """Lines of a report on the wrong tensors `THREE`, below their notes by number: `_0`, `_1`, `_2`."""
    (tensor,) = report_of(doubled).tensors
    tensors = tuple(replace(tensor, name=label.removeprefix("d/d "), role=role) for label, role in zip(
        THREE, ("output", "gradient", "gradient"), strict=True
    ))  # fmt: skip
    notes = {label: tuple(map(Note, notes_of_tensor.get(f"_{i}", ()))) for i, label in enumerate(THREE)}
    lines = str(replace(report_of(doubled), tensors=tensors, notes=notes)).splitlines()[2:-2]
    return [line if line.startswith("    ") else line.split("  ")[2 if "MISMATCH" in line else 1] for line in lines]


def test_a_note_that_tensors_share_is_said_once_under_their_names():
    assert noted(_0=("wrong on rank 1",), _1=(FACTOR, LINE), _2=(FACTOR, LINE)) == [
        "out",
        "    wrong on rank 1",
        "d/d x",
        "d/d scale",
        "d/d x, d/d scale:",
        f"    {FACTOR}",
        f"    {LINE}",
    ]


def test_a_headline_that_tensors_share_is_read_before_other_notes():
    assert noted(_0=("wrong on rank 1",), _1=(FACTOR, LINE), _2=(FACTOR,))[:2] == ["out", "    wrong on rank 1"]
    assert noted(_0=(FACTOR, "wrong on rank 1"), _1=(FACTOR, LINE)) == [
        *THREE,
        "out, d/d x:",
        f"    {FACTOR}",
        "out:",
        "    wrong on rank 1",
        "d/d x:",
        f"    {LINE}",
    ]


def test_a_note_says_nothing_that_stands_elsewhere():
    """A line of the table has the place of its worst element, and another tensor its own note."""
    places = [(f"no pattern; worst at ({i}), owner tp rank 0",) for i in (1, 2)]
    assert noted(_0=places[0], _1=places[1], _2=(FACTOR,)) == [
        "out",
        "d/d x",
        "d/d scale",
        f"    {FACTOR}",
        "out, d/d x:",
        "    no pattern",
    ]
    assert noted(_0=(f"see d/d x: {FACTOR}",), _1=(FACTOR,))[:2] == ["out", "    see d/d x"]


def test_many_tensors_of_one_note_are_counted():
    report = report_of(doubled)
    five = {f"d/d w{i}": (Note(FACTOR),) for i in range(5)}
    assert "  all 5 wrong tensors:" in str(replace(report, notes=five)).splitlines()
    assert "  d/d w0, d/d w1, d/d w2, d/d w3, d/d w4:" in str(
        replace(report, notes={**five, "out": (Note(LINE),)})
    )  # not all
