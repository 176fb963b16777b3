"""Check that public docstrings state costs, errors, specs and arguments, as far as the code tells (test_docstrings.py).

`Errors:` where the function, or one of ours that it reaches, raises; `Cost:` where it reaches a collective; a spec
string where it takes both tensors and ranks; every argument by its name, here or, if many functions of a package have
it, in the package's docstring. A function reaches the functions, constructors and autograd Functions of ours that its
source names. A contract counts as a raise and as a spec string. Methods of a value made at run time are not followed:
there the rule asks for too little, never for too much.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from torch_impl.contract import contract_of, spec_line

PRODUCTION = "torch_impl"
ROOT = Path(__file__).resolve().parents[1]
HOMES = [f"{PRODUCTION}.{path.parent.name}" for path in sorted((ROOT / PRODUCTION).glob("*/__init__.py"))]
HOMES += ["torch_impl.pipelining.functional"]
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast"),
    *("all_to_all", "all_to_all_single", "isend", "irecv", "send", "recv", "batch_isend_irecv", "scatter", "barrier"),
    *("fully_shard", "replicate", "parallelize_module", "distribute_tensor"),
}
COLLECTIVE_METHODS = {"full_tensor", "redistribute"}  # of DTensors, which are values and cannot be followed
SPEC = re.compile(r'"[^"\n]*"')
RANKS = ("ProcessGroup", "DeviceMesh", "MeshView")


def exported(home: str) -> dict[str, Any]:
    """All exported names of a package, constants and private names of its page included."""
    module = import_module(home)
    body = ast.parse(inspect.getsource(module)).body
    names = [alias.asname for node in body if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname]
    return {name: getattr(module, name) for name in names}


def missing(public: Any) -> list[str]:
    """The items that a docstring lacks: of a function, or of a class with its constructor and public methods."""
    if not inspect.isclass(public):
        return _missing_items(public, inspect.getdoc(public), _arguments(public), [public])
    if issubclass(public, torch.autograd.Function):
        parts = [inspect.unwrap(public.forward), inspect.unwrap(public.backward)]
        return _missing_items(public, inspect.getdoc(public), _arguments(parts[0])[1:], parts)
    in_methods = [f"{name}: {problem}" for name, method in _methods(public) for problem in missing(method)]
    constructor = public.__dict__.get("__init__")
    if is_dataclass(public) or getattr(constructor, "__module__", "") != public.__module__:
        constructor = None  # a dataclass shows its fields itself; a protocol's constructor is Python's
    text = "\n".join(filter(None, (public.__doc__, getattr(constructor, "__doc__", None))))
    return (
        _missing_items(
            public, text, _arguments(constructor)[1:] if constructor else [], [constructor] if constructor else []
        )
        + in_methods
    )


def repeats_specs(public: Any) -> bool:
    """Whether the docstring of a contracted function repeats the specs, which the manual prints from its signature."""
    specs = spec_line(public)
    lines = (inspect.getdoc(public) or "").splitlines()
    return bool(specs) and any(line.startswith("    ") and SPEC.search(line) and "->" in line for line in lines)


def contracted(home: str) -> dict[str, Any]:
    """A package's exported functions, classes and methods that state a contract."""
    stated = {}
    for name, public in exported(home).items():
        methods = vars(public).items() if inspect.isclass(public) else ()
        parts = {f"{name}.{method}": getattr(each, "__func__", each) for method, each in methods if method[0] != "_"}
        parts = {
            key: each for key, each in parts.items() if not key.endswith(".forward")
        }  # the class's docstring has it
        stated |= {key: each for key, each in {name: public, **parts}.items() if contract_of(each) is not None}
    return stated


def _methods(public: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in vars(public).items():
        method = getattr(value, "__func__", getattr(value, "fget", value))
        is_hook = issubclass(public, torch.nn.Module) and name == "forward"  # the class's docstring has it
        if inspect.isfunction(method) and not name.startswith("_") and not is_hook:
            yield name, method


def _arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(inspect.unwrap(function)).parameters.values())


