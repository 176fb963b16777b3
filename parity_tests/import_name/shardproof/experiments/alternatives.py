"""What may be right in place of an expression: `a` for `a / n`, `<=` for `<`, `rank + 1` for `rank`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from typing import Any

from shardproof.experiments.lost_parts import with_lost_part
from shardproof.experiments.names import MOST_NAMES, NUMBERS, Names, parsed

# Ranks of edits: a factor or a mask that is never read comes first, then a part is left out or exchanged, then a name,
# then a part is added.
UNREAD, LIKELY, POSSIBLE, ADDED = range(4)
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod, ast.Mult),
    ast.Mod: (ast.FloorDiv,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
_PAIRS = (
    "min max, amin amax, minimum maximum, clamp_min clamp_max, argmin argmax, sum mean, sum amax, all any, tril triu, "
    "floor ceil, zeros ones, zeros_like ones_like, maximum logaddexp, exp exp2, log log2, cumsum cumprod, SUM AVG, "
    "SUM MAX, MAX AVG, MIN MAX, bfloat16 float32, float16 float32, float32 float64, var std, abs square, pop popleft, "
    "append appendleft, copy_ add_, scatter scatter_add, scatter_ scatter_add_, rsqrt sqrt, sub add, sub_ add_, "
    "mul div, mul_ div_, isend irecv, all_reduce_sum all_reduce_max, floor_divide remainder, sigmoid softmax, "
    "no_grad enable_grad"
)
FUNCTIONS: dict[str, list[str]] = {}  # name -> others with the same parameters
for _pair in _PAIRS.split(", "):
    _one, _other = _pair.split()
    FUNCTIONS.setdefault(_one, []).append(_other)
    FUNCTIONS.setdefault(_other, []).append(_one)


REDUCTIONS = ("mean", "sum", "all_reduce", "reduce_scatter", "numel", "norm", "var", "std")
COPIES = ("clone", "contiguous")
Alternatives = Iterator[tuple[int, ast.expr]]


def alternatives(node: ast.expr, parent: ast.AST, names: Names) -> Alternatives:
    """The expressions that may be right in place of `node`, each with its rank."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):  # a place that is written to
        yield from _of_subscript(node)
        return
    match node:
        case ast.Constant():
            yield from _of_constant(node, parent, names)
        case ast.Name():
            yield from _of_name(node, parent, names)
        case ast.BinOp(left, operator, right):
            yield LIKELY, left
            yield LIKELY, right
            yield from ((LIKELY, ast.BinOp(left, other(), right)) for other in OPERATORS.get(type(operator), ()))
            if isinstance(operator, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod | ast.MatMult):
                yield LIKELY if isinstance(operator, ast.Sub) else POSSIBLE, ast.BinOp(right, operator, left)
            yield from ((LIKELY, each) for each in _regrouped(node))
            if isinstance(operator, ast.MatMult):
                yield from ((LIKELY, ast.BinOp(each, operator, right)) for each in _scaled(left, names))
            if isinstance(operator, ast.Add) and (_is_count(left) or _is_count(right)):
                yield from ((LIKELY, parsed(each)) for each in names.positions())
        case ast.Compare(left, [operator], [right]):
            yield from (
                (LIKELY, ast.Compare(left, [other()], [right])) for other in COMPARISONS.get(type(operator), ())
            )
            yield from _with_a_bound(node, names)
        case ast.UnaryOp(_, operand):
            yield LIKELY, operand
        case ast.List(elements, ast.Load()) | ast.Tuple(elements, ast.Load()):  # neighbours exchanged
            for place in range(len(elements) - 1):
                exchanged = [*elements[:place], elements[place + 1], elements[place], *elements[place + 2 :]]
                yield LIKELY, type(node)(exchanged, ast.Load())
        case ast.BoolOp(operator, values):
            yield LIKELY, ast.BoolOp(ast.And() if isinstance(operator, ast.Or) else ast.Or(), values)
            yield from ((LIKELY, value) for value in values)
        case ast.IfExp(_, body, orelse):  # the wrong branch may be wrong elsewhere
            yield ADDED, body
            yield ADDED, orelse
        case ast.Call():
            yield from _of_call(node, names)
        case ast.Subscript():
            yield from _of_subscript(node)
        case ast.Attribute(ast.Name(base), name):
            dotted = f"{base}.{name}"
            read = sorted(names.attributes.get(base, set()) - {name}) if base in names.kinds else []
            others = names.alike(dotted) or [f"{base}.{each}" for each in read if f"{base}.{each}" not in names.kinds]
            yield from ((LIKELY, ast.Attribute(node.value, each, node.ctx)) for each in FUNCTIONS.get(name, ()))
            yield from ((POSSIBLE, parsed(each)) for each in others[:MOST_NAMES])
        case ast.Attribute(_, name):
            yield from ((LIKELY, ast.Attribute(node.value, each, node.ctx)) for each in FUNCTIONS.get(name, ()))
        case _:
            pass
    yield from ((POSSIBLE, each) for each in with_lost_part(node, names))
    if isinstance(node, ast.Call | ast.Attribute | ast.BinOp | ast.Subscript):
        yield from _extended(node, parent, names)
    is_added = isinstance(node, ast.Constant) and isinstance(parent, ast.AugAssign)
    if is_added or isinstance(node, ast.Name | ast.Call | ast.BinOp | ast.Subscript):
        yield from _with_unread(node, parent, names)


