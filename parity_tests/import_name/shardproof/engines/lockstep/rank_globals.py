"""Module globals for each rank of lockstep: ranks are threads and would otherwise share them.

One rank runs at a time, so each change of turn swaps the namespaces of some modules: the values of the last rank are
saved, and the values of the next rank are restored. Before its first turn each rank gets its own copies of containers,
tensors, cached functions and objects of user classes that globals refer to.

Names that torch.compile binds in a module are shared by all ranks: they belong to compiled code, which is attached to a
function's code object.

Limits: objects of library classes, class attributes, default arguments and closure variables are still shared, and so
is every module outside the list.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import operator
import re
import sys
import sysconfig
from collections import OrderedDict, defaultdict, deque
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed.nn.functional
import torch.nn.parallel

from shardproof.declare import travel
from shardproof.engines.program import Program

Namespace = dict[str, Any]
Values = tuple[Any, ...]
OURS = ("torch_impl", "jax_ref", "parity_tests", "shardproof")
GALLERY = "parity_tests.evidence.peers."  # its files judge other projects, as a user's do
INSTALLED = ("site-packages", "dist-packages")
_LIBRARY = Path(sysconfig.get_paths()["stdlib"]).resolve()
MAPPINGS, SEQUENCES = (dict, OrderedDict, defaultdict), (list, deque)
TENSORS = (torch.Tensor, torch.nn.Parameter)
# Names that torch._dynamo binds: `__import_torch`, `__compiled_fn_1_<uuid>`, `__resume_at_12_3`, `_139873_c0/0`.
OF_COMPILER = re.compile(r"__import_\w+|__\w+_\d+(_[0-9a-f_]{36})?|\w*_\d+_c\d+/\S+")
# Modules that torch's own context managers patch for the whole process; loss_parallel patches DTensor's handlers.
PATCHED_BY_TORCH = (
    "torch.nn.functional",
    "torch.distributed.tensor.experimental._attention",
    "torch.distributed.tensor.experimental._context_parallel._attention",
)
PATCHING = {"loss_parallel", "context_parallel"}


def namespaces_of(job: Any) -> dict[str, Namespace]:
    """The namespaces that are separate for each rank of a scheme's program; empty for any other job.

    They are the scheme's module, the user modules that it imports, the modules in `isolate`, and the modules that
    torch's context managers patch for a scheme with `around` or `setup`, or that names such a manager. Errors:
    ValueError for a name in `isolate` that is not a module.
    """
    if not isinstance(job, Program):
        return {}
    for name in job.isolate:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"scheme '{job.name}': isolate names {name!r}, and there is no module {error.name!r}; name one that is "
                "installed, such as 'megatron.core'"
            ) from None
    names = {*imported_by(job.fn.__module__), *(name for name in travel.IMPORTED_WITH_SCHEMES if name in sys.modules)}
    if job.isolate:  # several thousand modules
        names |= {name for name in sys.modules for root in job.isolate if f"{name}.".startswith(f"{root}.")}
    namespaces = {name: vars(sys.modules[name]) for name in names if isinstance(sys.modules[name], ModuleType)}
    if (
        job.around is not None
        or job.setup is not None
        or any(not PATCHING.isdisjoint(_words(name)) for name in imported_by(job.fn.__module__))
    ):
        namespaces |= {name: vars(sys.modules[name]) for name in PATCHED_BY_TORCH if name in sys.modules}
        if tensor := sys.modules.get("torch.distributed.tensor"):
            namespaces["handlers of DTensor"] = getattr(tensor.DTensor._op_dispatcher, "_custom_op_handlers", {})
    return namespaces


def import_ahead(job: Any) -> None:
    """Import the torch modules that user functions import in their bodies, before the ranks start.

    Some of them bind the default group as a default argument at import: inside a rank, that rank's group.
    """
    for imported in imports_of(job):
        if imported.startswith("torch."):
            with suppress(ImportError):  # the function itself will raise this, or the name is not a module
                importlib.import_module(imported)


def imports_of(job: Any) -> list[str]:
    """All names that the job's module and its user modules import anywhere in their source."""
    home = job.fn.__module__ if isinstance(job, Program) else getattr(job, "__module__", "")
    return [imported for name in imported_by(home) for imported in _imports(name)]


@functools.cache
def _source(name: str) -> str:
    """A module's source; empty if it has none, as in a notebook."""
    with suppress(OSError, TypeError):
        return inspect.getsource(sys.modules[name])
    return ""


@functools.cache
def _words(name: str) -> frozenset[str]:
    """All identifiers in a module's source: `loss_parallel` may be imported by its name, or read from a module."""
    return frozenset(re.findall(r"[^\W\d]\w*", _source(name)))


@functools.cache
def _imports(name: str) -> tuple[str, ...]:
    try:
        tree = ast.parse(_source(name))
    except SyntaxError:
        return ()
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(dict.fromkeys(names))


def imported_by(module: str) -> set[str]:
    """This module and its imports, recursively, without installed libraries."""
    names, modules = set(), [module]
    while modules:
        name = modules.pop()
        if name in names or name not in sys.modules or not _is_users(name):
            continue
        names.add(name)
        for value in list(vars(sys.modules[name]).values()):
            home = value if isinstance(value, FunctionType | type) else type(value)
            modules.append(str(value.__name__ if isinstance(value, ModuleType) else home.__module__))
    return names


