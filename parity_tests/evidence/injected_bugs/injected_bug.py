"""An injected bug: a text of one symbol of production that another text replaces, and how it must be caught.

`collectives:_AllReduce.forward` names a method of one of the files under torch_impl/collectives. A file can be
moved, renamed or merged into another, and the catalogue stays as it is. Where two files of a component have equal text
in symbols of one name, the part before the colon says more of the path: `collectives/all_reduce:summed`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[3]
PRODUCTION = "torch_impl"
KINDS = (
    "reduction",
    "group",
    "scale",
    "statistic",
    "border",
    "order",
    "sequence",
    "buffer",
    "random",
    "tied",
    "schedule",
    "precision",
    "call",
)


TRAIN_VERIFY, MEGATRON = "TrainVerify", "NVIDIA/Megatron-LM #7452"  # sources of published mistakes


@dataclass(frozen=True)
class InjectedBug:
    """`old`, which occurs once in the source of the symbol `at`, becomes `new`.

    `at` is a component of torch_impl and a top-level function, class, method or assigned name of one of its files, as
    `collectives:_AllReduce.forward`; the file is found. `expect` names the oracle and some of its words, as
    `gradient: off by the constant factor`; the oracle is value, gradient, protocol, cost, hygiene or the cause of a
    failed rank. `source` says where the mistake was made before. `equivalent` says why nothing observable changes;
    such a bug is listed, not counted. `survives` says why the drawn examples do not see a change that is there; such a
    bug is counted, as not caught. `module` is where a trace of the training run finds the first difference, as a glob;
    "" is the model itself, None a bug that says nothing of a module.
    """

    kinds: ClassVar[tuple[str, ...]] = KINDS

    name: str
    kind: str
    at: str
    old: str
    new: str
    expect: str
    source: str | None = None
    equivalent: str | None = None
    survives: str | None = None
    module: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in self.kinds:
            raise ValueError(f"injected bug {self.name!r}: kind {self.kind!r} is not one of {', '.join(self.kinds)}")

    @property
    def component(self) -> str:
        """The folder of torch_impl that it stands in."""
        return self.at.partition(":")[0].partition("/")[0]


class StaleBug(ValueError):
    """The text that a bug replaces does not occur exactly once in its symbol."""


@dataclass(frozen=True)
class Symbol:
    """A function, class, method or assigned name of a file: the lines from its first decorator to its end."""

    name: str
    file: str
    start: int
    end: int


@dataclass(frozen=True)
class PatchedFile:
    """A file, relative to the root, with the bug in its text, and the lines of the healthy text that are replaced.

    `symbol_lines` are those of the function, class or name around them.
    """

    file: str
    text: str
    first_line: int
    last_line: int
    symbol_lines: range = range(0)

    @property
    def replaced_lines(self) -> range:
        return range(self.first_line, self.last_line + 1)


def patched_text(bug: InjectedBug) -> PatchedFile:
    """The file that the bug changes, with the bug in it. Errors: StaleBug."""
    places = [(symbol, symbol.start + at) for symbol in named(bug) for at in _occurrences(bug.old, source(symbol))]
    if len(places) != 1:
        raise StaleBug(_why_stale(bug, [symbol for symbol, _ in places]))
    ((symbol, start),) = places
    text = _text(symbol.file)
    first = 1 + text.count("\n", 0, start)
    last = first + bug.old.rstrip("\n").count("\n")
    around = range(1 + text.count("\n", 0, symbol.start), 1 + text.count("\n", 0, symbol.end))
    return PatchedFile(symbol.file, text[:start] + bug.new + text[start + len(bug.old) :], first, last, around)


def stale_bugs(bugs: Iterable[InjectedBug]) -> list[str]:
    """The problem with each bug that cannot be injected any more."""
    messages = []
    for bug in bugs:
        try:
            patched_text(bug)
        except StaleBug as error:
            messages.append(str(error))
    return messages


def named(bug: InjectedBug) -> list[Symbol]:
    """The symbols that `at` may mean."""
    folder, _, name = bug.at.partition(":")
    return [symbol for symbol in symbols(folder) if symbol.name == name]


def symbols(folder: str) -> list[Symbol]:
    """Every symbol of the files under a path of torch_impl, which may name a file too, without its `.py`."""
    path = ROOT / PRODUCTION / folder
    files = (
        sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")] * path.with_suffix(".py").exists()
    )
    return [symbol for file in files for symbol in _symbols(str(file.relative_to(ROOT)), file.stat().st_mtime_ns)]


def source(symbol: Symbol) -> str:
    """The symbol's lines as they stand in its file."""
    return _text(symbol.file)[symbol.start : symbol.end]


def _text(file: str) -> str:
    return _read(file, (ROOT / file).stat().st_mtime_ns)


@cache
def _read(file: str, changed_ns: int) -> str:
    return (ROOT / file).read_text()


@cache
def _symbols(file: str, changed_ns: int) -> tuple[Symbol, ...]:
    text = _read(file, changed_ns)
    offsets = [0]  # of each line's first character
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    spans = _spans(ast.parse(text).body, "")
    return tuple(Symbol(name, file, offsets[first - 1], offsets[last]) for name, first, last in spans)


def _spans(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, int, int]]:
    """Name, first and last line of each symbol; those inside of functions belong to the function."""
    for node in body:
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, min([node.lineno, *(each.lineno for each in node.decorator_list)]), last
            if isinstance(node, ast.ClassDef):
                yield from _spans(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + target.id, node.lineno, last) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _spans([*node.body, *node.orelse], prefix)


def _occurrences(old: str, text: str) -> Iterator[int]:
    start = text.find(old)
    while start >= 0:
        yield start
        start = text.find(old, start + len(old))


def _why_stale(bug: InjectedBug, occurrences: Sequence[Symbol]) -> str:
    """The message of a stale bug, with the nearest symbol or the one that has the text now."""
    begin = f"injected bug {bug.name!r} is stale: "
    folder, _, name = bug.at.partition(":")
    if occurrences:
        files = sorted({symbol.file for symbol in occurrences})
        more = f"; say which with '@@ {folder}/...:{name}'" if len(files) > 1 else ""
        return f"{begin}its old text occurs {len(occurrences)} times in {bug.at} ({', '.join(files)}), not once{more}"
    everywhere = symbols(bug.component)
    with_text = [symbol for symbol in everywhere if source(symbol).count(bug.old) == 1]
    if with_text:
        smallest = min(with_text, key=lambda symbol: symbol.end - symbol.start)
        return f"{begin}its old text is not in {bug.at}, but in '@@ {bug.component}:{smallest.name}' ({smallest.file})"
    if named(bug):
        return f"{begin}its old text does not occur in {bug.at} ({named(bug)[0].file}): {bug.old!r}"
    similar = get_close_matches(name, dict.fromkeys(symbol.name for symbol in everywhere), n=1, cutoff=0.0)
    nearest = f"; the nearest name is {similar[0]!r}" if similar else f"; {PRODUCTION}/{bug.component} has no symbols"
    return f"{begin}there is no {bug.at}{nearest}; old text {bug.old!r}"