def _regrouped(node: ast.BinOp) -> Iterator[ast.expr]:
    """`(a + c) * b` and `a * (b + c)` for `a * b + c`, and back; a term of a sum inside `where(mask, ...)`."""
    outer, sums, products = node.op, (ast.Add, ast.Sub), (ast.Mult, ast.Div)
    sides = [(node.left, node.right)]
    if isinstance(outer, ast.Add | ast.Mult):
        sides.append((node.right, node.left))
    for grouped, c in sides:
        match grouped:
            case ast.BinOp(a, inner, b) if isinstance(inner, products) and isinstance(outer, sums):
                yield ast.BinOp(ast.BinOp(a, outer, c), inner, b)
                yield ast.BinOp(a, inner, ast.BinOp(b, outer, c))
            case ast.BinOp(a, inner, b) if isinstance(inner, sums) and isinstance(outer, products):
                yield ast.BinOp(a, inner, ast.BinOp(b, outer, c))
            case ast.Call(ast.Attribute(attr="where") as where, [mask, a, b]) if isinstance(outer, sums):
                yield ast.Call(where, [mask, ast.BinOp(a, outer, c), b], [])
            case _:
                pass


def _scaled(node: ast.expr, names: Names) -> Iterator[ast.expr]:
    """The rows of a matrix, each times its number in another tensor, or times the exponential of that number."""
    if isinstance(node, ast.Name):
        for name in names.numbers_of_rows(node.id):
            yield from (ast.BinOp(node, ast.Mult(), parsed(f"{name}{f}[..., None]")) for f in ("", ".exp()"))


def _with_unread(node: ast.expr, parent: ast.AST, names: Names) -> Alternatives:
    """The value with a name that the function takes or assigns and never reads."""
    if isinstance(parent, ast.Attribute | ast.Starred | ast.Subscript):
        return
    for name in sorted(names.unread & names.kinds.keys()):
        kind = names.kinds[name]
        if not kind.startswith((*NUMBERS, "tensor of flags")):
            continue
        if kind.startswith(NUMBERS[:2]):  # a count of elements that may be none
            yield LIKELY, ast.BinOp(node, ast.Div(), parsed(f"{name}.clamp(min=1)"))
        yield UNREAD, parsed(name)
        others = () if "flags" in kind else (ast.Div(), ast.Add(), ast.Sub())
        for ending in ("", "[..., None]", *_indices(parent)) if kind.startswith("tensor") else ("",):
            yield UNREAD, ast.BinOp(node, ast.Mult(), parsed(f"{name}{ending}"))
            if "flags" in kind:  # a mask of the elements to leave out
                yield UNREAD, ast.BinOp(node, ast.Mult(), parsed(f"(~{name}){ending}"))
            yield from ((LIKELY, ast.BinOp(node, operator, parsed(f"{name}{ending}"))) for operator in others)
            if "flags" in kind and isinstance(node, ast.Name):  # where it is false, another value
                where = ast.Attribute(node, "where", ast.Load())
                values = (parsed(other) for other in names.alike(node.id))
                yield from ((UNREAD, ast.Call(where, [parsed(f"{name}{ending}"), value], [])) for value in values)


