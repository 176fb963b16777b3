"""A function or class of another implementation, with the name and arguments of ours.

Each rank gets the module's name and imports it. If their function lacks a parameter of ours, an argument equal to our
default is dropped, and any other argument makes the call `not applicable`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from shardproof.declare import discover
from shardproof.endings.raised import message_of, pass_interrupt
from shardproof.implementation.public_names import PublicName

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class NotApplicable(Exception):
    """A call that the other function does not accept: it lacks a parameter, or requires an additional one."""


def module_of(target: str) -> ModuleType:
    """Import `package.module`, also from the working folder, or FILE.py. Errors: UnusableTarget."""
    if target.endswith(".py"):
        return discover.module_of_file(target)
    if os.sep in target or Path(target).is_file():
        raise discover.UnusableTarget(f"{target} is not a Python file; give FILE.py or the name of a module, as a.b")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # also for the ranks, which get this process's path
    try:
        return importlib.import_module(target)
    except BaseException as error:
        pass_interrupt(error)
        hint = f"; did you mean {target}.py?" if Path(f"{target}.py").is_file() else ""
        raise discover.UnusableTarget(
            f"cannot import {target}: {type(error).__name__}: {message_of(error)}{hint}"
        ) from error


class Offered:
    """The object in `target` with the public name of one of ours.

    Call it, or its `apply`, with our arguments.
    """

    def __init__(self, target: str, name: PublicName) -> None:
        self.target, self.name = target, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ours = self.name.value
        returned = _call_theirs(self._theirs, _signature(self._theirs), _signature(ours), args, kwargs)
        return OfferedObject(returned, ours) if inspect.isclass(ours) and inspect.isclass(self._theirs) else returned

    def apply(self, *args: Any) -> Any:
        """Call the `apply` of a torch.autograd.Function, with the arguments of its forward but `ctx`."""
        theirs, ours = (_signature_of_apply(each) for each in (self._theirs, self.name.value))
        return _call_theirs(self._theirs.apply, theirs, ours, args, {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("target", "name"):  # empty during unpickling
            raise AttributeError(name)
        return _attribute_of_theirs(self._theirs, self.name.value, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Offered, (self.target, self.name)

    @property
    def place(self) -> str:
        """`my_module.vocab_parallel_logprob (my_module.py:12)`."""
        theirs = inspect.unwrap(self._theirs)
        home = f"{getattr(theirs, '__module__', None) or self.target}.{self.name.name}"
        if self.target.endswith(".py"):  # the module's name contains a hash of its path
            home = f"{Path(self.target).stem}.{self.name.name}"
        try:
            line = inspect.getsourcelines(theirs)[1]
            return f"{home} ({Path(inspect.getsourcefile(theirs) or '?').name}:{line})"
        except (OSError, TypeError):  # compiled code
            return home

    @property
    def has_our_parameters(self) -> bool:
        """Whether the other function has every parameter of ours, by name, and the other class every method."""
        if inspect.isclass(self.name.value) and any(
            not hasattr(self._theirs, name) for name in _methods(self.name.value)
        ):
            return False
        kind = _signature_of_apply if hasattr(self.name.value, "apply") else _signature
        theirs, ours = kind(self._theirs), kind(self.name.value)
        if theirs is None or ours is None:
            return True
        required = [
            p for p in theirs.parameters.values() if p.default is p.empty and p.kind in (*POSITIONAL, *BY_KEYWORD)
        ]
        return set(ours.parameters) <= set(theirs.parameters) and {p.name for p in required} <= set(ours.parameters)

    @functools.cached_property
    def _theirs(self) -> Any:
        return getattr(module_of(self.target), self.name.name)


class OfferedObject:
    """An object of another implementation's class, in place of one of ours.

    A call that needs a member that theirs lacks is not applicable; a scheme runs on the members that both have.
    """

    def __init__(self, theirs: Any, our_class: type) -> None:
        self._object, self._our_class = theirs, our_class

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_object", "_our_class"):  # empty while it is copied
            raise AttributeError(name)
        value = _attribute_of_theirs(self._object, self._our_class, name)
        ours = getattr(self._our_class, name, None)
        if not inspect.ismethod(value) or not inspect.isfunction(ours):
            return value
        return lambda *args, **kwargs: _call_theirs(value, _signature(value), _without_first(ours), args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> OfferedObject:
        if hasattr(self._our_class, "__deepcopy__") and not hasattr(self._object, "__deepcopy__"):
            raise NotApplicable("method __deepcopy__")
        return OfferedObject(copy.deepcopy(self._object, memo), self._our_class)


def _attribute_of_theirs(theirs: Any, ours: Any, name: str) -> Any:
    if hasattr(ours, name) and not hasattr(theirs, name):
        raise NotApplicable(f"attribute {name}")
    return getattr(theirs, name)


def _methods(ours: type) -> list[str]:
    """The public methods of one of our classes."""
    return [name for name in dir(ours) if not name.startswith("_") and inspect.isfunction(getattr(ours, name))]


def _without_first(method: Callable[..., Any]) -> inspect.Signature:
    """The signature of a method without `self`."""
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _call_theirs(
    theirs: Callable[..., Any],
    signature: inspect.Signature | None,
    ours: inspect.Signature | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call the other function with our arguments, without an argument that it lacks if the value is our default."""
    if signature is None or ours is None or _fits(signature, args, kwargs):
        return theirs(*args, **kwargs)
    parameters = list(signature.parameters.values())
    # 1. Positional arguments stay positional as far as the other function accepts them; the rest is passed by name.
    positional_count = sum(p.kind in POSITIONAL for p in parameters)
    names = [p.name for p in ours.parameters.values() if p.kind in POSITIONAL]
    first, rest = (
        list(args[:positional_count]),
        dict(zip(names[positional_count:], args[positional_count:], strict=False)),
    )
    # 2. An argument that the other function lacks may be dropped if it equals our default.
    by_keyword = {p.name for p in parameters if p.kind in BY_KEYWORD} - {p.name for p in parameters[: len(first)]}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    arguments = {}
    for name, value in {**rest, **kwargs}.items():
        if name in by_keyword or (takes_all and name not in signature.parameters):
            arguments[name] = value
        elif not _is_default(value, ours.parameters.get(name)):
            raise NotApplicable(f"parameter {name}")
    # 3. A parameter that only the other function requires has no known value.
    bound = signature.bind_partial(*first, **arguments).arguments
    for p in parameters:
        if p.default is p.empty and p.kind in (*POSITIONAL, *BY_KEYWORD) and p.name not in bound:
            raise NotApplicable(f"parameter {p.name}, which ours lacks")
    return theirs(*first, **arguments)


def _fits(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_default(value: Any, parameter: inspect.Parameter | None) -> bool:
    if parameter is None or parameter.default is parameter.empty:
        return False
    default = parameter.default
    return value is default or (isinstance(value, int | float | str | tuple) and value == default)


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # compiled code may have no signature
        return None


def _signature_of_apply(function: Any) -> inspect.Signature | None:
    """The signature of a Function's forward without its first parameter `ctx`."""
    forward = _signature(function.forward)
    if forward is None:
        return None
    parameters = list(forward.parameters.values())
    return forward.replace(parameters=parameters[1:] if parameters and parameters[0].name == "ctx" else parameters)
