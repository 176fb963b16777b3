"""docs/failures.md: the cause of each cell, made from docs/failures.json.

The built manual adds the sentence of each cell and the code of each kind, at a click.
"""

from __future__ import annotations

import html
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from parity_tests.evidence.failures.cells import ENGINES, OUTSIDE, QUIET_S, WORLDS, Cell, bodies, groups
from parity_tests.evidence.failures.commands import COMMANDS
from parity_tests.evidence.failures.stored import Place, Run
from parity_tests.evidence.page import joined, markdown_table

HEAD = """# What a failure says

{summary}

Each row is a kind of failure, each column an engine, with 2 and 4 ranks. In the built manual a click on a mark shows
the sentence that is printed, and a click on a kind its code. [Read a failure](how-to/read-a-failure.md) explains the
sentences. A mark with *no rank*, *no operation* or *no line* has a sentence that lacks it.

{marks}"""
NOTES = {
    "Processes, threads and children": "On lockstep the ranks are threads of the command: a rank that is killed, or"
    " crashes in native code, ends the command with it. Its parent, which waits for it, says where the ranks were.",
    "Results": "A wrong result has no operation or line, so the sentence names only the rank.",
    "References, draws and conditions": "These run outside the ranks, so the sentence names only the line.",
    "Whole commands": "`shardproof verify` on files that could hide a verdict: it gives one, or says why not.",
}
MEANINGS = {
    "raised": "a rank raised an exception",
    "died": "a rank's process ended",
    "stalled": f"nothing moved for {QUIET_S} s",
    "deadlock": "lockstep: each rank waits for one that never comes",
    "collective mismatch": "the ranks' calls do not fit together",
    "protocol": "a call is never waited for, or other backends reject it",
    "mismatch": "a value is not the reference's",
    "hygiene": "right values; another dtype, or an input that was written to",
    "modified": "a buffer was changed while a call used it",
    "not judged": "no verdict, with the reason",
    "ended": "the command ended before it could answer",
    "done": "nothing failed",
}
FOLD = re.compile(r"<details><summary([^>]*)>(.*?)</summary><pre>.*?</pre></details>")
RANKS = re.compile(r"\branks? \d+(?:(?:, | and |-)\d+)*")


def text(run: Run) -> str:
    """The text of the page, without what a click shows."""
    return FOLD.sub(r"<span\1>\2</span>", with_sentences(run))


def with_sentences(run: Run) -> str:
    """The text of the page for the built manual."""
    marks = Counter(cell.cause for cell in run.cells.values())
    rows = [(mark, MEANINGS.get(mark, ""), str(count)) for mark, count in marks.most_common()]
    head = HEAD.format(summary=_summary(run.cells), marks=markdown_table(("mark", "meaning", "cells"), rows))
    return joined(head, *_groups(run.cells), f"{run.written_by} Its cells are in [failures.json](failures.json).")


def _summary(cells: Mapping[Place, Cell]) -> str:
    """How many kinds, how many sentences lack a part, and how long the slowest took."""
    kinds = len({kind for _, _, kind in cells})
    lacks = sum(bool(cell.lacks) for cell in cells.values())
    alone, of_commands = (
        f"{cells[place].seconds:.1f} s ({_title(place[2])}, {place[0]}, {place[1]} ranks)" if place else "no time"
        for place in (_slowest(cells, is_command) for is_command in (False, True))
    )
    return (
        f"{kinds} kinds of failure in {len(cells)} cells: {lacks or 'no'} sentence{'s' * (lacks > 1)}"
        f" lack{'s' * (lacks < 2)} a rank, an operation or a line. The slowest sentence came"
        f" {alone} after its kind began, and the slowest whole command took {of_commands}."
    )


def _slowest(cells: Mapping[Place, Cell], is_command: bool) -> Place | None:
    of = [place for place in cells if (place[2] in COMMANDS) == is_command]
    return max(of, key=lambda place: cells[place].seconds, default=None)


