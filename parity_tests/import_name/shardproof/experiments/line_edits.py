"""Small edits of one line of Python, each undoing a common slip.

An edit replaces one expression or statement of a function by another that is made of the same parts: an operand or a
call left out, another comparison, a neighbour of a number, another name of the same kind. Its function is compiled
alone, and its code is put into the function objects that exist; nothing is written to a file.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

from shardproof.engines.ledger import base
from shardproof.experiments.alternatives import alternatives
from shardproof.experiments.live_objects import live_objects
from shardproof.experiments.names import Names
from shardproof.experiments.running_lines import Functions, Running
from shardproof.experiments.statement_alternatives import of_statement

FUTURE_FLAGS = 0x1FF0000  # of a code object: the `from __future__` imports that its file had
LONGEST = 64  # characters of an expression that a note prints
Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Unit:
    """An outermost function, in the classes around it: its syntax tree, its code, and the functions that run it."""

    file: str
    tree: ast.Module
    code: CodeType
    functions: Mapping[int, Sequence[FunctionType]]  # id of a code object -> the functions that have it

    def compiled(self) -> CodeType | None:
        """The code of the function in the current tree; None if the tree is not valid Python."""
        try:
            module = compile(self.tree, self.file, "exec", flags=self.code.co_flags & FUTURE_FLAGS, dont_inherit=True)
        except (SyntaxError, ValueError, TypeError):
            return None
        return next((code for code in _inside(module) if _is_same_place(code, self.code)), None)


@dataclass(frozen=True, eq=False)
class LineEdit:
    """A node `new` in place of `old`, which is in the `field` of its parent, at the index `place` of a list.

    `around` are the expressions and the statement that contain it, the nearest first. Edits of a lower `rank` are tried
    first.
    """

    unit: Unit
    line: int
    old: ast.AST
    new: ast.AST
    field: str
    place: int | None
    around: tuple[ast.AST, ...]
    rank: int

    @contextmanager
    def in_tree(self) -> Iterator[None]:
        _put(self.around[0], self.field, self.place, self.new)
        try:
            yield
        finally:
            _put(self.around[0], self.field, self.place, self.old)

    @contextmanager
    def applied(self) -> Iterator[bool]:
        """In this block the function runs with the edit; False if the edit is not valid Python."""
        with self.in_tree():
            code = self.unit.compiled()
        pairs = [] if code is None else list(_pairs(self.unit.code, code))
        changed = [(f, old, new) for old, new in pairs for f in self.unit.functions.get(id(old), ())]
        try:
            for function, _, new in changed:
                function.__code__ = new
            yield bool(changed)
        finally:
            for function, old, _ in changed:
                function.__code__ = old

    @property
    def size(self) -> int:
        """How many characters it changes."""
        old, new = _text(self.old), _text(self.new)
        same = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        return len(old) + len(new) - 2 * sum(block.size for block in same)

    @property
    def own_lines(self) -> range:
        """The lines of the statement that it changes; of a compound one, which has a body, those before the body."""
        statement: Any = self.around[-1] if isinstance(self.old, ast.expr) else self.old
        body = getattr(statement, "body", ()) if isinstance(self.old, ast.expr) else ()
        return range(statement.lineno, body[0].lineno if body else statement.end_lineno + 1)

    def is_condition_of(self, other: LineEdit) -> bool:
        """Whether it is of an `if` or its test, and the other edit in a line that runs if the test is true."""
        match self.old if isinstance(self.old, ast.If) else self.around[-1]:
            case ast.If(body=[first, *_] as body) if other.unit is self.unit:
                return first.lineno <= other.line <= (body[-1].end_lineno or 0)
            case _:
                return False

    @property
    def words(self) -> str:
        """The edit in words: `file:line has `new`, not `old``, with the largest expression around it that is short."""
        whole = next((node for node in reversed(self.around[:-1]) if _is_short(node)), None)
        if whole is None or isinstance(self.old, ast.stmt):
            (old, *rest), new = _text(self.old).splitlines(), _text(self.new)
            old += " ..." if rest else ""
        else:
            old = _text(whole)
            with self.in_tree():
                new = _text(whole)
        line = f"{base(self.unit.file)}:{self.line}"
        return f"{line} leaves out `{old}`" if isinstance(self.new, ast.Pass) else f"{line} has `{new}`, not `{old}`"


def edits_of(functions: Functions, axes: Sequence[str], sharded_dims: Sequence[str] = ()) -> list[LineEdit]:
    """All edits of the lines that run; an edit may replace the name of one of the mesh's `axes` by another."""
    with_code: dict[int, list[FunctionType]] = {}
    for function in live_objects(FunctionType, {code.co_filename for code in functions}):
        with_code.setdefault(id(function.__code__), []).append(function)
    sources: dict[str, _Source] = {}
    edits: list[LineEdit] = []
    for code, running in functions.items():
        source = sources.setdefault(code.co_filename, _Source.of(code.co_filename))
        definition = source.definitions.get((code.co_name, code.co_firstlineno))
        if definition is not None:
            unit = source.unit(definition, functions, with_code)
            if unit is not None:
                names = Names(
                    running.kinds,
                    source.attributes,
                    source.strings,
                    tuple(axes),
                    tuple(sharded_dims),
                    _unread(definition),
                )
                edits += _of_function(unit, definition, running, names)
    return edits


