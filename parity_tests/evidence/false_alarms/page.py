"""docs/false-alarms.md: how many examples were judged, of which components, and every error that was reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from parity_tests.evidence.false_alarms.run import COMBINED_S, EACH, Counts
from parity_tests.evidence.page import bullets, by_component, joined, markdown_table, written_by
from shardproof.declare.counted import counted

PROMISED = 100_000
COLUMNS = ("component", "schemes", "examples", "with calling conditions", "undecided", "false alarms", "worst error")
HEAD = """# False alarms

A verdict is of no use if right code is reported as wrong. Here every built-in scheme, which is right as far as anybody
knows, is judged on drawn examples: meshes, shapes, layouts, values, dtypes, worlds around the mesh, and
[calling conditions](reference/scheme.md#calling-conditions). A report of a mismatch, of a failed rank or by
another oracle is a false alarm. *Undecided* is a case in which the reference itself jumps within rounding.
*Worst error* is the greatest error over its budget, float32 / bfloat16.

The first examples of a scheme have each combination of its options on each mesh, {each} examples or more, as far as
{seconds:.0f} s go; then all schemes get equal time: functions have a thousand examples, whole models some dozens.
Left out are schemes that lockstep does not run, and one that would be compiled anew for each shape.

{written_by}

{closing}

{table}
"""


def closing(counts: Iterable[Counts]) -> list[str]:
    """The figures, in sentences."""
    counts = list(counts)
    judged = sum(bool(each.examples) for each in counts)
    total = sum((each.examples for each in counts), Counter[str]())
    alarms, undecided = (sum(len(getattr(each, name)) for each in counts) for name in ("alarms", "undecided"))
    dtypes = ", ".join(f"{number} {dtype}" for dtype, number in total.most_common())
    few = "" if total.total() >= PROMISED else f"; the promise is made of {PROMISED}"
    return [
        f"{alarms} false alarms in {total.total()} examples of {judged} of {len(counts)} schemes ({dtypes}){few}; "
        "promised are 0.",
        f"{counted(undecided, 'example')} {'is' if undecided == 1 else 'are'} undecided.",
        f"{sum(each.conditions for each in counts)} were called under calling conditions; of each scheme there are "
        f"{min((each.examples.total() for each in counts), default=0)} examples or more; "
        f"{sum(each.seconds for each in counts):.0f} s of processor time.",
        f"{sum(min(each.examples.total(), each.combinations) for each in counts)} of "
        f"{sum(each.combinations for each in counts)} combinations of options and a mesh were judged.",
    ]


def table(counts: Iterable[Counts]) -> str:
    """A line for each component and one for all."""
    counts = list(counts)
    groups = [*by_component(counts, lambda each: each.scheme.split(".")[1]), ("all", counts)]
    return markdown_table(COLUMNS, [_row(name, group) for name, group in groups])


def sentences(counts: Iterable[Counts]) -> list[str]:
    """A line for each false alarm, then for each undecided example."""
    counts = list(counts)
    return [
        *(f"false alarm: {_name(each)} {sentence}" for each in counts for sentence in each.alarms),
        *(f"undecided: {_name(each)} {sentence}" for each in counts for sentence in each.undecided),
    ]


def text(counts: Sequence[Counts]) -> str:
    """The page."""
    head = HEAD.format(
        each=EACH,
        seconds=COMBINED_S,
        written_by=written_by("make alarms"),
        closing=bullets(closing(counts)),
        table=table(counts),
    )
    return joined(head, bullets(sentences(counts)))


def _row(name: str, group: Sequence[Counts]) -> tuple[str, ...]:
    worst = [max((each.worst.get(dtype, 0.0) for each in group), default=0.0) for dtype in ("float32", "bfloat16")]
    return (
        name,
        str(len(group)),
        str(sum(each.examples.total() for each in group)),
        str(sum(each.conditions for each in group)),
        str(sum(len(each.undecided) for each in group)),
        str(sum(len(each.alarms) for each in group)),
        " / ".join(f"{ratio:.2f}" for ratio in worst),
    )


def _name(counts: Counts) -> str:
    return counts.scheme.rpartition(":")[2]
