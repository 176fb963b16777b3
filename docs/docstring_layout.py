"""Convert docstrings to reStructuredText: sentences wrap, formulas and specs stay in columns, sections become fields.

The docstrings are plain text for a reader of the source: an indented block and lines in columns are laid out by hand,
`Cost:`, `Errors:` and `Source:` begin a section. A page may have any width, so only text that is laid out by hand stays
a box.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import groupby
from textwrap import dedent

SECTION = re.compile(r"^(Cost|Errors|Source):( +|$)")
HANGING = 8  # columns that a section's further lines are indented by
ROW = re.compile(r"^ {4}\w[\w.]*(?: \w+)?  +(?=\S)")
FIRST_COLUMN = re.compile(r"^\S+(?: \S+)* {2,}(?=\S)")
COLUMNS = re.compile(r"(?<![.;:,] )(?<=\S) {2,}(?=\S)|\S {3,}\S")
FORMULA = re.compile(r"^[\w.]+(\[[^\]]*\]|\([^)]*\))? ([\w{}|]+ )?= ")
SENTENCE = re.compile(r"^([A-Z][a-z]+|`[^`]+`) [\w`(]")  # "The l = s/cp positions" is no formula
ITEM = re.compile(r"^(- |\d+\. )")
NAME = re.compile(r"^[A-Za-z_]\w*(\.\w+)*$")
ESCAPED = re.compile(r"([\\*_|<>])")


def as_rst(lines: list[str], arguments: Collection[str] = ()) -> list[str]:
    """The lines of a docstring as reStructuredText; names in backticks are links, unless they are `arguments`."""
    return [text for block in _blocks(lines) for text in (*_rst(block, arguments), "")]


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Paragraphs, indented blocks and sections, in order. A section lasts until the next line that is not indented."""
    block: list[str] = []
    for line in (line.rstrip() for line in lines):
        in_section = block and SECTION.match(block[0])
        ends = not line or SECTION.match(line) or (in_section and not line.startswith(" "))
        if not ends and block and not in_section:
            is_indented = line.startswith("    ") != block[0].startswith("    ")
            ends = is_indented and not ITEM.match(block[0]) and not _goes_on(block, line)
        if ends and block:
            yield block
            block = []
        if line:
            block.append(line)
    if block:
        yield block


def _goes_on(block: list[str], line: str) -> bool:
    """Whether a line begins at the second column of a block, and so continues the text there."""
    columns = {found.end() for found in map(FIRST_COLUMN.match, block) if found}
    return len(line) - len(line.lstrip()) in columns


def _rst(block: list[str], arguments: Collection[str]) -> list[str]:
    section = SECTION.match(block[0])
    if section:
        return _field(section[1], [" " * section.end() + block[0][section.end() :], *block[1:]], arguments)
    if ITEM.match(block[0]):
        return _items(block, arguments)
    return _box(block) if _is_laid_out(block) else [_prose(block, arguments)]


def _field(name: str, lines: list[str], arguments: Collection[str]) -> list[str]:
    """A section as a field: its sentences, and between them its tables, which have another indent."""
    parts: list[str] = []
    for is_text, run in groupby(lines, key=lambda line: re.match(rf" {{{HANGING}}}\S", line) is not None):
        part = list(run)
        if is_text and not any(COLUMNS.search(line.strip()) for line in part):
            parts += [_prose(part, arguments), ""]
        else:
            parts += [*(_rows(part, arguments) or _box(part)), ""]
    return [f":{name}:", *(f"   {line}" if line else "" for line in parts)]


def _rows(lines: list[str], arguments: Collection[str]) -> list[str]:
    """A table with columns for a name and a text, as a list; empty if the lines are not such a table."""
    first = ROW.match(lines[0])
    if first is None:
        return []
    column = first.end()
    rows: list[tuple[str, list[str]]] = []
    for line in lines:
        name, text = line[:column].strip(), line[column:]
        if not text or text.startswith(" ") or (name and not line[:column].endswith("  ")):
            return []
        if name:
            rows.append((name, [text]))
        else:
            rows[-1][1].append(text)
    return [f"- ``{name}``: {_prose(text, arguments)}" for name, text in rows]


def _items(block: list[str], arguments: Collection[str]) -> list[str]:
    """A list, each item on a line of its own."""
    items: list[list[str]] = []
    mark = "- " if block[0].startswith("- ") else "#. "
    for line in block:
        if ITEM.match(line):
            items.append([line])
        else:
            items[-1].append(line)
    return [f"{mark}{_prose([ITEM.sub('', item[0]), *item[1:]], arguments)}" for item in items]


def _is_laid_out(block: list[str]) -> bool:
    """Whether line ends and columns of a block mean something."""
    is_formula = not SENTENCE.match(block[0]) and any(map(FORMULA.match, block))
    return block[0].startswith("    ") or is_formula or any(map(COLUMNS.search, block))


def _box(lines: list[str]) -> list[str]:
    return [".. code-block:: text", "", *(f"   {line}" for line in dedent("\n".join(lines)).splitlines())]


def _prose(lines: list[str], arguments: Collection[str]) -> str:
    """One long line: text in backticks becomes a link or code, and markup in the rest is escaped."""
    parts = re.split(r"(`[^`]+`)", " ".join(line.strip() for line in lines))
    text = "".join(_code(part[1:-1], arguments) if index % 2 else _escaped(part) for index, part in enumerate(parts))
    return text if text[0] in ":`\\" else f"\\{text}"  # its first character may not begin a list or a heading


def _code(text: str, arguments: Collection[str]) -> str:
    is_link = NAME.match(text) and text not in arguments
    return f":py:obj:`{text}`\\ " if is_link else f"``{text}``\\ "


def _escaped(text: str) -> str:
    return ESCAPED.sub(r"\\\1", text)
