"""Which bugs a traced step can find, how answers are kept, and the page."""

import pytest
from typer.testing import CliRunner

from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.catalogue.published import MISTAKES
from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug
from parity_tests.evidence.journal import Journal
from parity_tests.evidence.located import __main__ as located
from parity_tests.evidence.located import page as located_page
from parity_tests.evidence.located import reached
from parity_tests.evidence.located.page import Located
from shardproof.training.run import SIZES, Run

BY_NAME = {bug.name: bug for bug in CATALOGUE}
SMALL = {"streams": 2, "length": 48, "sizes": {**SIZES, "layers": ("attention",)}}


@pytest.fixture(scope="module")
def ran():
    return reached.functions_run(Run.on({"cp": 2, "tp": 2}, **SMALL, attention="ring"))


@pytest.mark.slow
def test_a_bug_is_reached_where_its_function_runs(ran):
    assert reached.is_reached(BY_NAME["gate and up exchanged"], ran)
    assert reached.is_reached(BY_NAME["the gradient of a rank's own keys dropped"], ran)  # it runs in a backward
    assert not reached.is_reached(BY_NAME["states that run on through documents"], ran)  # no Mamba layer
    assert not reached.is_reached(BY_NAME["gathered keys' gradients not summed"], ran)  # the ring gathers none


def test_a_line_outside_of_functions_is_reached_where_its_file_is_imported(ran):
    file = "torch_impl/models/loss.py"
    changed = {"kind": "scale", "old": "IGNORED = -100", "new": "IGNORED = -1", "expect": "value: "}
    assert reached.is_reached(InjectedBug(name="another nobody", at="models:IGNORED", **changed), ran)
    assert reached.owner(file, 1) is None


def outcome(name, word, **fields):
    return Located(BY_NAME[name], located.home_of(BY_NAME[name]) or "", word, **fields)


SOME = [
    outcome(
        "gate and up exchanged",
        "right",
        first_module="layers.0.mlp",
        message="input of layers.0.mlp.down_proj",
        mesh="cp=2",
    ),
    outcome("one rank's other norm eps", "wrong", first_module="norm", message="output of norm", mesh="cp=2"),
    outcome("the backward without the mask", "failed", message="rank 1 raised a | b", mesh="cp=2"),
    outcome("keys that are not turned", "equal"),
    outcome("padding is predicted", "not run"),
]


def test_the_page():
    text = located_page.text(SOME, "float64")
    assert "5 bugs: 2 change a tensor of the step, and 1 of these are located in the right module; 1 end in a" in text
    assert "| context_parallel | 0 | 0 | 1 |\n| models | 1 | 1 | 0 |\n" in text
    assert "| TrainVerify | one rank's other constant | one rank's other norm eps | norm | wrong |" in text
    assert all(f"| {each.words} |" in text for each in MISTAKES)


def test_the_table():
    text = located_page.one_by_one(SOME)
    assert "| gate and up exchanged | cp=2 | input of layers.0.mlp.down_proj | layers.0.mlp | right |" in text
    assert "rank 1 raised a \\| b | - | failed |" in text


@pytest.mark.parametrize(
    ("words", "meets_promise"),
    [
        (["right"] * 9 + ["wrong"], True),
        (["right"] * 8 + ["wrong"], False),
        (["right", "failed", "equal"], True),
        (["failed", "equal", "not run"], False),
        ([], False),
    ],
)
def test_the_promise_counts_bugs_that_change_something(words, meets_promise):
    assert located.meets_promise([outcome("gate and up exchanged", word) for word in words]) is meets_promise


def test_each_bug_in_each_dtype_has_a_key_of_its_own():
    bugs, dtypes = (SOME[0].bug, SOME[1].bug), ("float64", "float32")
    assert len({located.key(bug, dtype) for bug in bugs for dtype in dtypes}) == 4
    assert located.key(bugs[0], dtypes[0]) == located.key(bugs[0], dtypes[0])


def test_a_kept_answer_is_not_looked_for_again(tmp_path, monkeypatch):
    answer = {"home": "norm", "word": "right", "first_module": "norm", "message": "output of norm", "mesh": "cp=2"}
    journal = Journal(tmp_path / "answers")
    journal.add({"key": located.key(SOME[0].bug, "float64"), "answer": answer})
    monkeypatch.setattr(located, "located", None)
    assert list(located.all_located([SOME[0].bug], "float64", Journal(journal.path))) == [
        Located(SOME[0].bug, **answer)
    ]


def test_every_published_class_has_a_bug_that_counts_or_a_reason():
    assert all((each.bug is None) == bool(each.reason) for each in MISTAKES)
    named = [BY_NAME[each.bug] for each in MISTAKES if each.bug is not None]
    assert all(not bug.equivalent and located.home_of(bug) is not None for bug in named)


SAMPLE = (
    "one rank's other norm eps",
    "the norm's sum over ranks computed and lost",
    "the gradient of what columns read",
)


@pytest.mark.slow
def test_the_command(monkeypatch, tmp_path):
    """A sample is located in the right modules and written; the second time, the answers come from the file."""
    monkeypatch.setattr(located, "SMALL", SMALL)
    monkeypatch.setattr(located, "HOW", (({"cp": 2, "tp": 2}, {}),))
    app = located.typer.Typer()
    app.command()(located.main)
    arguments = [
        *SAMPLE,
        "--keep",
        str(tmp_path / "answers"),
        "--page",
        str(tmp_path),
        "--table",
        str(tmp_path / "table.md"),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "3 of these are located in the right module" in done.output
    monkeypatch.setattr(located, "located", None)
    assert CliRunner().invoke(app, arguments).output == done.output
    assert "| one rank's other norm eps (TrainVerify) | cp=2 tp=2 |" in (tmp_path / "table.md").read_text()
    assert CliRunner().invoke(app, ["no such bug"]).exit_code == 2
