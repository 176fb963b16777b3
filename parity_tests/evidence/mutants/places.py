"""Every mutant of production that may change a caller's result. RULES lists the exceptions; the page prints them."""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from parity_tests.evidence.injected_bugs.injected_bug import PRODUCTION, ROOT
from parity_tests.evidence.mutants.mutant import Mutant
from parity_tests.evidence.mutants.operators import changes

RULES = (
    "texts: docstrings, messages of exceptions, warnings and logs, `__repr__` and `__str__`",
    "types: annotations, `TypeAlias`, blocks under `TYPE_CHECKING`, the package `torch_impl.contract`",
    "cost alone: decorators such as `functools.cache`, constants whose name says BYTES, BLOCK, CHUNK, CACHE or ROWS",
    "Triton's kernels (`softmax.py` of `torch_impl.kernels`), which have a test of their own",
    "blocks under `with torch.cuda.device(...)`, which no CPU enters: of `_seed_generators` of "
    "`torch_impl.parallelizer.adapters.meta_init`; tests enter the rest with stand-ins for kernels",
    "files that only import, `__init__.py`",
    "mutants whose bytecode is that of the original, line numbers aside, and those that cannot be compiled",
)
LEFT_OUT_FILES = ("__init__.py", "kernels/softmax.py")
LEFT_OUT_COMPONENTS = ("contract",)
SHOWN = ("__repr__", "__str__", "__format__")
SPOKEN = ("warn", "warning", "info", "debug", "error", "exception")
OF_COST = re.compile(r"BYTES|BLOCK|CHUNK|CACHE|ROWS")
_PARSER = threading.Lock()  # Python 3.11 counts the depth of a tree for all threads together, and raises SystemError


def candidates() -> list[Mutant]:
    """All mutants that the rules make, in order of file and place; some have the original's bytecode."""
    files = [path for path in sorted((ROOT / PRODUCTION).rglob("*.py")) if _is_mutated(path)]
    return [mutant for file in files for mutant in _file_mutants(file)]


def sampled(count: int, seed: int, component: str = "") -> list[Mutant]:
    """About `count` mutants that change the bytecode; each component has its share of them, at least one.

    The order is drawn too, so that in each component a larger sample of the same seed begins with the smaller one. A
    mutant's place in the order follows from its line and function: a change of other lines leaves the sample as it was.
    """
    by_component = dict[str, list[Mutant]]()
    for mutant in candidates():
        by_component.setdefault(mutant.component, []).append(mutant)
    total = sum(map(len, by_component.values()))
    chosen = []
    for name, each in sorted(by_component.items()):
        if component in ("", name):
            share = count if component else max(1, round(count * len(each) / total))
            chosen += itertools.islice(filter(changes_bytecode, _shuffle(each, seed)), share)
    return chosen


def _shuffle(mutants: Iterable[Mutant], seed: int) -> list[Mutant]:
    """Sort mutants by a hash; a number tells equal changes of equal lines in one function apart."""
    before = Counter[str]()

    def drawn(mutant: Mutant) -> bytes:
        identity = f"{seed}\0{mutant.file}\0{mutant.symbol}\0{mutant.kind}\0{mutant.place}"
        before[identity] += 1
        return hashlib.sha256(f"{identity}\0{before[identity]}".encode()).digest()

    return sorted(mutants, key=drawn)


def changes_bytecode(mutant: Mutant) -> bool:
    """Whether the file can be compiled, and to something else than the original."""
    return _code(mutant.patched.text) not in (None, _code((ROOT / mutant.file).read_text()))


def lines_of_users(mutant: Mutant) -> frozenset[int]:
    """The lines that may use a value computed at import: a default's function, or the file. None for code in a body."""
    body = lines_of_function(mutant)
    if not body:
        return frozenset(range(1, 1 + len((ROOT / mutant.file).read_text().splitlines())))
    return frozenset() if mutant.last_line >= min(body) else body


def lines_of_function(mutant: Mutant) -> frozenset[int]:
    """The lines in the body of the innermost function around a mutant, with its docstring; empty without one."""
    innermost = _innermost(mutant, ast.FunctionDef)
    if not isinstance(innermost, ast.FunctionDef):
        return frozenset()
    return frozenset(range(innermost.body[0].lineno, (innermost.end_lineno or innermost.lineno) + 1))