def _missing_items(
    public: Any, doc: str | None, arguments: list[inspect.Parameter], starts: list[Callable[..., Any]]
) -> list[str]:
    if not doc or not doc.strip():
        return ["a docstring"]
    reached = _reached(starts)
    kinds = [str(argument.annotation) for argument in arguments]
    is_over_ranks = any("Tensor" in kind for kind in kinds) and any(r in kind for r in RANKS for kind in kinds)
    contract = contract_of(public)
    checks = {
        "Errors:": (contract is not None or any(map(_raises, reached))) and "Errors:" not in doc,
        "Cost:": any(_sends(function) for function in reached) and "Cost:" not in doc,
        "a spec string": is_over_ranks and not SPEC.search(doc) and not spec_line(public),
    }
    names = [x.name for x in arguments if x.name != "self" and not x.name.startswith("_")]
    explained = f"{doc}\n{_package_docstring(public)}"
    unexplained = [name for name in names if not re.search(rf"\b{name}\b", explained)]
    return [what for what, is_missing in checks.items() if is_missing] + unexplained


def _package_docstring(public: Any) -> str:
    """The package's docstring, which explains arguments that many of its functions share; the manual shows it."""
    package = ".".join(str(public.__module__).split(".")[:2])  # of the component, also for a module in a folder inside
    return (package.startswith(PRODUCTION) and import_module(package).__doc__) or ""


def _raises(function: Callable[..., Any]) -> bool:
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(_tree(function)))


def _sends(function: Callable[..., Any]) -> bool:
    """Whether the function calls a collective of torch, or a method that sends."""
    for node in ast.walk(_tree(function)):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVE_METHODS:
            return True
        if isinstance(node, (ast.Attribute, ast.Name)):
            value = _value(node, function, {})
            is_torch = str(getattr(value, "__module__", "")).startswith("torch.distributed")
            if is_torch and getattr(value, "__name__", "") in COLLECTIVES:
                return True
    return False


def _reached(starts: list[Callable[..., Any]]) -> set[Callable[..., Any]]:
    seen, todo = set(), [inspect.unwrap(start) for start in starts]
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        local = _local_imports(function)
        for node in ast.walk(_tree(function)):
            if isinstance(node, (ast.Name, ast.Attribute)):
                todo += _called(_value(node, function, local))
    return seen


def _called(value: Any) -> list[Callable[..., Any]]:
    """The functions of ours that run where a value is called."""
    if not getattr(value, "__module__", None) or not str(value.__module__).startswith(PRODUCTION):
        return []
    if inspect.isclass(value):
        names = ("forward", "backward") if issubclass(value, torch.autograd.Function) else ("__init__", "__post_init__")
        parts = [getattr(value.__dict__.get(name), "__func__", value.__dict__.get(name)) for name in names]
    else:
        parts = [value]
    plain = [inspect.unwrap(part) for part in parts if callable(part)]
    return [part for part in plain if inspect.isfunction(part) and part.__code__.co_filename.endswith(".py")]


def _value(node: ast.expr, function: Callable[..., Any], local: dict[str, Any]) -> Any:
    """The value of a name or a dotted name in the function's module; None if only a run could tell."""
    if isinstance(node, ast.Name):
        return local.get(node.id, function.__globals__.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, function, local)
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) or inspect.isclass(owner) else None
    return None


def _local_imports(function: Callable[..., Any]) -> dict[str, Any]:
    imports: dict[str, Any] = {}
    for node in ast.walk(_tree(function)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRODUCTION):
            try:
                module = import_module(node.module or "")
            except ImportError:  # an optional package is absent, such as Triton
                continue
            imports |= {alias.asname or alias.name: getattr(module, alias.name, None) for alias in node.names}
    return imports


_TREES: dict[Callable[..., Any], ast.AST] = {}


def _tree(function: Callable[..., Any]) -> ast.AST:
    if function not in _TREES:
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except OSError:  # methods made by a dataclass have no source
            source = ""
        _TREES[function] = ast.parse(source)
    return _TREES[function]
