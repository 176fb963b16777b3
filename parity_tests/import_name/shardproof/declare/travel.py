"""Send a per-rank function to other processes: pickle it by value, in its current state."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from functools import reduce
from importlib import import_module
from typing import Any

import cloudpickle

# Scheme files, and modules that they imported from their own folders.
IMPORTED_WITH_SCHEMES: set[str] = set()


class CannotTravel(TypeError):
    """A function that uses an object which no other process can have."""


class _Pickler(cloudpickle.Pickler):
    """Also pickles, by name, torch's operators and modules that have a class of their own; cloudpickle cannot.

    Code keeps its file name, which cloudpickle 3.1.3 drops: errors on a rank name their line. Compiled functions of
    torch.compile cannot be pickled; if ranks import the file, they have its globals already.
    """

    def __init__(self, file: io.BytesIO, file_is_imported: bool) -> None:
        super().__init__(file)
        self._file_is_imported = file_is_imported

    def reducer_override(self, obj: Any) -> Any:
        if self._file_is_imported and type(obj) is types.FunctionType and hasattr(obj, "_torchdynamo_orig_callable"):
            for name, value in vars(sys.modules.get(obj.__module__, types)).items():
                if value is obj:
                    return _global, (obj.__module__, name)
        if isinstance(obj, types.CodeType):
            build, arguments, *_ = self.dispatch_table[types.CodeType](obj)
            return _code_of_file, (build, arguments, obj.co_filename)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and obj.__name__ in sys.modules:
            return import_module, (obj.__name__,)  # torch._dynamo.config: no module to cloudpickle
        if type(obj).__module__ in ("torch._ops", "torch._classes") and type(obj).__name__ in _OPERATORS:
            return _operator, (_OPERATORS[type(obj).__name__].format(obj),)
        return super().reducer_override(obj)


_OPERATORS = {
    "_Ops": "ops",
    "_Classes": "classes",
    "_OpNamespace": "ops.{0.name}",
    "OpOverloadPacket": "ops.{0}",
    "OpOverload": "ops.{0}",
}


def _code_of_file(build: Callable[..., types.CodeType], arguments: tuple[Any, ...], file: str) -> types.CodeType:
    return build(*arguments).replace(co_filename=file)


def _global(module: str, name: str) -> Any:
    return getattr(sys.modules[module], name)


def _operator(path: str) -> Any:
    import torch

    return reduce(getattr, path.split("."), torch)


def dumps(travelling: Any, *, file_is_imported: bool = False) -> bytes:
    """Pickle a function, or an object with a function as `.fn`, with its own module by value.

    Modules in the scheme's folder are pickled by value too, unless ranks import the file and so have them: functions
    that share state must share one copy there.

    Errors: CannotTravel.
    """
    fn = getattr(travelling, "fn", travelling)
    check_travels(fn)
    imported = set() if file_is_imported else IMPORTED_WITH_SCHEMES
    modules = {getattr(fn, "__module__", None) or "__main__", *imported}
    try:
        return state_of(travelling, modules, file_is_imported=file_is_imported)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        what = f"scheme '{name}': the function cannot be sent to other processes: {error}"
        raise CannotTravel(f"{what}; make what it uses inside it, or a global of a file that it imports") from error


def state_of(function: Any, modules: set[str], *, file_is_imported: bool = False) -> bytes:
    """Pickle a function with everything that it uses from these modules; the bytes are equal until any of it changes.

    Errors: any exception of an object that cannot be pickled.
    """
    with _by_value(modules):
        file = io.BytesIO()
        _Pickler(file, file_is_imported).dump(function)
        return file.getvalue()


def without_annotations(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without annotations: they may name JAX types, which ranks would then import."""
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    copy.__module__, copy.__qualname__ = fn.__module__, fn.__qualname__
    return copy


def check_travels(fn: Any) -> None:
    """Raise CannotTravel, naming the variable, for a closure or global that no other process can have."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
    used = {name: _content(cell) for name, cell in cells}
    used |= {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    for name, value in used.items():
        kind = _untravelable(value)
        if kind:
            raise CannotTravel(
                f"scheme '{fn.__name__}': the function uses {name!r}, {kind}, which no other process has; "
                "pass it as an input or take it from the mesh"
            )


def _untravelable(value: Any) -> str | None:
    import torch.distributed as dist

    if isinstance(value, dist.ProcessGroup):
        return "an open process group"
    if isinstance(value, types.GeneratorType):
        return "a generator"
    if type(value).__module__.partition(".")[0] == "jaxlib":
        return "a JAX array"
    return None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


@contextlib.contextmanager
def _by_value(names: set[str]) -> Iterator[None]:
    registered = []
    for name in names:
        module = sys.modules.get(name)
        if module is None or name == "__main__" or name in cloudpickle.list_registry_pickle_by_value():
            continue
        if name.startswith(("torch_impl", "shardproof.engines")) and "test_" not in name:
            continue
        cloudpickle.register_pickle_by_value(module)
        registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
