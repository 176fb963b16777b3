"""The module of a model that this rank is executing, forward and backward; the model itself is unchanged.

While a path is open, `nn.Module.__call__` is replaced by a version that brackets the whole call, including the hooks in
which tensor parallelism and FSDP communicate. In backward, a module begins when the gradient of its output arrives and
ends when the gradients of its inputs have left.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from shardproof.engines.lockstep import world

FSDP_GROUP = "_fsdp_param_group.py"  # the file of torch where fully_shard communicates
_ORIGINAL = nn.Module.__call__
_open: list[ModulePath] = []
_lock = threading.Lock()


class ModulePath:
    """The modules that the rank which created this is inside; the outermost is named by its class."""

    def __init__(self) -> None:
        self._rank = world.current()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._forward: list[str] = []
        self._backward: list[tuple[int, str]] = []  # with the number of the backward pass
        self._handles: list[Any] = []  # of hooks on tensors that outlive the pass

    def here(self) -> str:
        """The innermost module, `Model.layers.0.up`; empty outside every module.

        FSDP2 prefetches: in its collectives, the module of the parameters or gradients that it sends.
        """
        of_fsdp = _sharded_by_fsdp()
        if of_fsdp is not None and of_fsdp in self._names:
            return self._names[of_fsdp]
        if self._forward:
            return self._forward[-1]
        task = torch._C._current_graph_task_id()
        return next((name for of, name in reversed(self._backward) if of == task != -1), "")

    def is_of_this_rank(self) -> bool:
        """Whether the calling thread belongs to the rank that created this: ranks of lockstep share the process."""
        return self._rank is world.current()

    def call(self, run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module."""
        name = self._name(module)
        self._at_gradients((args, kwargs), "all", self._leave, name)
        self._forward.append(name)
        try:
            output = run(module, *args, **kwargs)
        finally:
            self._forward.pop()
        self._at_gradients(output, "any", self._enter, name)
        return output

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _name(self, module: nn.Module) -> str:
        if module not in self._names:
            outermost = type(module).__name__
            for name, inner in module.named_modules():
                self._names.setdefault(inner, f"{outermost}.{name}" if name else outermost)
        return self._names[module]

    def _at_gradients(self, tree: Any, mode: Any, then: Callable[[str], None], name: str) -> None:
        """Call `then` when `any` or `all` gradients of these tensors are there."""
        tensors = [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad]
        if tensors and torch.is_grad_enabled():
            handle = register_multi_grad_hook(tensors, lambda *_: then(name), mode=mode)
            if any(x.is_leaf for x in tensors):
                self._handles.append(handle)

    def _enter(self, name: str) -> None:
        task = torch._C._current_graph_task_id()
        self._backward = [entry for entry in self._backward if entry[0] == task]
        # If a module returns its part's own output, the part's hook came first, although the part is the inner module.
        parts = (i for i, (_, inner) in enumerate(self._backward) if inner.startswith(f"{name}."))
        self._backward.insert(next(parts, len(self._backward)), (task, name))

    def _leave(self, name: str) -> None:
        entry = (torch._C._current_graph_task_id(), name)
        if entry in self._backward:
            self._backward.remove(entry)


def _sharded_by_fsdp() -> nn.Module | None:
    """The module with the parameters that a calling frame of FSDP2 communicates."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_filename.endswith(FSDP_GROUP):
            modules = getattr(frame.f_locals.get("self"), "modules", ())
            return modules[0] if modules else None
    return None


@contextmanager
def opened() -> Iterator[ModulePath]:
    """A path that follows this rank."""
    path = ModulePath()
    with _lock:
        _open.append(path)
        nn.Module.__call__ = _call_with_path
    try:
        yield path
    finally:
        with _lock:
            _open.remove(path)
            if not _open:
                nn.Module.__call__ = _ORIGINAL
        path.close()


def _call_with_path(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces `nn.Module.__call__`. Compiled code counts as one module, because its parts are not called."""
    run: Callable[..., Any] = _ORIGINAL
    if not torch.compiler.is_compiling():
        for path in list(_open):
            if path.is_of_this_rank():
                run = partial(path.call, run)
    return run(module, *args, **kwargs)
