"""shardproof schedule: by name, by file, as JSON, and its mistakes."""

import json
from pathlib import Path

import pytest

from shardproof.report.out_path import ENDINGS


def test_a_schedule_by_the_beginning_of_its_name(shardproof):
    status, out, err = shardproof("schedule", "zbv", "--pp", "4", "--microbatches", "8")
    assert (status, err) == (0, "")
    first, *rows, legend = out.splitlines()
    assert legend == (
        "F forward, I input gradient, W weight gradient; small letters: every second chunk of a rank; "
        "number: micro-batch; dot: idle"
    )
    assert first == "ZBVZeroBubble: 4 ranks, 8 stages, makespan 51"
    assert [row.partition("|")[0] for row in rows] == ["rank 0 ", "rank 1 ", "rank 2 ", "rank 3 "]
    assert all(row.endswith("| idle 5.9%, live 8") for row in rows)


def test_no_line_is_wider_than_its_reader(shardproof, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = shardproof("schedule", "zbv", "--pp", "4", "--microbatches", "8")
    assert max(map(len, out.splitlines())) <= 80


def test_a_schedule_as_json(shardproof):
    status, out, _ = shardproof("schedule", "GPIPE", "--pp", "2", "--microbatches", "1", "--json", "--times", "1,2,3")
    assert status == 0
    document = json.loads(out)
    assert (document["schedule"], document["makespan"], document["stage_to_rank"]) == ("GPipe", 12, [0, 1])
    assert document["ranks"][0] == {
        "idle": 6,
        "bubble": 0.5,
        "peak_live": 1,
        "events": [["0F0", 0, 1], ["0B0", 7, 12]],
    }


def test_a_schedule_is_written_and_read_as_a_file(shardproof):
    sizes = ("--pp", "2", "--microbatches", "4", "--stages-per-rank", "3")
    _, out, _ = shardproof("schedule", "interleaved1", *sizes, "--csv", "mine.csv", "--figure", "mine.png")
    assert Path("mine.png").read_bytes().startswith(b"\x89PNG")
    status, again, err = shardproof("schedule", "mine.csv")
    assert (status, err) == (0, "")
    assert again == out.replace("Interleaved1F1B", "mine.csv")


def test_a_file_for_more_ranks_is_rejected(shardproof):
    Path("mine.csv").write_text("0F0,0B0\n")
    err = shardproof("schedule", "mine.csv", "--pp", "2")[2]
    assert err.endswith(" is missing; there must be one row for each of --pp 2 ranks\n")


@pytest.mark.parametrize("option", ["--pp", "--microbatches"])
def test_a_number_below_one_is_rejected_by_its_option(shardproof, option):
    status, _, err = shardproof("schedule", "zbv", "--pp", "2", "--microbatches", "2", option, "0")
    assert (status, err) == (2, f"shardproof: {option} '0' is not a whole number of at least 1\n")


def test_help_names_the_endings_of_a_picture(shardproof):
    text = " ".join(shardproof("schedule", "--help")[1].split())
    assert "a path ending in .png, .svg or .pdf" in text and set(ENDINGS) == {".png", ".svg", ".pdf"}


def test_a_wrong_file_is_reported_with_its_cell(shardproof):
    Path("mine.csv").write_text("0F0,0B0\n1B0,1F0\n")
    status, out, err = shardproof("schedule", "mine.csv", "--pp", "2")
    assert (status, out) == (2, "")
    assert err == "shardproof: schedule 'mine.csv' row 2, column 1: '1B0' comes before '1F0'\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["interleaved", "--pp", "2", "--microbatches", "4"], "is not one of Interleaved1F1B, InterleavedZeroBubble"),
        (["zbw", "--pp", "2", "--microbatches", "4"], "schedule 'zbw' is not one of GPipe, 1F1B, "),
        (["zbv", "--pp", "2"], "schedule 'zbv' needs --pp and --microbatches"),
        (["zbv", "--pp", "2", "--microbatches", "2", "--times", "1,2"], "--times '1,2' is not F,I,W, such as 1,1,2"),
        (
            ["dualpipev", "--pp", "2", "--microbatches", "3"],
            ": schedule 'dualpipev': --microbatches 3 cannot be scheduled by DualPipeV over --pp 2 (n >= 2 * pp); "
            "use 4\n",
        ),
        (
            ["zbv", "--pp", "2", "--microbatches", "2", "--stages-per-rank", "3"],
            ": schedule 'zbv': --stages-per-rank 3, but ZBVZeroBubble has exactly 2 on each rank; use 2\n",
        ),
        (["zbv", "--pp", "2", "--microbatches", "2", "--times", "1,-1,1"], ": --times 1,-1,1: I must be finite and at"),
        (["zbv", "--pp", "2", "--microbatches", "2", "--p2p", "-1"], ": --p2p -1.0 must be finite and at least 0\n"),
        (["none.csv", "--figure", "x.jpg"], ": --figure x.jpg is not a picture; end it in .png, .svg, .pdf\n"),
        (["none.csv"], "schedule 'none.csv' does not exist"),
    ],
)
def test_a_mistake_is_one_sentence(shardproof, arguments, words):
    status, out, err = shardproof("schedule", *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