def _of_function(unit: Unit, definition: Definition, running: Running, names: Names) -> Iterator[LineEdit]:
    for statement, parent, name, place in _statements(definition):
        if statement.lineno not in running.lines:
            continue
        for rank, new in of_statement(statement, names):
            yield LineEdit(unit, statement.lineno, statement, _at(new, statement), name, place, (parent,), rank)
        for old, field_name, at, around in _expressions(statement, (statement,)):
            for rank, new in alternatives(old, around[0], names):
                if isinstance(around[0], ast.Expr) and not isinstance(new, ast.Call):
                    continue  # nobody reads the value: the edit would leave the call out, as one of the statement does
                yield LineEdit(unit, old.lineno, old, _at(new, old), field_name, at, around, rank)


@dataclass
class _Source:
    """A file's definitions, and the attributes and strings that occur in it."""

    file: str
    definitions: dict[tuple[str, int], Definition] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    imports: list[ast.stmt] = field(default_factory=list)  # at the top of the file
    attributes: dict[str, set[str]] = field(default_factory=dict)  # of one expression, as `layout` or `self`
    strings: dict[str, set[str]] = field(default_factory=dict)  # that one keyword takes
    units: dict[Definition, Unit | None] = field(default_factory=dict)

    @classmethod
    def of(cls, file: str) -> _Source:
        """The file as it reads now; each text is parsed once, and its functions are looked for anew."""
        return replace(cls._of_text(file, "".join(linecache.getlines(file))), units={})

    @classmethod
    @lru_cache(maxsize=64)  # files that a scheme runs
    def _of_text(cls, file: str, text: str) -> _Source:
        source = cls(file)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return source
        source.imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in ast.walk(tree):
            source.parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
            if isinstance(node, Definition):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                source.definitions[node.name, first] = node
            match node:
                case ast.Attribute(ast.Name(name), attribute) if not _is_called(node, source.parents[node]):
                    source.attributes.setdefault(name, set()).add(attribute)
                case ast.keyword(str(name), ast.Constant(str(text))):
                    source.strings.setdefault(name, set()).add(text)
                case _:
                    pass
        return source

    def unit(
        self, definition: Definition, functions: Functions, with_code: Mapping[int, Sequence[FunctionType]]
    ) -> Unit | None:
        """The outermost function around a definition; None if its file has changed since it was imported."""
        outermost = definition
        classes: list[ast.ClassDef] = []
        node: ast.AST | None = definition
        while (node := self.parents.get(node)) is not None:
            if isinstance(node, Definition):
                outermost, classes = node, []
            elif isinstance(node, ast.ClassDef):
                classes.append(node)
        if outermost not in self.units:
            self.units[outermost] = self._unit(outermost, classes, functions, with_code)
        return self.units[outermost]

    def _unit(
        self,
        outermost: Definition,
        classes: Sequence[ast.ClassDef],
        functions: Functions,
        with_code: Mapping[int, Sequence[FunctionType]],
    ) -> Unit | None:
        body: ast.stmt = outermost
        for each in classes:
            body = ast.copy_location(ast.ClassDef(each.name, [], [], [body], []), each)
        # Keep the imports: Python compiles a call of an imported module's attribute in another way than a method's.
        tree = ast.Module([*self.imports, body], [])
        first = min([outermost.lineno, *(each.lineno for each in outermost.decorator_list)])
        live = (function.__code__ for each in with_code.values() for function in each[:1])
        running = next(
            (
                c
                for c in chain(functions, live)
                if (c.co_filename, c.co_name, c.co_firstlineno) == (self.file, outermost.name, first)
            ),
            None,
        )
        if running is None:
            return None
        unit = Unit(self.file, tree, running, with_code)
        return unit if unit.compiled() == running else None


