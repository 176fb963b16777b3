"""docs/line-types.md: what types find that values do not, what values find that types do not, and the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parity_tests.evidence.page import bullets, joined, markdown_table, share, written_by
from shardproof.line_types.opinion import CLASHES, COULD_NOT

INTRODUCTION = """# Types as a second opinion

`shardproof verify --types` asks [spmd-types](https://github.com/meta-pytorch/spmd_types) where the types of a scheme's
tensors clash (`pip install 'shardproof[types]'`). A type says of a tensor on an axis of the mesh whether the ranks have
shards of it (V), copies whose gradients add up (R) or are the same (I), or terms of a sum (P): the letters of a
[spec](concepts/gradient-types.md). Each line of the function is typed while it runs once, as rank 0 on torch's fake
backend, from the specs of the inputs to those of the outputs. A failing scheme is typed without being asked, if
spmd-types is installed; then only a clash is printed, one line under the table:

```text
  types: line 14: partial value over tp in relu
```

It is an opinion and no verdict: the exit status does not depend on it. "could not type line 14" says that the checker
does not know an operation there, and nothing of the line.
"""

ONLY_TYPES = """**What types find that a verdict does not name.** The line. Values that went through a nonlinear
function as terms are wrong everywhere, and no pattern of the errors leads back to it; the report says "no pattern". So
it is with a gradient that lacks its sum over the ranks in the middle of a function. Types need no reference, no second
rank and no numbers."""

ONLY_VALUES = """**What a verdict finds that types do not see.** Every mistake that keeps the types: a wrong divisor, a
wrong constant, an offset, a permuted layout, a mask, a border between sequences, the wrong row, a rounding, a buffer
that is used too early, a hand-written backward. A type is a claim about ranks, and a rule of a Function
(`shardproof/line_types/rules.py`) says in its place what its body is believed to do, so that no mistake inside of it
clashes."""

NOT_TYPED = """**What is not typed.** An axis that shards a dim otherwise than in contiguous blocks: a type has the
dim's index and no order. An autograd Function without a rule; a loop whose tensors are made without one that is typed;
a pipeline's stages; DTensors, which keep their own placements."""


@dataclass(frozen=True)
class Located:
    """One injected bug: the sentence on its types, whether a verdict sees it, and the verdict's first words."""

    name: str
    component: str
    kind: str
    sentence: str
    caught: bool
    words: str

    @property
    def by_types(self) -> bool:
        return self.sentence.startswith(CLASHES)

    @property
    def word(self) -> str:
        """`both`, `types`, `values` or `none`."""
        if self.by_types:
            return "both" if self.caught else "types"
        return "values" if self.caught else "none"


def text(sentences: Mapping[str, str], outcomes: Sequence[Located], seed: int) -> str:
    """The page, from the sentence on each built-in scheme and the sampled bugs."""
    kinds = Counter(map(_kind, sentences.values()))
    alarms = [f"{name}: {each}" for name, each in sentences.items() if each.startswith(CLASHES)]
    words, total = Counter(each.word for each in outcomes), len(outcomes)
    figures = [
        f"{share(words['both'], total)} by both, {words['types']} by types alone, {words['values']} by the verdict "
        f"alone, {words['none']} by neither.",
        f"The types of {sum(_kind(each.sentence) == 'agree' for each in outcomes)} of the {total} agree where the bug "
        f"is, and those of {sum(_kind(each.sentence) in ('could not', 'not typed') for each in outcomes)} cannot be "
        "followed there.",
    ]
    of_schemes = [
        f"{len(alarms)} clashes, each of which would be a false alarm.",
        f"{kinds['agree']} agree where they can be followed, {kinds['could not']} stop at an operation that the "
        f"checker does not know, {kinds['not typed']} have no axis that is typed.",
    ]
    found = [[each.name, each.component, each.sentence] for each in outcomes if each.by_types]
    return joined(
        INTRODUCTION,
        "## What each finds that the other cannot",
        ONLY_TYPES,
        ONLY_VALUES,
        NOT_TYPED,
        "## Measured",
        written_by("make line-types", "spmd-types", seed=seed),
        f"The {len(sentences)} built-in schemes, which are right:",
        bullets([*of_schemes, *alarms]),
        f"{total} bugs, a sample of the [injected bugs](injected-bugs.md), each in up to five schemes of its component "
        "that run its lines. Those bugs were written for the oracles of a verdict, and most stand inside Functions:",
        bullets(figures),
        markdown_table(("bug", "component", "types"), found) if found else "",
    )


def _kind(sentence: str) -> str:
    """`clash`, `agree`, `not typed` or `could not`."""
    if sentence.startswith(CLASHES):
        return "clash"
    if sentence.startswith("not typed"):
        return "not typed"
    return "could not" if sentence.startswith((COULD_NOT.removesuffix(" it"), COULD_NOT)) else "agree"
