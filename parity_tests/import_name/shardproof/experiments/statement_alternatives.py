"""What may be right in place of a statement: nothing, `x += y` for `x = y`, a step that a second name takes too.

The result of a call that nobody reads may be the new value of a tensor that the call reads: `x = x.clamp(min=1)`.

Where an option is never read, `x = y if option is None else option` may be right for `x = y`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy

from shardproof.experiments.alternatives import LIKELY, OPERATORS, POSSIBLE, UNREAD
from shardproof.experiments.names import Names, parsed

SHORT = 3  # statements of an `if` that may be left out


def of_statement(node: ast.stmt, names: Names) -> Iterator[tuple[int, ast.stmt]]:
    """The statements that may be right in place of `node`, each with its rank."""
    match node:
        case ast.AugAssign(target, operator, value):
            for other in OPERATORS.get(type(operator), ()):
                yield LIKELY, ast.AugAssign(target, other(), value)
            yield LIKELY, ast.Pass()
            yield LIKELY, ast.Assign([target], value)
        case ast.Assign([ast.Name() | ast.Subscript() as target], value):
            yield LIKELY, ast.Pass()
            yield LIKELY, ast.AugAssign(target, ast.Add(), value)
            if isinstance(target, ast.Name):
                yield from ((LIKELY, ast.Assign([target], each)) for each in _of_running(target.id, value, names))
                yield from ((POSSIBLE, each) for each in _of_two(target, value, names))
                for name in sorted(names.unread - names.kinds.keys()):
                    given = ast.IfExp(parsed(f"{name} is None"), value, parsed(name))
                    yield UNREAD, ast.Assign([target], given)
        case ast.Expr(value):
            yield LIKELY, ast.Pass()
            yield from ((LIKELY, ast.Assign([target], value)) for target in _changed_by(value, names))
        case ast.If(body=body, orelse=[]) if len(body) <= SHORT and all(map(_is_simple, body)):
            yield LIKELY, ast.Pass()
        case _:
            pass


def _changed_by(value: ast.expr, names: Names) -> list[ast.expr]:
    """The tensors that a call reads and may return changed, `x` of `x.clamp(min=1)`, where nobody reads its result."""
    match value:
        case ast.Call(ast.Attribute(owner), arguments):
            read = [owner, *arguments]
        case ast.Call(_, arguments):
            read = arguments
        case _:
            read = []
    read_names = dict.fromkeys(each.id for each in read if isinstance(each, ast.Name))
    return [ast.Name(name, ast.Store()) for name in read_names if names.kinds.get(name, "").startswith("tensor")]


def _is_simple(node: ast.stmt) -> bool:
    return not hasattr(node, "body") and not isinstance(node, ast.Raise)


def _of_running(name: str, value: ast.expr, names: Names) -> Iterator[ast.expr]:
    """The next value of a sum that a loop keeps, `acc + x`, with the sum so far scaled or masked by a tensor."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        for own, rest in ((value.left, value.right), (value.right, value.left)):
            if isinstance(own, ast.Name) and own.id == name:
                for factor in names.factors(name):
                    yield ast.BinOp(ast.BinOp(own, ast.Mult(), parsed(factor)), ast.Add(), rest)


def _of_two(target: ast.Name, value: ast.expr, names: Names) -> Iterator[ast.stmt]:
    """The next values of two names, `k, v = shifted(k), shifted(v)`, for the next value of one, `k = shifted(k)`."""
    if not any(isinstance(each, ast.Name) and each.id == target.id for each in ast.walk(value)):
        return
    for other in names.alike(target.id):
        if "." not in other:
            second = _Renamed(target.id, other).visit(deepcopy(value))
            both = ast.Tuple([target, ast.Name(other, ast.Store())], ast.Store())
            yield ast.Assign([both], ast.Tuple([value, second], ast.Load()))


class _Renamed(ast.NodeTransformer):
    """One name in place of another."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._new, node.ctx) if node.id == self._old else node
