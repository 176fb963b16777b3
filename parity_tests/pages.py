"""Parse pages into fenced blocks, links, headings and commands. Read by `test_pages.py`."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT = {"_build", "jupyter_execute"}
# `make docs` writes these
GENERATED = {"docs/gallery.md", "docs/images/crossovers.svg", "docs/images/crossovers-dark.svg"}
FENCE = re.compile(r"^(?P<mark>`{3,}|:{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=mark) *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
IMAGE = re.compile(r'<(?:img|source)\b[^>]*\bsrc(?:set)?="([^"]+)"')
DIRECTIVE = re.compile(r"^\{(?:image|figure|literalinclude|include)\} +(\S+)")
PATH_IN_CODE = re.compile(r"`((?:\.?\w[\w.-]*/)+[\w.-]*\.(?:py|md|ipynb|toml|txt|png|svg))`")


@dataclass(frozen=True)
class Block:
    """A fenced block: the `nth` of its language on its page, counted from 0."""

    page: str
    language: str
    nth: int
    text: str

    def __str__(self) -> str:
        return f"{self.page} {self.language} {self.nth}"


def pages() -> list[str]:
    """Markdown files that people read, relative to the repository."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted({path.relative_to(ROOT).as_posix() for path in paths if not BUILT & set(path.parts)} - GENERATED)


def is_complete(page: str) -> bool:
    """Whether a reader copies the Python blocks of a page into files, so that each block imports what it uses."""
    return page in ("README.md", "docs/index.md") or page.startswith("docs/how-to/")


@cache
def text_of(page: str) -> str:
    """The text of a page. For a notebook's script: the text of its Markdown cells."""
    text = (ROOT / page).read_text()
    if not page.endswith(".py"):
        return text
    cells = re.split(r"^# %%(.*)$", text, flags=re.MULTILINE)[1:]
    markdown = [body for kind, body in zip(cells[::2], cells[1::2], strict=True) if "[markdown]" in kind]
    return re.sub(r"^# ?", "", "\n".join(markdown), flags=re.MULTILINE)


def blocks(page: str) -> list[Block]:
    counted: dict[str, int] = {}
    collected = []
    for match in FENCE.finditer(text_of(page)):
        language = match["language"].strip()
        nth = counted.get(language, 0)
        counted[language] = nth + 1
        collected.append(Block(page, language, nth, match["text"]))
    return collected


def links(page: str) -> list[str]:
    """Targets of links and pictures, files that directives show, and the pages that tables of contents list."""
    prose = FENCE.sub("", text_of(page))
    prose = re.sub(r"`[^`\n]*`", "", prose)
    targets = LINK.findall(prose) + IMAGE.findall(prose)
    for match in FENCE.finditer(text_of(page)):
        language = match["language"].strip()
        targets += DIRECTIVE.findall(language)
        if language == "{toctree}":
            entries = [line for line in match["text"].splitlines() if line and not line.startswith(":")]
            targets += [f"{entry}.md" for entry in entries]
    return targets


def paths_in_code(page: str) -> list[str]:
    """Paths of the repository that prose names in backticks."""
    return PATH_IN_CODE.findall(FENCE.sub("", text_of(page)))


def anchors(page: str) -> set[str]:
    """The part after # in a link to each heading of the page."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(block: Block) -> list[list[str]]:
    """The commands of a block, split into words. In a console block only the lines that start with `$` are commands."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]
