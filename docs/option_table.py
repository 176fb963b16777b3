"""A table of each option of a public function: its documented values, and the schemes that draw each value."""

from __future__ import annotations

import ast
import html
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from scheme_table import schemes

from shardproof.declare.declared import Declared
from shardproof.implementation.public_names import PublicName, functions_of, public_names_of
from torch_impl.contract import OneOf

NONE, GIVEN, DEFAULT, OTHER = "None", "given", "the default", "another value"


@dataclass
class Option:
    """A parameter of a public function with its documented values, and the schemes that have each of them."""

    function: PublicName
    name: str
    default: Any
    documented: tuple[str, ...]
    drawn: dict[str, list[str]] = field(default_factory=dict)

    @property
    def holes(self) -> list[str]:
        """The documented values that no scheme has."""
        return [value for value in self.documented if not self.drawn.get(value)]

    def value_of(self, value: Any) -> str:
        """The documented value that a drawn one stands for."""
        if repr(value) in self.documented:
            return repr(value)
        if NONE in self.documented:
            return NONE if value is None else GIVEN
        return DEFAULT if value == self.default else OTHER


def documented_values(annotation: Any, default: Any) -> tuple[str, ...]:
    """The values that an annotation lists; else NONE and GIVEN if it is optional, DEFAULT and OTHER if not."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        kinds = [kind for kind in annotation.__metadata__ if isinstance(kind, OneOf)]
        return tuple(map(repr, kinds[0].choices)) if kinds else documented_values(arguments[0], default)
    if origin is Literal:
        return tuple(map(repr, arguments))
    if origin in (typing.Union, types.UnionType) and type(None) in arguments:
        others = [each for each in arguments if each is not type(None)]
        listed = documented_values(others[0], inspect.Parameter.empty) if len(others) == 1 else ()
        return (NONE, *(listed or (GIVEN,)))
    if annotation is bool:
        return ("False", "True")
    return (DEFAULT, OTHER) if default is not inspect.Parameter.empty else ()


def python_function(function: PublicName) -> Any:
    """The function itself, the forward of an autograd function, or a class's constructor."""
    value = function.value
    if not isinstance(value, type):
        return inspect.unwrap(value)
    return inspect.unwrap(value.forward if issubclass(value, torch.autograd.Function) else value.__init__)


def options_of(function: PublicName) -> Iterator[Option]:
    """The options of a function, or of a class's constructor: arguments with more than one documented value."""
    target = python_function(function)
    try:
        hints = typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError):  # names that only a type checker imports
        return
    for name, parameter in inspect.signature(target).parameters.items():
        documented = documented_values(hints[name], parameter.default) if name in hints else ()
        if len(documented) > 1:
            yield Option(function, name, parameter.default, documented)


def values_of(scheme: Declared, option: Option) -> Iterator[str]:
    """The documented values that a scheme draws: as an option or input of this name, or as its code passes them."""
    if option.name in scheme.all_options:
        yield from map(option.value_of, scheme.all_options[option.name])
        return
    if any(arg.name.partition(".")[0] == option.name for arg in scheme.inputs):
        yield GIVEN
        return
    passed = [value for name, value in arguments(scheme.fn, option.function) if name == option.name]
    if not passed and any(name is None for name, _ in arguments(scheme.fn, option.function)):
        passed = [ast.Name(option.name)] * mentions(scheme.fn, option.name)  # passed by **keywords
    for value in passed:
        yield from values_of_expression(value, option, scheme)
    if not passed and option.default is not inspect.Parameter.empty:
        yield option.value_of(option.default)


def values_of_expression(value: ast.expr, option: Option, scheme: Declared) -> Iterator[str]:
    """The documented values that an argument in a scheme's code may have; a conditional expression has both."""
    if isinstance(value, ast.Constant):
        yield option.value_of(value.value)
    elif isinstance(value, ast.Name) and value.id in scheme.all_options:
        yield from map(option.value_of, scheme.all_options[value.id])
    elif isinstance(value, ast.IfExp):
        for branch in (value.body, value.orelse):
            yield from values_of_expression(branch, option, scheme)
    elif isinstance(value, ast.Call | ast.Compare | ast.UnaryOp) and option.documented == ("False", "True"):
        yield from option.documented
    else:
        yield GIVEN if GIVEN in option.documented else OTHER


@cache
def trees(fn: Any) -> tuple[ast.AST, ...]:
    """The code of a scheme's function and of its helpers."""
    return tuple(ast.parse(textwrap.dedent(inspect.getsource(each))) for each in functions_of(fn))


def mentions(fn: Any, name: str) -> bool:
    """Whether a scheme's code has a name as a keyword, or as a key of a dict."""
    nodes = [node for tree in trees(fn) for node in ast.walk(tree)]
    keywords = {node.arg for node in nodes if isinstance(node, ast.keyword)}
    return name in keywords | {node.value for node in nodes if isinstance(node, ast.Constant)}


@cache
def arguments(fn: Any, function: PublicName) -> tuple[tuple[str | None, ast.expr], ...]:
    """The arguments, with their names, of the calls of a public function in a scheme's function and its helpers."""
    names = [*inspect.signature(python_function(function)).parameters]
    names = names[names[0] in ("self", "ctx") :]
    found: list[tuple[str | None, ast.expr]] = []
    for tree in trees(fn):
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if function.name in ast.unparse(call.func).split("."):
                found += zip(names, call.args, strict=False)
                found += [(keyword.arg, keyword.value) for keyword in call.keywords]
    return tuple(found)


@cache
def table_of_options() -> tuple[Option, ...]:
    """Every option of the public functions that schemes call, with the schemes that draw each value."""
    callers: dict[PublicName, list[Declared]] = {}
    for scheme in schemes():
        for name in public_names_of(scheme.fn):
            if not name.carries_arguments:
                callers.setdefault(name, []).append(scheme)
    options = [option for name in sorted(callers, key=str) for option in options_of(name)]
    for option in options:
        for scheme in callers[option.function]:
            for value in dict.fromkeys(values_of(scheme, option)):
                option.drawn.setdefault(value, []).append(scheme.name)
    return tuple(options)


def components() -> list[str]:
    """The components whose public functions schemes call."""
    return sorted({option.function.package.partition(".")[2] for option in table_of_options()})


def table(component: str) -> str:
    """The options of one component's functions, as HTML; a value that no scheme has is set off."""
    rows = [row(option) for option in table_of_options() if option.function.package.endswith(f".{component}")]
    head = "<tr><th>function</th><th>option</th><th>value, and schemes that have it</th></tr>"
    return f"<table class='docutils schemes'>{head}{''.join(rows)}</table>"


def row(option: Option) -> str:
    values = "".join(f"<code>{html.escape(value)}: {_schemes(option, value)}</code>" for value in option.documented)
    function = f"<td><code>{html.escape(option.function.name)}</code></td>"
    return f"<tr>{function}<td><code>{html.escape(option.name)}</code></td><td>{values}</td></tr>"


def _schemes(option: Option, value: str) -> str:
    names = option.drawn.get(value, [])
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return html.escape(", ".join(names[:2]) + more) if names else "<strong>no scheme</strong>"


def closing() -> str:
    """How many documented values there are, and how many no scheme has."""
    total = sum(len(option.documented) for option in table_of_options())
    holes = sum(len(option.holes) for option in table_of_options())
    return f"{total - holes} of {total} documented values are drawn; {holes} are not."