def _indices(node: ast.AST) -> list[str]:
    """`[i]` of `x + parts[i]`: a loop may index a tensor that is never read as it does its neighbour."""
    slices = (each.slice for each in ast.walk(node) if isinstance(each, ast.Subscript))
    return list(dict.fromkeys(f"[{each.id}]" for each in slices if isinstance(each, ast.Name)))


def _of_constant(node: ast.Constant, parent: ast.AST, names: Names) -> Alternatives:
    value: Any = node.value
    if isinstance(value, bool):
        yield LIKELY, ast.Constant(not value)
        flags = (name for name, kind in names.kinds.items() if kind == "bool")
        yield from ((UNREAD if name in names.unread else LIKELY, parsed(name)) for name in flags)
    elif isinstance(value, int):
        near = [value + 1, value - 1] if value else [1, -1]
        others = near if value in (0, 1) else [*near, 0, 1]
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Div | ast.FloorDiv | ast.Mod):
            others = [each for each in near if each]  # the rest of 1 is always 0
        yield from ((LIKELY, ast.Constant(each)) for each in dict.fromkeys(others))
        if value in (0, 1):
            yield from ((POSSIBLE, parsed(each)) for each in names.numbers("int"))
    elif isinstance(value, float):
        others = (1.0, 0.0, -value, 2.0 * value, value / 2.0)
        yield from ((LIKELY, ast.Constant(each)) for each in dict.fromkeys(others) if each != value)
        if value in (0.0, 1.0):
            yield from ((POSSIBLE, parsed(each)) for each in names.numbers("float"))
    elif isinstance(value, str):
        known = names.strings.get(parent.arg, set()) if isinstance(parent, ast.keyword) and parent.arg else set()
        others = {*known, *(names.axes if value in names.axes else ())} - {value}
        yield from ((LIKELY, ast.Constant(each)) for each in sorted(others))


def _of_name(node: ast.Name, parent: ast.AST, names: Names) -> Alternatives:
    alike = names.alike(node.id)
    yield from ((POSSIBLE, parsed(each)) for each in alike)
    kind = names.kinds.get(node.id, "")
    if kind == "int":
        for operator in (ast.Add(), ast.Sub()):
            yield POSSIBLE, ast.BinOp(node, operator, ast.Constant(1))
        yield POSSIBLE, ast.Constant(0)
        yield from ((POSSIBLE, ast.BinOp(node, ast.Mult(), parsed(size))) for size in names.sizes())  # of all ranks
    elif kind == "slice":
        yield POSSIBLE, ast.Call(parsed("slice"), [ast.Constant(None)], [])
    if kind == "tensor of integers, 1":  # an order in place of the one that undoes it
        yield POSSIBLE, parsed(f"{node.id}.argsort()")
    if kind.startswith(NUMBERS):
        yield from _extended(node, parent, names)


