"""docs/located.md: which bugs a trace of the training step locates, and in which module; the summary, and every bug."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from parity_tests.evidence.injected_bugs.catalogue.published import MISTAKES
from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug
from parity_tests.evidence.injected_bugs.report import markdown

HEAD = """# Injected bugs, located

`shardproof trace` names the first tensor of a training step that differs from one device's, and the module in which it
was made. Here every bug of the [catalogue](injected-bugs.md) that stands in one kind of module is injected into that
step, one after another, and traced in {dtype} on several meshes until something differs. *Located in* is the module
that the trace says to look in; *right* means that the bug stands there.

A bug that lets a rank fail is not located: its own message says what was raised, and where. One whose lines no
traced step calls, or that changes no tensor there, cannot be seen in this model.

Written by `python -m parity_tests.evidence.located --page docs`{stamp}.
With `--table build/located.md` it also writes a line for each bug.

{closing}

## Published mistakes

The classes of TrainVerify's artifact and the readable findings of NVIDIA/Megatron-LM #7452, each with the bug that
stands for it in this model, or the reason why none does.

{classes}
## By component

Of the bugs that change a tensor of the step or let a rank fail.

{summary}"""
COLUMNS = ("bug", "mesh", "first to differ", "located in", "verdict")
MISTAKE_COLUMNS = ("source", "mistake", "injected bug", "located in", "verdict")
NOT_RUN, EQUAL, FAILED, RIGHT, WRONG = "not run", "equal", "failed", "right", "wrong"
SHOWN = (RIGHT, WRONG, FAILED)


@dataclass(frozen=True)
class Located:
    """What became of one bug: the homes that are right, the module that differs first, and the words that named it.

    `word` is `not run` where no traced step calls a function of the bug, `equal` where no tensor differs, `failed`
    where a rank does, else `right` or `wrong`. `mesh` is where it differed.
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


def write(outcomes: Sequence[Located], dtype: str, folder: Path) -> Path:
    """Write the page, the published mistakes and a summary; returns its path."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "flax"))
    stamp = f" on {date.today().isoformat()} with Python {platform.python_version()}, {versions}"
    by_component = summary([(outcome.bug.component, outcome.word) for outcome in outcomes])
    text = HEAD.format(
        dtype=dtype, stamp=stamp, closing=closing(outcomes), classes=_mistakes(outcomes), summary=by_component
    )
    path = folder / "located.md"
    path.write_text(text)
    return path


def summary(words: Sequence[tuple[str, str]]) -> str:
    """A table of one line for each component, from (component, word) of each bug."""
    seen = Counter(words)
    components = sorted({component for component, word in seen if word in SHOWN})
    rows = [(component, *(str(seen[component, word]) for word in SHOWN)) for component in components]
    return markdown(("component", *SHOWN), rows)


def write_table(outcomes: Sequence[Located], path: Path) -> Path:
    """Write a line for each bug that changes something, a table for each component; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seen = [outcome for outcome in outcomes if outcome.word in SHOWN]
    text = "# Injected bugs, located one by one\n"
    for component in sorted({outcome.bug.component for outcome in seen}):
        rows = [_row(outcome) for outcome in seen if outcome.bug.component == component]
        text += f"\n## {component}\n\n" + markdown(COLUMNS, rows)
    path.write_text(text)
    return path


def _mistakes(outcomes: Sequence[Located]) -> str:
    by_name = {each.bug.name: each for each in outcomes}
    rows = []
    for mistake in MISTAKES:
        outcome = by_name.get(mistake.bug or "")
        verdict = (_home(outcome), outcome.word) if outcome else ("-", mistake.reason or "not tried")
        rows.append((mistake.source, mistake.words, *map(_cell, (mistake.bug or "-", *verdict))))
    return markdown(MISTAKE_COLUMNS, rows)


def _row(outcome: Located) -> tuple[str, ...]:
    name = f"{outcome.bug.name} ({outcome.bug.source})" if outcome.bug.source else outcome.bug.name
    return tuple(map(_cell, (name, outcome.mesh, outcome.message, _home(outcome), outcome.word)))


def _home(outcome: Located) -> str:
    if outcome.word == "failed":
        return "-"
    return outcome.first_module or "the model itself"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("*", "\\*")
