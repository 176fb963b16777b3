"""Inject one bug: import the code under test again from patched text, in memory; the tree is never written.

PatchedModules has copies of torch_impl and of the parity tests that use it. Inside `with modules:` they stand in
sys.modules and in the harness; outside, the healthy ones do. To ranks in other processes the patch travels by
value, and each of them imports copies of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from parity_tests.evidence.injected_bugs.injected_bug import ROOT, InjectedBug, patched_text

# Of the tests' folders those that judge, and of the package's rooms those that run production themselves.
NOT_UNDER_TEST, UNDER_TEST = ("cli", "evidence", "harness", "specimens"), ("cost", "tracing", "training")


class PatchedModules:
    """The modules of one bug, swapped in and out together.

    `names` are imported under the patch at once; other modules under test that are imported inside the block
    belong to these modules too.
    """

    def __init__(self, file: str, text: str, names: Iterable[str] = ()) -> None:
        self.file, self.text = file, text
        self._patched: dict[str, ModuleType] = {}
        self._healthy: dict[str, ModuleType] = {}
        self._bound: list[tuple[dict[str, Any], str, Any]] = []
        self._finder = _Finder(str(ROOT / file), text)
        with self:
            self.modules = [importlib.import_module(name) for name in names]

    @classmethod
    def of(cls, bug: InjectedBug, names: Iterable[str] = ()) -> PatchedModules:
        patched = patched_text(bug)
        return cls(patched.file, patched.text, names)

    def __enter__(self) -> PatchedModules:
        self._healthy = _remove_modules()
        _insert_modules(self._patched)
        sys.meta_path.insert(0, self._finder)
        lines = self.text.splitlines(keepends=True)
        # Triton runs a kernel's source as `inspect` reads it, not its code; without a date the disk is not looked at.
        linecache.cache[str(ROOT / self.file)] = (len(self.text), None, lines, str(ROOT / self.file))
        try:
            for namespace, name, value in list(_bindings(self._healthy)):
                patched = _counterpart(value)
                self._bound.append((namespace, name, value))
                namespace[name] = patched
        except BaseException:  # a patch that cannot be imported
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._bound:
            namespace, name, value = self._bound.pop()
            namespace[name] = value
        sys.meta_path.remove(self._finder)
        linecache.cache.pop(str(ROOT / self.file), None)
        self._patched = _remove_modules()
        _insert_modules(self._healthy)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The healthy modules for a while, from inside the block."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def wrap_program(self, job: Callable[..., Any]) -> Callable[..., Any]:
        """A job of this code that travels with the patch. To be pickled inside the block."""
        return Shipped(job, self)


class Shipped:
    """A job that is unpickled and run under its patch, in whatever process it arrives."""

    def __init__(self, job: Callable[..., Any], modules: PatchedModules) -> None:
        self.fn = getattr(job, "fn", job)  # which the harness inspects to see whether the job can travel
        self._job, self._modules = job, modules

    def __call__(self, *args: Any) -> Any:
        with self._modules:
            return self._job(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._modules.file, self._modules.text, cloudpickle.dumps(self._job))


def _unpickled(file: str, text: str, job: bytes) -> Shipped:
    modules = PatchedModules(file, text)
    with modules:
        return Shipped(cloudpickle.loads(job), modules)


class _Finder:
    """Finds one module, the patched one, with its text in place of its file's."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not _is_under_test(name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin == self._path:
            spec.loader = _Loader(name, self._path, self._text)
        return spec


class _Loader(SourceFileLoader):
    """Compiles the patched text and reads no cache of bytecode."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)


def _is_under_test(name: str) -> bool:
    """Production, the parity tests of components, and the package's training and tracing; the judge stays as it is."""
    package, _, rest = name.partition(".")
    if package == "torch_impl":
        return True
    if package == "shardproof":
        return rest.split(".")[0] in UNDER_TEST
    return package == "parity_tests" and "." in rest and rest.split(".")[0] not in NOT_UNDER_TEST


def _remove_modules() -> dict[str, ModuleType]:
    """Take the modules under test out of sys.modules, and out of the packages that stay.

    `from package import module` would otherwise take the module that the package has, which is without the patch.
    """
    removed = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_under_test(name)}
    for name, module in removed.items():
        package, _, child = name.rpartition(".")
        if package in sys.modules and vars(sys.modules[package]).get(child) is module:
            delattr(sys.modules[package], child)
    return removed


def _insert_modules(modules: dict[str, ModuleType]) -> None:
    """Put modules into sys.modules, and into the packages that stay, where imports leave them too."""
    sys.modules.update(modules)
    for name, module in modules.items():
        package, _, child = name.rpartition(".")
        if package in sys.modules and package not in modules:
            setattr(sys.modules[package], child, module)


def _bindings(healthy: dict[str, ModuleType]) -> Iterable[tuple[dict[str, Any], str, Any]]:
    """Where the harness itself holds modules, classes or functions of production."""
    for module in [sys.modules[name] for name in list(sys.modules) if name.startswith("shardproof.")]:
        for name, value in list(vars(module).items()):
            home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(home, str) and home in healthy and home.startswith("torch_impl"):
                yield vars(module), name, value


def _counterpart(value: Any) -> Any:
    """The same thing in the modules that stand in sys.modules now."""
    if isinstance(value, ModuleType):
        return importlib.import_module(value.__name__)
    return getattr(importlib.import_module(value.__module__), getattr(value, "__qualname__", ""), value)