def _extended(node: ast.expr, parent: ast.AST, names: Names) -> Alternatives:
    """A value with a factor, a divisor or a bound that other names of the function give."""
    if isinstance(parent, ast.Attribute | ast.Starred | ast.Subscript):
        return
    if isinstance(parent, ast.IfExp) and parent.test is node:
        return
    inside = _names(node)
    if _is_reduction(node) or _is_local_size(node):  # of all ranks, and a mean over them for their sum
        for size in (size for size in names.sizes() if size != ast.unparse(node)):  # a group of one needs no sharding
            yield from ((POSSIBLE, ast.BinOp(node, operator, parsed(size))) for operator in (ast.Div(), ast.Mult()))
    for factor in (name for name in names.numbers("int", "float") if name not in inside):
        for operator in (ast.Mult(), ast.Div()):
            yield ADDED, ast.BinOp(node, operator, parsed(factor))
    if isinstance(node, ast.Name) and names.kinds.get(node.id, "").startswith("tensor of integers"):
        for start in names.numbers("int"):  # ids of a shard, counted from its first one
            yield from ((POSSIBLE, ast.BinOp(node, each, parsed(start))) for each in (ast.Add(), ast.Sub()))
    if isinstance(node, ast.Name) and names.kinds.get(node.id, "").startswith("tensor"):
        for other in names.alike(node.id):
            for operator in (ast.Mult(), ast.Add(), ast.Sub()):
                yield ADDED, ast.BinOp(node, operator, parsed(other))
            for bound in ("minimum", "maximum") if "integers" in names.kinds[node.id] else ():
                yield ADDED, ast.Call(ast.Attribute(parsed(node.id), bound, ast.Load()), [parsed(other)], [])


def _with_a_bound(node: ast.Compare, names: Names) -> Alternatives:
    """Ids that a bound keeps and another bound should leave out, as the ids beyond one rank's shard."""
    left, operator = node.left, node.ops[0]
    if not (isinstance(left, ast.Name) and names.kinds.get(left.id, "").startswith("tensor of integers")):
        return
    if isinstance(operator, ast.GtE | ast.Gt):
        bounds = [ast.Compare(left, [ast.Lt()], [parsed(each)]) for each in names.numbers("int")]
    else:
        bounds = [ast.Compare(left, [ast.GtE()], [parsed(each)]) for each in ("0", *names.numbers("int"))]
    if not isinstance(operator, ast.Eq | ast.NotEq):
        yield from ((LIKELY, ast.BinOp(node, ast.BitAnd(), bound)) for bound in bounds)


def _is_reduction(node: ast.expr) -> bool:
    """Whether it is a call such as `x.mean(0)` or `all_reduce(x, group)`."""
    return _called(node) in REDUCTIONS


def _called(node: ast.expr) -> str | None:
    """`mean` of `x.mean(0)` and of `mean(x)`; None for anything but a call."""
    match node:
        case ast.Call(ast.Attribute(attr=name)) | ast.Call(ast.Name(name)):
            return name
        case _:
            return None


def _is_local_size(node: ast.expr) -> bool:
    """Whether it is a size of one rank's shard: `x.shape[0]`, `x.size(0)` or `len(x)`."""
    match node:
        case ast.Subscript(ast.Attribute(attr="shape")) | ast.Call(ast.Attribute(attr="size"), [_]):
            return True
        case ast.Call(ast.Name("len")):
            return True
        case _:
            return False


def _of_stored(node: ast.Call, names: Names) -> Alternatives:
    """A stored tensor in place of one that is computed from another of its kind, and of a softmax of a part of a dim.

    `exp(x - lse)` is the softmax of the whole dim if `lse` is its logsumexp. A stored slice in place of a new one.
    """
    match node:
        case ast.Call(ast.Name("slice")):
            yield from ((POSSIBLE, parsed(name)) for name, kind in names.kinds.items() if kind == "slice")
        case ast.Call(ast.Attribute(ast.Name(name)), []) | ast.Call(ast.Attribute(), [ast.Name(name)]):
            if names.kinds.get(name, "").startswith("tensor"):
                yield from ((POSSIBLE, parsed(other)) for other in names.alike(name))
        case ast.Call(ast.Attribute(x, "softmax"), [_]) | ast.Call(ast.Attribute(_, "softmax"), [x, _]):
            for name in sorted(names.unread & names.kinds.keys()):
                if names.kinds[name].startswith("tensor of floats"):
                    shifts = (f"({ast.unparse(x)} - {name}{ending}).exp()" for ending in ("[..., None]", ""))
                    yield from ((UNREAD, parsed(shift)) for shift in shifts)
        case _:
            pass


