"""The rules that make mutants: the replacements of a node of the syntax tree, and the name of the mistake.

Each rule is one that is made in sharded code: a sum for a mean, the wrong dim, an exchange left out, a copy that is not
detached, a border off by one.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

Rule = Callable[[Any], Iterator[ast.AST]]

ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATIONS = {
    "sum": "mean",
    "mean": "sum",
    "amax": "amin",
    "amin": "amax",
    "max": "min",
    "min": "max",
    "any": "all",
    "all": "any",
    "argmax": "argmin",
    "exp": "expm1",
    "log1p": "log",
    "maximum": "minimum",
    "minimum": "maximum",
    "cumsum": "cumprod",
    "SUM": "MAX",
    "MAX": "SUM",
    "floor": "ceil",
    "ceil": "floor",
}
DTYPES = {"float32": "bfloat16", "float64": "float32", "int64": "int32"}
REMOVED_METHODS = ("contiguous", "detach", "clone", "float", "double", "wait", "to", "to_local", "type_as", "unsqueeze")
GROUPS = {"tp": "cp", "cp": "tp", "dp": "tp", "ep": "tp", "pp": "dp"}
SELF_EVIDENT = ("isinstance", "issubclass", "getattr", "hasattr", "setattr")  # raise at once with arguments swapped
SYMMETRIC = ("min", "max", "minimum", "maximum", "gcd", "lcm")  # of two: the same either way
DIMS = ("dim", "axis", "split_dim", "concat_dim", "seq_dim")


def _arithmetic(node: ast.BinOp) -> Iterator[ast.AST]:
    if type(node.op) in ARITHMETIC and not any(_is_text(side) for side in (node.left, node.right)):
        yield _with(node, op=ARITHMETIC[type(node.op)]())


def _comparison(node: ast.Compare) -> Iterator[ast.AST]:
    if len(node.ops) == 1:
        yield _with(node, ops=[COMPARISONS[type(node.ops[0])]()])


def _boolean(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def _sign(node: ast.UnaryOp) -> Iterator[ast.AST]:
    if isinstance(node.op, ast.Not | ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node.operand


def _constant(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node.value, float):
        yield ast.Constant(node.value * 2 if node.value else 1.0)


def _arguments(node: ast.Call) -> Iterator[ast.AST]:
    """The first two swapped, where they are not the same and both stand alone."""
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in (*SELF_EVIDENT, *SYMMETRIC):
        return
    if len(node.args) > 1 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
        first, second, *rest = node.args
        if ast.dump(first) != ast.dump(second):
            yield _with(node, args=[second, first, *rest])


def _operation(node: ast.Attribute | ast.Name) -> Iterator[ast.AST]:
    name = node.attr if isinstance(node, ast.Attribute) else node.id
    if name in OPERATIONS:
        field = "attr" if isinstance(node, ast.Attribute) else "id"
        yield _with(node, **{field: OPERATIONS[name]})


def _dtype(node: ast.Attribute) -> Iterator[ast.AST]:
    if node.attr in DTYPES and isinstance(node.value, ast.Name) and node.value.id == "torch":
        yield _with(node, attr=DTYPES[node.attr])


def _method(node: ast.Call) -> Iterator[ast.AST]:
    """x for x.contiguous(): leave out a method that changes, copies or waits."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in REMOVED_METHODS:
        yield node.func.value


def _group(node: ast.Attribute | ast.Name | ast.Constant) -> Iterator[ast.AST]:
    """The axis of another group in a name or a text: cp_group for tp_group, mesh["cp"] for mesh["tp"]."""
    if isinstance(node, ast.Constant):
        if node.value in GROUPS:
            yield ast.Constant(GROUPS[node.value])
        return
    name = node.attr if isinstance(node, ast.Attribute) else node.id
    axis, _, rest = name.partition("_")
    if axis in GROUPS and rest in ("group", "rank", "size", "world", "mesh"):
        field = "attr" if isinstance(node, ast.Attribute) else "id"
        yield _with(node, **{field: f"{GROUPS[axis]}_{rest}"})


def _dim(node: ast.Call) -> Iterator[ast.AST]:
    """The keyword of a dim with another number, and the last dim given by position as the first."""
    for index, keyword in enumerate(node.keywords):
        if keyword.arg in DIMS and _number(keyword.value) is not None:
            other = 0 if _number(keyword.value) != 0 else -1
            changed = copy.deepcopy(node)
            changed.keywords[index].value = ast.Constant(other)
            yield changed
    for index, each in enumerate(node.args):
        if _number(each) == -1:
            yield _with(node, args=[*node.args[:index], ast.Constant(0), *node.args[index + 1 :]])


def _branches(node: ast.IfExp) -> Iterator[ast.AST]:
    yield _with(node, body=node.orelse, orelse=node.body)


def _condition(node: ast.If) -> Iterator[ast.AST]:
    """`if not x` for `if x`: an early return taken for the others, a special case for all but it."""
    yield ast.UnaryOp(ast.Not(), node.test)


def _statement(node: ast.Expr | ast.AugAssign | ast.Assign) -> Iterator[ast.AST]:
    """A call for its effect, an update, or an assignment to a name that has a value already."""
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Await):
        return
    if isinstance(node, ast.Assign):
        names = {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        used = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
        if not names & used:
            return
    yield ast.Pass()


RULES: dict[type[ast.AST], tuple[tuple[str, Rule], ...]] = {
    ast.BinOp: (("arithmetic", _arithmetic),),
    ast.Compare: (("comparison", _comparison),),
    ast.BoolOp: (("boolean", _boolean),),
    ast.UnaryOp: (("sign", _sign),),
    ast.Constant: (("constant", _constant), ("group", _group)),
    ast.Call: (("arguments", _arguments), ("method", _method), ("dim", _dim)),
    ast.Attribute: (("operation", _operation), ("dtype", _dtype), ("group", _group)),
    ast.Name: (("operation", _operation), ("group", _group)),
    ast.IfExp: (("branches", _branches),),
    ast.If: (("condition", _condition),),
    ast.Expr: (("statement", _statement),),
    ast.AugAssign: (("statement", _statement),),
    ast.Assign: (("statement", _statement),),
}
KINDS = tuple(dict.fromkeys(kind for rules in RULES.values() for kind, _ in rules))


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """The changes of one node: the rule's name, the node whose text is replaced, and the new text."""
    for kind, rule in RULES.get(type(node), ()):
        for changed in rule(node):
            place = node.test if isinstance(node, ast.If) else node
            text = ast.unparse(changed)
            yield kind, place, text if isinstance(node, ast.stmt | ast.Name | ast.Constant) else f"({text})"


def _with(node: ast.AST, **fields: Any) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _number(node: ast.AST) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, int) else None
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
