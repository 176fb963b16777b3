"""docs/located.md: which bugs a trace of the training step locates, and in which module: a summary, then every bug."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from parity_tests.evidence.injected_bugs.catalogue.published import MISTAKES
from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug
from parity_tests.evidence.page import by_component, markdown_table, tables, written_by

HEAD = """# Injected bugs, located

`shardproof trace` names the first tensor of a training step that differs from one device's, and the module in which it
was made. Here every bug of the [catalogue](injected-bugs.md) that stands in one kind of module is injected into that
step, one after another, and traced in {dtype} on several meshes until something differs. *Located in* is the module
that the trace says to look in; *right* means that the bug stands there.

A bug that lets a rank fail is not located: the message of the failure says what was raised, and where. A bug cannot be
seen in this model if no traced step calls its lines, or if it changes no tensor of the step.

{written_by}
With `--table build/located.md` it also writes a line for each bug.

{closing}

## Published mistakes

The classes of TrainVerify's artifact and the readable findings of NVIDIA/Megatron-LM #7452, each with the bug that
stands for it in this model, or the reason why none does.

{classes}

## By component

Only bugs that change a tensor of the step or let a rank fail are counted here.

{summary}
"""
COLUMNS = ("bug", "mesh", "first to differ", "located in", "verdict")
MISTAKE_COLUMNS = ("source", "mistake", "injected bug", "located in", "verdict")
NOT_RUN, EQUAL, FAILED, RIGHT, WRONG = "not run", "equal", "failed", "right", "wrong"
SHOWN = (RIGHT, WRONG, FAILED)


@dataclass(frozen=True)
class Located:
    """The outcome of one bug: the modules that count as right (`home`), and the first module and tensor that differ.

    `word` is `not run` if no traced step calls a function of the bug, `equal` if no tensor differs, `failed` if a rank
    fails, else `right` or `wrong`. `mesh` is the first mesh on which a tensor differs or a rank fails.
    """

    bug: InjectedBug
    home: str
    word: str
    first_module: str = ""
    message: str = ""
    mesh: str = ""

    @property
    def is_right(self) -> bool:
        return self.word == RIGHT


def closing(outcomes: Sequence[Located]) -> str:
    """The figures, in a sentence."""
    count = Counter(outcome.word for outcome in outcomes)
    differing = count["right"] + count["wrong"]
    return (
        f"{len(outcomes)} bugs: {differing} change a tensor of the step, and {count['right']} of these are located in "
        f"the right module; {count['failed']} end in a failed rank, {count['equal']} change nothing that is traced, "
        f"{count['not run']} stand in functions that no traced step calls."
    )


def text(outcomes: Sequence[Located], dtype: str) -> str:
    """The page, the published mistakes and a summary."""
    return HEAD.format(
        dtype=dtype,
        written_by=written_by("python -m parity_tests.evidence.located --page docs", "flax"),
        closing=closing(outcomes),
        classes=_mistakes(outcomes),
        summary=summary(outcomes),
    )


def summary(outcomes: Sequence[Located]) -> str:
    """A table of one line for each component."""
    seen = [(outcome.bug.component, outcome.word) for outcome in outcomes if outcome.word in SHOWN]
    groups = by_component(seen, lambda each: each[0])
    rows = [(component, *(str(group.count((component, word))) for word in SHOWN)) for component, group in groups]
    return markdown_table(("component", *SHOWN), rows)


def one_by_one(outcomes: Sequence[Located]) -> str:
    """A line for each bug that changes something, a table for each component."""
    rows = ((outcome.bug.component, _row(outcome)) for outcome in outcomes if outcome.word in SHOWN)
    return tables("Injected bugs, located one by one", COLUMNS, rows)


def _mistakes(outcomes: Sequence[Located]) -> str:
    by_name = {each.bug.name: each for each in outcomes}
    rows = []
    for mistake in MISTAKES:
        outcome = by_name.get(mistake.bug or "")
        verdict = (_home(outcome), outcome.word) if outcome else ("-", mistake.reason or "not tried")
        rows.append((mistake.source, mistake.words, *map(_cell, (mistake.bug or "-", *verdict))))
    return markdown_table(MISTAKE_COLUMNS, rows)


def _row(outcome: Located) -> tuple[str, ...]:
    name = f"{outcome.bug.name} ({outcome.bug.source})" if outcome.bug.source else outcome.bug.name
    return tuple(map(_cell, (name, outcome.mesh, outcome.message, _home(outcome), outcome.word)))


def _home(outcome: Located) -> str:
    if outcome.word == "failed":
        return "-"
    return outcome.first_module or "the model itself"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("*", "\\*")