def _of_call(node: ast.Call, names: Names) -> Alternatives:
    if isinstance(node.func, ast.Attribute):
        func = node.func
        is_copy = func.attr in COPIES  # left out, it would share its storage, and a mistake might be written over
        if not is_copy and (not isinstance(func.value, ast.Name) or func.value.id in names.kinds):
            yield LIKELY, func.value  # a method left out
        for name in FUNCTIONS.get(func.attr, ()):
            yield LIKELY, ast.Call(ast.Attribute(func.value, name, func.ctx), node.args, node.keywords)
        root = _root(func.value)
        if not is_copy and root is not None and (not isinstance(root, ast.Name) or root.id in names.kinds):
            yield LIKELY, root  # all methods left out
    elif isinstance(node.func, ast.Name):
        for name in FUNCTIONS.get(node.func.id, ()):
            yield LIKELY, ast.Call(ast.Name(name, ast.Load()), node.args, node.keywords)
    if _is_count(node):  # positions of this rank alone
        yield from ((LIKELY, parsed(each)) for each in names.positions())
        yield from (
            (LIKELY, parsed(f"{ast.unparse(node)} + {each} * ({ast.unparse(node.args[0])})")) for each in names.ranks()
        )
    yield from ((LIKELY, each) for each in _of_repeat(node))
    yield from _of_stored(node, names)
    match node:
        case ast.Call(ast.Attribute(ast.Name(name))) if names.kinds.get(name, "").startswith("tensor of floats"):
            yield POSSIBLE, ast.UnaryOp(ast.USub(), node)  # the opposite sign, as of the sine in a rotation back
        case _:
            pass
    if _called(node) in ("rank", "get_rank", "local_rank"):
        yield from ((POSSIBLE, ast.BinOp(node, near(), ast.Constant(1))) for near in (ast.Add, ast.Sub))
    for place, argument in enumerate(node.args):
        if isinstance(argument, ast.Starred):
            continue
        is_value = not isinstance(argument, ast.Name | ast.Constant) or (
            isinstance(argument, ast.Name) and names.kinds.get(argument.id, "").startswith(NUMBERS)
        )
        if place < 2 and is_value:
            yield LIKELY, argument
        if _may_shift(node) and _is_integer(argument, names):  # the other direction
            opposite = ast.UnaryOp(ast.USub(), argument)
            yield POSSIBLE, ast.Call(node.func, [*node.args[:place], opposite, *node.args[place + 1 :]], node.keywords)
        yield from ((POSSIBLE, each) for each in _swapped(node, place))
    for place in range(len(node.keywords)):
        yield LIKELY, ast.Call(node.func, node.args, [*node.keywords[:place], *node.keywords[place + 1 :]])
    if len(node.args) > 1:
        yield POSSIBLE, ast.Call(node.func, node.args[:-1], node.keywords)
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("var", "std"):  # divides by n - 1, or by n
        keywords = [each for each in node.keywords if each.arg not in ("correction", "unbiased")]
        for count in (0, 1):
            yield LIKELY, ast.Call(node.func, node.args, [*keywords, ast.keyword("correction", ast.Constant(count))])
    if ast.unparse(node.func).rpartition(".")[2] == "gelu" and all(each.arg != "approximate" for each in node.keywords):
        # jax.nn.gelu is the approximation unless it is told otherwise
        approximate = ast.keyword("approximate", ast.Constant("tanh"))
        yield LIKELY, ast.Call(node.func, node.args, [*node.keywords, approximate])