def _groups(cells: Mapping[Place, Cell]) -> Iterator[str]:
    """A heading and a table for each group of kinds."""
    ran = {kind for _, _, kind in cells}
    for title, names in groups().items():
        kinds = [kind for kind in names if kind in ran]
        if kinds:
            head = "".join(f"<th>{name}</th>" for name in ("kind", *ENGINES))
            rows = "\n".join(_row(kind, cells) for kind in kinds)
            yield joined(f"## {title}", NOTES.get(title, ""))
            yield f'<table class="failures">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>'


def _row(kind: str, cells: Mapping[Place, Cell]) -> str:
    """A row in one line of HTML: a blank line, which code has, would end the table."""
    of_engines = (_of_engine(name, {world: cells.get((name, world, kind)) for world in WORLDS}) for name in ENGINES)
    data = "".join(f"<td>{content}</td>" for content in (_fold(_title(kind), _source(kind)), *of_engines))
    return f"<tr>{data}</tr>"


def _of_engine(engine: str, of_worlds: Mapping[int, Cell | None]) -> str:
    """One mark if both numbers of ranks have it, else one for each; two sentences unless they are alike."""
    apart = [{world: cell} for world, cell in of_worlds.items()]
    first, *others = of_worlds.values()
    if any(_mark(cell) != _mark(first) for cell in others):
        return "".join(_mark_of(engine, one, name=f"{world} ranks: ") for one in apart for world in one)
    return _mark_of(engine, *([of_worlds] if all(_is_alike(cell, first) for cell in others) else apart))


def _mark_of(engine: str, *parts: Mapping[int, Cell | None], name: str = "") -> str:
    """The mark of the first cell, over the sentence of each part."""
    first = next(iter(parts[0].values()))
    return _fold(name + _mark(first), "\n\n".join(_printed(engine, part) for part in parts).strip(), _look(first))


def _mark(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    return f"{cell.cause}, no {', no '.join(cell.lacks)}" if cell.lacks else cell.cause


def _look(cell: Cell | None) -> str:
    """The class of a mark."""
    if cell is None:
        return "pale"
    return "lacks" if cell.lacks else "pale" if cell.cause == "done" else ""


def _is_alike(cell: Cell | None, other: Cell | None) -> bool:
    """Whether two sentences differ by the numbers of ranks alone, or in that more ranks have the same line."""
    lines, others = (set(RANKS.sub("rank", each.sentence if each else "").splitlines()) for each in (cell, other))
    return lines == others


def _printed(engine: str, of_worlds: Mapping[int, Cell | None]) -> str:
    """The first sentence, below the numbers of ranks that have it; empty if nothing was run."""
    ran = {world: cell for world, cell in of_worlds.items() if cell}
    worlds, seconds = " and ".join(map(str, ran)), " and ".join(f"{cell.seconds:.1f}" for cell in ran.values())
    return f"{engine}, {worlds} ranks, after {seconds} s:\n{next(iter(ran.values())).sentence}" if ran else ""


def _fold(mark: str, printed: str, kind: str = "") -> str:
    """A mark that shows a text at a click; the mark alone if there is none."""
    named = f' class="{kind}"' if kind else ""
    if not printed:
        return f"<span{named}>{mark}</span>"
    lines = html.escape(printed, quote=False).replace("\n", "&#10;")
    return f"<details><summary{named}>{mark}</summary><pre>{lines}</pre></details>"


def _title(kind: str) -> str:
    return kind.replace("_", " ")


def _source(kind: str) -> str:
    """The lines of a function, or the file of those that are declared outside the ranks."""
    body = bodies()[kind]
    if kind in COMMANDS:
        files = COMMANDS[kind].files.items()
        return "\n".join(f"# {file}\n{content}" for file, content in files).rstrip()
    if body is not None:
        return inspect.getsource(body).rstrip()
    from parity_tests.evidence.failures import outside, returned

    return inspect.getsource(outside if kind in OUTSIDE else getattr(returned, kind).fn).rstrip()
