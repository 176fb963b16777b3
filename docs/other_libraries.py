"""The tables of other libraries' functions beside ours: `python docs/other_libraries.py` writes them into their page.

Their signatures are data, of the version that the data names; ours are read from the code. So a renamed argument here
changes the page, and `--read FOLDER` compares the data with the source of an unpacked version of theirs.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import torch

DATA = Path(__file__).with_suffix(".toml")
PAGE = Path(__file__).parent / "how-to" / "coming-from-nemo-megatron-torchtitan.md"
BEGIN, END = "<!-- signatures: begin -->\n", "<!-- signatures: end -->\n"


@dataclass(frozen=True)
class Row:
    """A name of theirs: its counterpart here, with arguments that have another name, or what to do instead."""

    there: str
    here: str = ""
    note: str = ""
    instead: str = ""
    renamed: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.there.partition("(")[0]

    @property
    def cells(self) -> tuple[str, str, str]:
        """Their name, ours, and the difference of the signatures."""
        if not self.here:
            return f"`{self.name}`", "", self.instead
        package, _, name = self.here.rpartition(":")
        differences = list(differing(signature_of(self.there), ours(self.here), self.renamed))
        short = package.removeprefix("torch_impl.")
        where = f"`{short}`" if name.rpartition(".")[2] == self.name.rpartition(".")[2] else f"`{short}.{name}`"
        return f"`{self.name}`", where, "; ".join([*differences, *([self.note] if self.note else [])]) or "the same"


def signature_of(text: str) -> Signature:
    """The signature that a line of data has, defaults as text; of a name without arguments an empty one."""
    name, _, arguments = text.partition("(")
    function = ast.parse(f"def f({arguments or ')'}: ...").body[0]
    assert isinstance(function, ast.FunctionDef), name
    of = function.args
    positional = [*of.posonlyargs, *of.args]
    defaults = [None] * (len(positional) - len(of.defaults)) + of.defaults
    found = [_parameter(a.arg, d, Parameter.POSITIONAL_OR_KEYWORD) for a, d in zip(positional, defaults, strict=True)]
    pairs = zip(of.kwonlyargs, of.kw_defaults, strict=True)
    return Signature([*found, *(_parameter(a.arg, d, Parameter.KEYWORD_ONLY) for a, d in pairs)])


def _parameter(name: str, default: ast.expr | None, kind: Any) -> Parameter:
    return Parameter(name, kind, default=Parameter.empty if default is None else ast.unparse(default))


def ours(place: str) -> Signature:
    """The signature of `package:name`, with defaults as text and without self; of an autograd function its forward."""
    package, _, name = place.rpartition(":")
    found: Any = import_module(package)
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, type):
        found = found.forward if issubclass(found, torch.autograd.Function) else found
    parameters = [p for p in inspect.signature(found).parameters.values() if p.name not in ("self", "ctx")]
    return Signature([p if p.default is p.empty else p.replace(default=_text(p.default)) for p in parameters])


def _text(default: Any) -> str:
    return str(default) if isinstance(default, torch.dtype) else repr(default)


def differing(there: Signature, here: Signature, renamed: dict[str, str]) -> Iterator[str]:
    """How a call must change: arguments with another name, here alone, there alone, in another order or default."""
    theirs, mine = there.parameters, here.parameters
    if renamed:
        yield ", ".join(f"`{a}` is `{b}`" for a, b in renamed.items())
    lacking = [name for name in theirs if name not in mine and name not in renamed]
    if lacking:
        yield f"without {_listed(lacking)}"
    more = [name for name in mine if name not in theirs and name not in renamed.values()]
    if more:
        yield f"also {_listed(more)}"
    common = [name for name in theirs if name in mine]
    positional = [name for name in common if theirs[name].kind is mine[name].kind is Parameter.POSITIONAL_OR_KEYWORD]
    if positional != [name for name in mine if name in positional]:
        yield f"in the order {_listed([name for name in mine if name in positional])}"
    keywords = [n for n in common if mine[n].kind is Parameter.KEYWORD_ONLY is not theirs[n].kind]
    if keywords:
        yield f"{_listed(keywords)} by keyword alone"
    required = [n for n in common if mine[n].default is Parameter.empty is not theirs[n].default]
    if required:
        yield f"{_listed(required)} required"
    defaults = [(n, theirs[n].default, mine[n].default) for n in common if n not in required]
    for name, default, other in defaults:
        if default is not Parameter.empty and default != other:
            yield f"`{name}={other}`, there `{default}`"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def modules() -> list[dict[str, Any]]:
    """The modules of the data, each with its library, name and rows."""
    data = tomllib.loads(DATA.read_text())["module"]
    return [{**module, "rows": [Row(**row) for row in module["rows"]]} for module in data]


def tables() -> str:
    """A table for each library: their name, our package, the difference."""
    lines: list[str] = []
    library = ""
    for module in modules():
        if module["library"] != library:
            library = module["library"]
            lines += [f"### {library}", ""]
        part = f", in part: {module['part']}" if "part" in module else ""
        lines += [f"`{module['name']}`{part}", "", "| there | here, in `torch_impl` | difference |", "|---|---|---|"]
        lines += [f"| {' | '.join(row.cells)} |" for row in module["rows"]] + [""]
    return "\n".join(lines)


def page() -> str:
    """The page with its tables written anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.partition(END)[2]


def changed(folder: Path) -> Iterator[str]:
    """Lines of the data that the source under a folder does not have, for the modules that are there."""
    for module in modules():
        path = folder / (module["name"].replace(".", "/") + ".py")
        if path.exists():
            there, mine = set(public_names(path)), [row.there for row in module["rows"]]
            yield from (f"{module['name']}: {name} is not there" for name in mine if name not in there)
            if "part" not in module:
                yield from (f"{module['name']}: {name} has no row" for name in sorted(there.difference(mine)))


def public_names(path: Path) -> Iterator[str]:
    """The public functions, classes and methods of a file, as the data writes them."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if isinstance(node, ast.FunctionDef):
                yield node.name + _arguments(node)
                continue
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            yield node.name + next((_arguments(each) for each in methods if each.name == "__init__"), "")
            for each in methods:
                if not each.name.startswith("_"):
                    is_property = "property" in map(ast.unparse, each.decorator_list)
                    yield f"{node.name}.{each.name}" + ("" if is_property else _arguments(each))


def _arguments(function: ast.FunctionDef) -> str:
    of = function.args
    for each in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg):
        if each is not None:
            each.annotation = None
    for arguments in (of.args, of.posonlyargs):
        arguments[:] = [each for each in arguments if each.arg not in ("self", "ctx", "cls")]
    return f"({ast.unparse(of)})"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the tables of other libraries' functions into their page.")
    parser.add_argument("--read", type=Path, help="a folder with their packages: say which lines are out of date")
    folder = parser.parse_args(arguments).read
    if folder is None:
        PAGE.write_text(page())
        return 0
    lines = list(changed(folder))
    print("\n".join(lines) or "every line is there")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