def _may_shift(node: ast.Call) -> bool:
    """Whether a call may take the direction of a shift: of a user's function, or of one with such a name.

    A negative size, as in `x.view(-n)`, would lead around a mistake.
    """
    match node.func:
        case ast.Name(name):
            return name not in dir(builtins)
        case ast.Attribute(attr=name):
            return any(word in name for word in ("shift", "roll", "ring", "apply"))
        case _:
            return False


def _is_integer(node: ast.expr, names: Names) -> bool:
    """Whether it is a number other than 0, a name of an integer, or a field with one: `n`, `self.n`."""
    match node:
        case ast.Constant(value):
            return isinstance(value, int) and not isinstance(value, bool) and value != 0
        case ast.Name() | ast.Attribute(ast.Name()):
            return names.kinds.get(ast.unparse(node)) == "int"
        case _:
            return False


def _root(node: ast.expr) -> ast.expr | None:
    """`x` of `x.a().b`; None without a call."""
    root = node
    while isinstance(root, ast.Call) and isinstance(root.func, ast.Attribute):
        root = root.func.value
    return None if root is node else root


def _is_count(node: ast.expr) -> bool:
    """Whether an expression is a call such as `torch.arange(n)`."""
    match node:
        case ast.Call(ast.Attribute(attr="arange"), [_]):
            return True
        case _:
            return False


def _of_repeat(node: ast.Call) -> Iterator[ast.expr]:
    """Each element n times in a row for all elements n times over, as of heads that share one of keys; and back."""
    match node:
        case ast.Call(ast.Attribute(x, "repeat" | "tile"), args, []):
            several = [place for place, times in enumerate(args) if ast.unparse(times) != "1"]
            if len(several) == 1:
                dim = several[0] - len(args)
                yield ast.Call(ast.Attribute(x, "repeat_interleave", ast.Load()), [args[dim], ast.Constant(dim)], [])
        case ast.Call(ast.Attribute(x, "repeat_interleave"), [times, dim], []):
            yield parsed(f"torch.cat([{ast.unparse(x)}] * ({ast.unparse(times)}), {ast.unparse(dim)})")
        case _:
            pass


def _swapped(node: ast.Call, place: int) -> Iterator[ast.expr]:
    """The call with this argument and the next one exchanged."""
    if place + 1 < len(node.args):
        first, second = node.args[place : place + 2]
        yield ast.Call(node.func, [*node.args[:place], second, first, *node.args[place + 2 :]], node.keywords)


def _of_subscript(node: ast.Subscript) -> Alternatives:
    yield LIKELY, node.value
    if isinstance(node.slice, ast.Slice):
        for rank, other in _of_slice(node.slice):
            yield rank, ast.Subscript(node.value, other, node.ctx)
    elif isinstance(node.slice, ast.Tuple):
        parts = node.slice.elts
        for place, part in enumerate(parts):
            for rank, other in _of_slice(part) if isinstance(part, ast.Slice) else ():
                others = ast.Tuple([*parts[:place], other, *parts[place + 1 :]], ast.Load())
                yield rank, ast.Subscript(node.value, others, node.ctx)


def _of_slice(node: ast.Slice) -> Iterator[tuple[int, ast.Slice]]:
    lower, upper, step = node.lower, node.upper, node.step
    if lower and upper:
        yield LIKELY, ast.Slice(lower, None, step)
        yield LIKELY, ast.Slice(None, upper, step)
    elif lower or upper:
        yield LIKELY, ast.Slice(upper, lower, step)
    match lower, upper:  # the last rows for the first ones, and back: a halo from the other end
        case None, ast.Constant() | ast.Name() | ast.Attribute():
            yield LIKELY, ast.Slice(ast.UnaryOp(ast.USub(), upper), None, step)
        case ast.UnaryOp(ast.USub(), rows), None:
            yield LIKELY, ast.Slice(None, rows, step)
        case _:
            pass
    if upper is None and lower is not None:
        yield POSSIBLE, ast.Slice(lower, ast.Constant(-1), step)
    if lower is None and upper is not None:
        yield POSSIBLE, ast.Slice(ast.Constant(1), upper, step)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
