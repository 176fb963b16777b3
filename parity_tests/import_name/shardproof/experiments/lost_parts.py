"""The part that code may have lost: a mask, a second bound, the diagonal of a triangle, the start of a range."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardproof.experiments.names import Names, parsed

TRIANGLES = {"tril": -1, "triu": 1}  # without the diagonal
OTHER_BOUND = {"min": "max", "max": "min"}


def with_lost_part(node: ast.expr, names: Names) -> Iterator[ast.expr]:
    """The expression with one part added, or with a range moved to the other end of its dim."""
    match node:
        case ast.Name(name) if names.kinds.get(name, "").startswith("tensor of flags"):
            yield from (parsed(f"{name}.{triangle}({offset})") for triangle, offset in TRIANGLES.items())
        case ast.Call(ast.Attribute(_, "tril" | "triu" as triangle) as func, [_]) if not _is_method(node, names):
            yield ast.Call(func, [*node.args, parsed(str(TRIANGLES[triangle]))], [])
        case ast.Call(ast.Attribute(_, "tril" | "triu" as triangle) as func, []):
            yield ast.Call(func, [parsed(str(TRIANGLES[triangle]))], [])
        case ast.Call(ast.Attribute(_, "narrow") as func, [dim, start, length]):
            is_at_start = ast.unparse(start) == "0"
            yield ast.Call(func, [dim, ast.UnaryOp(ast.USub(), length) if is_at_start else parsed("0"), length], [])
        case ast.Call(ast.Attribute(_, "clamp" | "clip") as func, [], [ast.keyword("min" | "max" as bound, value)]):
            for other in _other_bounds(value, names):
                added = ast.keyword(OTHER_BOUND[bound], parsed(other))
                yield ast.Call(func, [], [*node.keywords, added])
        case ast.BinOp(ast.Name(x), ast.Mult(), ast.Name(mask)):
            kinds = [names.kinds.get(name, "") for name in (x, mask)]
            if kinds[0].startswith("tensor of floats") and kinds[0] == kinds[1]:  # 0 times NaN is NaN
                yield parsed(f"{x}.where({mask} != 0, 0.0) * {mask}")
                yield parsed(f"{x} * {mask}.where({x} != 0, 0.0)")
        case _:
            pass
    yield from _with_mask(node, names)


def _is_method(node: ast.Call, names: Names) -> bool:
    """Whether it is called as `x.tril(k)`, not as `torch.tril(x)`."""
    return isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in names.kinds


def _other_bounds(value: ast.expr, names: Names) -> list[str]:
    """`limits[1]` for `limits[0]`; else the numbers that the function has."""
    match value:
        case ast.Subscript(limits, ast.Constant(0 | 1 as place)):
            return [f"{ast.unparse(limits)}[{1 - place}]"]
        case _:
            return [name for name in names.numbers("int", "float") if name != ast.unparse(value)]


def _with_mask(node: ast.expr, names: Names) -> Iterator[ast.expr]:
    """`x.square().where(mask, 0.0)` for `x.square()`, with each mask of as many dims as x."""
    match node:
        case ast.Call(ast.Attribute(ast.Name(name))) | ast.Name(name):
            what, _, dims = names.kinds.get(name, "").partition(", ")
            if what == "tensor of floats":
                masks = (each for each, kind in names.kinds.items() if kind == f"tensor of flags, {dims}")
                yield from (parsed(f"{ast.unparse(node)}.where({mask}, 0.0)") for mask in masks if "." not in mask)
        case _:
            pass