def lines_of_statement(mutant: Mutant) -> frozenset[int]:
    """The lines of the innermost statement around a mutant, without the statement's body if it has one."""
    innermost = _innermost(mutant, ast.stmt)
    last = innermost.body[0].lineno - 1 if hasattr(innermost, "body") else innermost.end_lineno
    return frozenset(range(innermost.lineno, max(last, innermost.lineno) + 1))


def _innermost(mutant: Mutant, kind: type[ast.stmt]) -> Any:
    """The node of this kind around a mutant that begins last, or None."""
    with _PARSER:
        tree = ast.parse((ROOT / mutant.file).read_text())
    around = [node for node in ast.walk(tree) if isinstance(node, kind) and _spans(node, mutant)]
    return max(around, key=lambda node: (node.lineno, node.col_offset), default=None)


def _spans(node: ast.stmt, mutant: Mutant) -> bool:
    return node.lineno <= mutant.first_line and mutant.last_line <= (node.end_lineno or node.lineno)


def _is_mutated(path: Path) -> bool:
    inside = path.relative_to(ROOT / PRODUCTION).as_posix()
    return not inside.endswith(LEFT_OUT_FILES) and inside.partition("/")[0] not in LEFT_OUT_COMPONENTS


def _file_mutants(path: Path) -> Iterator[Mutant]:
    text = path.read_text()
    tree = ast.parse(text)
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line.encode()))
    seen = set[tuple[int, str]]()
    for symbol, node in _places(tree, ""):
        for kind, place, new in changes(node):
            first, last = getattr(place, "lineno", 0), getattr(place, "end_lineno", 0)
            start = offsets[first - 1] + place.col_offset  # pyright: ignore[reportAttributeAccessIssue]
            end = offsets[last - 1] + place.end_col_offset  # pyright: ignore[reportAttributeAccessIssue]
            old = text.encode()[start:end].decode()
            mutant = Mutant(path.relative_to(ROOT).as_posix(), symbol, kind, start, old, new, first, last)
            if (start, new) not in seen and old != new:
                seen.add((start, new))
                yield mutant


def _places(node: ast.AST, symbol: str) -> Iterator[tuple[str, ast.AST]]:
    """Nodes that may be changed, each with the function around it."""
    for child in ast.iter_child_nodes(node):
        if _is_left_out(child, node):
            continue
        name = symbol
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{symbol}.{child.name}" if symbol else child.name
        yield name, child
        yield from _places(child, name)


def _is_left_out(child: ast.AST, parent: ast.AST) -> bool:
    if isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(child, ast.FunctionDef):
        return child.name in SHOWN
    if child in getattr(parent, "decorator_list", ()) or child is getattr(parent, "returns", parent):
        return True
    if isinstance(parent, ast.arg | ast.AnnAssign) and child is parent.annotation:
        return True
    if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):  # a docstring
        return True
    if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
        return True
    if isinstance(child, ast.With) and any("torch.cuda.device(" in ast.unparse(item) for item in child.items):
        return True
    call = child.value if isinstance(child, ast.Expr) else child
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in SPOKEN:
        return True
    return isinstance(child, ast.Assign | ast.AnnAssign) and (_is_of_cost(child) or _is_type(child))


def _is_of_cost(statement: ast.Assign | ast.AnnAssign) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return any(name.isupper() and OF_COST.search(name) for name in names)


def _is_type(statement: ast.Assign | ast.AnnAssign) -> bool:
    value = statement.value
    annotation = ast.unparse(statement.annotation) if isinstance(statement, ast.AnnAssign) else ""
    is_generic = isinstance(value, ast.Subscript) and ast.unparse(value.value).endswith(
        ("Annotated", "Literal", "Callable")
    )
    return "TypeAlias" in annotation or is_generic


def _code(text: str) -> str | None:
    """The bytecode of a module without its line numbers; None where it cannot be compiled."""
    try:
        return repr(_plain(compile(text, "", "exec", dont_inherit=True, optimize=2)))
    except (SyntaxError, ValueError):
        return None


def _plain(code: CodeType) -> tuple[object, ...]:
    constants = tuple(_plain(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    return code.co_name, code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars
