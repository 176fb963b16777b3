"""Names of dims, and dims tied to others, `{"h": "2*g"}`: parses formulas, rejects circular ones, evaluates them."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardproof.declare.declaration_errors import DeclarationErrors
    from shardproof.declare.declared import Argument
    from shardproof.declare.draws import Draw

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


def check_dims(
    leaves: Sequence[Argument],
    results: Sequence[Argument],
    dims: Mapping[str, Any],
    mesh: Mapping[str, Any],
    draws: Mapping[str, Draw],
    errors: DeclarationErrors,
) -> None:
    input_dims = {name for arg in leaves for name in names_of(arg)}
    all_dims = input_dims | {name for arg in results for name in names_of(arg)}
    formulas = {name: formula for name, formula in dims.items() if isinstance(formula, str)}
    used = {how.dim for how in draws.values() if how.dim}
    for name, formula in formulas.items():
        used |= set(formula_names(formula, name, errors))
    for name, choices in dims.items():
        with errors.collected():
            if name in mesh:
                raise errors(f"dims has {name!r}, which is an axis of the mesh; its sizes are mesh[{name!r}]")
            if name not in all_dims | used:
                raise errors(f"dims has {name!r}, the dims are ({', '.join(sorted(all_dims))})")
            unknown = [n for n in names_in(formulas.get(name, "0")) if n not in (*input_dims, *dims, *mesh)]
            if unknown:
                nor = f"no input has dim {unknown[0]}, nor is it an axis ({', '.join(mesh)})"
                raise errors(f"dims[{name!r}] = {choices!r}: {nor}")
            if isinstance(choices, int):
                raise errors(f"dims[{name!r}] is {choices!r}; write ({choices!r},)")
            sizes = () if name in formulas else choices
            if not choices or not all(isinstance(size, int) and size >= 0 for size in sizes):
                raise errors(f"dims[{name!r}] is {choices!r}; give a tuple of sizes or a formula such as '2*g'")
    for name in dims:
        _check_no_cycle([name], dims, errors)


def names_of(arg: Argument) -> set[str]:
    """The names of a tensor's dims; a merged dim gives the name of each part."""
    return {name for dim in arg.spec.dims for name in dim.parts if not name.isdigit()}


def check_names(
    mesh: Mapping[str, Any],
    leaves: Sequence[Argument],
    results: Sequence[Argument],
    choices: Sequence[Mapping[str, Any]],
    errors: DeclarationErrors,
) -> None:
    """Dims, mesh axes and options have distinct names, since `verify(b=2)` gives any of them by its name."""
    dims = {name for arg in (*leaves, *results) for name in (*arg.spec.dim_names, *names_of(arg))}
    for kind, names in (("dim", dims), ("mesh axis", {*mesh})):
        for name in itertools.chain(*choices):
            if name in names:
                raise errors(
                    f"option {name!r} is also a {kind}; rename one of them, as verify({name}=...) names either"
                )
    if both := sorted(dims & {*mesh}):
        raise errors(f"{both[0]!r} is both a dim and a mesh axis; rename one, as verify({both[0]}=...) names either")


def groups(arguments: Sequence[Argument]) -> dict[str, str]:
    """The formula of each merged dim: its size is the product of its parts."""
    names = (dim.name for arg in arguments for dim in arg.spec.dims if len(dim.parts) > 1)
    return {name: name for name in names}


def _check_no_cycle(path: Sequence[str], dims: Mapping[str, Any], errors: DeclarationErrors) -> None:
    """Follow the formulas from the last dim of the path, and reject a cycle."""
    formula = dims.get(path[-1])
    for name in formula_names(formula, path[-1], errors) if isinstance(formula, str) else ():
        if name in path:
            raise errors(f"dims: {' -> '.join([*path[path.index(name) :], name])} is a cycle")
        _check_no_cycle([*path, name], dims, errors)


def formula_names(text: str, name: str, errors: DeclarationErrors) -> Sequence[str]:
    """Dims and axes in a formula; rejects anything except +, -, *, // of these and integers."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise errors(f"dims[{name!r}] = {text!r} is not a formula; write for example '2*g'") from None
    allowed = (ast.BinOp, ast.Name, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Load)
    numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if not all(isinstance(node, allowed) for node in ast.walk(tree)) or any(type(n) is not int for n in numbers):
        raise errors(f"dims[{name!r}] = {text!r}: a formula has dims, integers and + - * //")
    return names_in(text)


@cache
def _parsed(formula: str) -> ast.expr:
    """The tree of a formula, which is evaluated for each shape that is tried."""
    return ast.parse(formula, mode="eval").body


@cache
def names_in(formula: str) -> tuple[str, ...]:
    return tuple(node.id for node in ast.walk(_parsed(formula)) if isinstance(node, ast.Name))


def complete_dims(dims: Mapping[str, Any], shape: Mapping[str, int], mesh: Mapping[str, int]) -> dict[str, int]:
    """The shape, completed with the dims that formulas derive from dims and axes."""
    full = dict(shape)
    waiting = {name: formula for name, formula in dims.items() if isinstance(formula, str) and name not in full}
    while waiting:
        for name, formula in list(waiting.items()):
            try:
                full[name] = _evaluated(_parsed(formula), {**mesh, **full})
                del waiting[name]
            except KeyError:
                continue
    return full


def _evaluated(node: Any, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_evaluated(node.left, sizes), _evaluated(node.right, sizes))
    return sizes[node.id] if isinstance(node, ast.Name) else int(node.value)