@functools.cache
def _is_users(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or (name.partition(".")[0] in OURS and not name.startswith(GALLERY)):
        return False
    path = Path(file).resolve()
    return not path.is_relative_to(_LIBRARY) and not set(INSTALLED).intersection(path.parts)


class RankGlobals:
    """The module globals of each rank of a session; the values of `rank` are bound now."""

    def __init__(self, world: int) -> None:
        self._namespaces: dict[str, Namespace] = {}
        self._values: list[dict[str, Namespace]] = [{} for _ in range(world)]
        self._copies: list[dict[int, tuple[Any, Any]]] = [{} for _ in range(world)]
        self._parents: dict[str, Namespace] = {}  # the process's own values, restored after the run
        self._previous: dict[str, dict[str, tuple[Any, Values]]] = {}
        self.rank: int | None = None

    def begin(self, namespaces: dict[str, Namespace]) -> None:
        """Before a run: give each rank copies of new namespaces, and of values that the process has changed since."""
        self._namespaces = namespaces
        self._parents = {name: namespace.copy() for name, namespace in namespaces.items()}
        for name, parents in self._parents.items():
            previous = self._previous.setdefault(name, {})
            now = {key: (value, self._contents(value)) for key, value in parents.items()}
            changed = [key for key, state in now.items() if key not in previous or not _is_same(previous[key], state)]
            for values, copies in zip(self._values, self._copies, strict=True):
                namespace = values.setdefault(name, {})
                for key in previous.keys() - now.keys():
                    namespace.pop(key, None)
                for key in changed:
                    copies.pop(id(parents[key]), None)
                for key in changed:
                    namespace[key] = parents[key] if _is_special(key) else self._copy_for_rank(parents[key], copies)
            self._previous[name] = now

    def enter(self, rank: int) -> None:
        """Give the turn to this rank: save the last rank's values and bind this rank's."""
        if rank == self.rank or not self._namespaces:
            return
        self._save_values()
        self.rank = rank
        self._bind(self._values[rank])

    def end(self) -> None:
        """After a run: restore the process's own values."""
        if self.rank is not None:
            self._save_values()
            self._bind(self._parents)
        self._namespaces, self.rank = {}, None

    def _save_values(self) -> None:
        if self.rank is not None:
            self._values[self.rank] |= {name: namespace.copy() for name, namespace in self._namespaces.items()}

    def _bind(self, values: dict[str, Namespace]) -> None:
        for name, namespace in self._namespaces.items():
            namespace.update(values[name])
            if len(namespace) > len(values[name]):  # another rank has bound more names; modules that it imported stay
                for key in [key for key in namespace if key not in values[name]]:
                    if not (isinstance(namespace[key], ModuleType) or _is_special(key)):
                        del namespace[key]

    def _copy_for_rank(self, value: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
        """A rank's own copy of a mutable value; all references to one object get the same copy."""
        if id(value) in copies:
            return copies[id(value)][1]
        new = self._shallow(value)
        copies[id(value)] = value, new
        if new is value:
            return value
        if isinstance(new, MAPPINGS):
            new.update({key: self._copy_for_rank(item, copies) for key, item in new.items()})
        elif isinstance(new, SEQUENCES):
            for index, item in enumerate(new):
                new[index] = self._copy_for_rank(item, copies)
        elif self._is_of_users_class(new):
            vars(new).update({key: self._copy_for_rank(item, copies) for key, item in vars(new).items()})
        return new

    def _shallow(self, value: Any) -> Any:
        if type(value) in TENSORS and value.is_leaf:
            clone = value.detach().clone()
            return (
                torch.nn.Parameter(clone, value.requires_grad)
                if type(value) is torch.nn.Parameter
                else (clone.requires_grad_(value.requires_grad))
            )
        if isinstance(value, functools._lru_cache_wrapper):
            return functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
        if type(value) in (*MAPPINGS, *SEQUENCES, set, bytearray) or self._is_of_users_class(value):
            try:
                return copy.copy(value)
            except Exception:  # an object that cannot be copied stays shared
                return value
        return value

    def _contents(self, value: Any) -> Values:
        """The direct members of a container or object, to detect changes by the process."""
        if self._is_of_users_class(value):
            value = vars(value)
        if isinstance(value, MAPPINGS):
            return (*value, *value.values())
        return tuple(value) if isinstance(value, (*SEQUENCES, set)) else ()

    def _is_of_users_class(self, value: Any) -> bool:
        is_users = type(value).__module__ in self._namespaces and hasattr(value, "__dict__")
        return is_users and not isinstance(value, type)


def _is_special(key: object) -> bool:
    """Whether Python or torch.compile sets this name in a module, as `__builtins__`."""
    if not isinstance(key, str):
        return False
    return (key.startswith("__") and key.endswith("__")) or OF_COMPILER.fullmatch(key) is not None


def _is_same(old: tuple[Any, Values], new: tuple[Any, Values]) -> bool:
    (value, contents), (other, others) = old, new
    return value is other and len(contents) == len(others) and all(map(operator.is_, contents, others))