def _statements(node: ast.AST) -> Iterator[tuple[ast.stmt, ast.AST, str, int]]:
    """The statements of a function that give values, without the bodies of nested functions."""
    for name, value in ast.iter_fields(node):
        for place, child in enumerate(value if isinstance(value, list) else ()):
            if isinstance(child, ast.stmt) and not _is_left(child):
                yield child, node, name, place
                yield from _statements(child)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from _statements(child)


def _is_left(node: ast.stmt) -> bool:
    """Whether no edit is tried: another function, a loop that might not end, a check, a docstring."""
    is_check = isinstance(node, ast.If) and not node.orelse and all(isinstance(each, ast.Raise) for each in node.body)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_check or is_text or isinstance(node, ast.While | ast.ClassDef | Definition | ast.Raise | ast.Assert)


def _expressions(
    node: ast.AST, around: tuple[ast.AST, ...]
) -> Iterator[tuple[ast.expr, str, int | None, tuple[ast.AST, ...]]]:
    """The expressions of a statement that give values, and the places that it writes to.

    Each comes with its place in the nearest node around it.
    """
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for place, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, ast.expr) and not isinstance(child, ast.JoinedStr):
                is_written = name in ("targets", "target") and isinstance(child, ast.Subscript)
                if is_written or name not in ("func", "targets", "target", "optional_vars"):
                    yield child, name, place, around
                yield from _expressions(child, (child, *around))
            elif isinstance(child, ast.keyword | ast.comprehension | ast.withitem):
                yield from _expressions(child, (child, *around))


def _put(parent: ast.AST, field_name: str, place: int | None, node: ast.AST) -> None:
    if place is None:
        setattr(parent, field_name, node)
    else:
        getattr(parent, field_name)[place] = node


def _at(new: ast.AST, old: Any) -> ast.AST:
    """The new node at the position of the old one, unless it is a part of the old one and has a position."""
    return ast.fix_missing_locations(new if new in ast.walk(old) else ast.copy_location(new, old))


def _unread(definition: Definition) -> frozenset[str]:
    """The names that a function takes or assigns and never reads: a part that should read one may be missing."""
    names = [node for node in ast.walk(definition) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    given = {node.arg for node in ast.walk(definition.args) if isinstance(node, ast.arg)}
    return frozenset(given.union(node.id for node in names) - read)


def _is_called(node: ast.AST, parent: ast.AST) -> bool:
    return isinstance(parent, ast.Call) and parent.func is node


def _inside(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inside(constant)


def _is_same_place(code: CodeType, other: CodeType) -> bool:
    return (code.co_name, code.co_firstlineno) == (other.co_name, other.co_firstlineno)


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Old and new code of a function and of the functions inside it, where both have the same free variables."""
    if old.co_freevars == new.co_freevars:
        yield old, new
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    if len(inner[0]) == len(inner[1]):
        for pair in zip(*inner, strict=True):
            yield from _pairs(*pair)


def _is_short(node: ast.AST) -> bool:
    return isinstance(node, ast.expr) and len(_text(node)) <= LONGEST


def _text(node: Any) -> str:
    return ast.unparse(node)
