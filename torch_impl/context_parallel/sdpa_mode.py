"""Attention over the full sequence in place of torch's `scaled_dot_product_attention`, while a context is open.

Every call of that function ends in one operation of the dispatcher, be it called by name, by a reference imported
before, from a module, from what backward recomputes or from another thread. While any context is open, that operation
has a kernel of ours: of the calling thread's context, or torch's own where the thread is another rank. No function of
torch is replaced, and without an open context the dispatcher is as torch leaves it.

Attention weights and flex_attention, which end in other operations, are rejected by a mode on the context's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock, local
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.library import Library
from torch.overrides import TorchFunctionMode

from torch_impl.context_parallel.attention import context_parallel_attention
from torch_impl.layouts import TokenLayout

FUNCTION = "context_parallel.sdpa"
SDPA = torch.ops.aten.scaled_dot_product_attention.default
MULTI_HEAD = F.multi_head_attention_forward
# Autograd for what may need a gradient, the devices themselves for tensors of inference mode.
DISPATCH_KEYS = ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA")


class SequenceAttention(TorchFunctionMode):
    """Within it `F.scaled_dot_product_attention` is attention over the sequence that `layout` shards.

    `causal_only` says why attention that is not causal would be wrong, or None.
    """

    def __init__(self, group: ProcessGroup, layout: TokenLayout, exchange: str, causal_only: str | None = None) -> None:
        super().__init__()
        self.group, self.layout, self.exchange, self.causal_only = group, layout, exchange, causal_only

    def __enter__(self) -> SequenceAttention:
        _OPEN.add(self)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        _OPEN.remove()
        super().__exit__(*raised)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is MULTI_HEAD and kwargs.get("need_weights", True):
            raise ValueError(
                f"{FUNCTION}: need_weights=True would be weights of this rank's keys alone; pass need_weights=False"
            )
        if getattr(func, "__name__", "") == "flex_attention":  # the operation that the function of this name calls
            raise ValueError(
                f"{FUNCTION}: flex_attention would see this rank's tokens alone, by their places here; "
                "call F.scaled_dot_product_attention, or context_parallel_attention with cu_seqlens or window"
            )
        return func(*args, **kwargs)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """What SDPA gives for these arguments, over the full sequence."""
        if attn_mask is not None:
            raise ValueError(
                f"{FUNCTION}: attn_mask is {list(attn_mask.shape)}, whose columns are not sharded over cp; "
                "pass is_causal=True and no mask"
            )
        if dropout_p > 0:
            raise ValueError(f"{FUNCTION}: dropout_p={dropout_p} would differ over cp; pass 0.0")
        if self.causal_only and not is_causal:
            raise ValueError(f"{FUNCTION}: is_causal=False {self.causal_only}; pass is_causal=True")
        if not enable_gqa and query.shape[-3] != key.shape[-3]:
            raise ValueError(
                f"{FUNCTION}: query has {query.shape[-3]} heads and key {key.shape[-3]}; pass enable_gqa=True"
            )
        return context_parallel_attention(
            query,
            key,
            value,
            group=self.group,
            layout=self.layout,
            causal=is_causal,
            exchange=self.exchange,
            scale=scale,
        )


class _OpenContexts:
    """The contexts of all threads, and our kernel of the operation while there are any.

    Fused inference of whole layers is off meanwhile: its operation has attention inside and calls no other.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.thread = local()  # .contexts of the calling thread, the innermost last
        self.threads: list[list[SequenceAttention]] = []  # those of all threads that have any
        self.library: Library | None = None
        self.was_fused = True

    def add(self, context: SequenceAttention) -> None:
        with self.lock:
            if not self.threads:
                self._register()
            if not self._of_this_thread():
                self.thread.contexts = []
                self.threads.append(self.thread.contexts)
            self.thread.contexts.append(context)

    def remove(self) -> None:
        with self.lock:
            self.thread.contexts.pop()
            self.threads = [contexts for contexts in self.threads if contexts]
            if not self.threads:
                self._unregister()

    def of_caller(self) -> SequenceAttention | None:
        """The calling thread's context, or the only one that it can belong to; None outside of any.

        A thread that has process groups and not the context's is another rank. Autograd's threads have their caller's.
        """
        contexts = self._of_this_thread()
        if contexts:
            return contexts[-1]
        with self.lock:
            possible = [others[-1] for others in self.threads if _can_belong_to(others[-1].group)]
        if len(possible) > 1:
            raise RuntimeError(
                f"{FUNCTION}: this thread has no context and {len(possible)} are open in other threads; enter one here"
            )
        return possible[0] if possible else None

    def _of_this_thread(self) -> list[SequenceAttention]:
        return getattr(self.thread, "contexts", [])

    def _register(self) -> None:
        self.library = Library("aten", "IMPL")
        for key in DISPATCH_KEYS:
            self.library.impl("scaled_dot_product_attention", _attention, key)
        self.was_fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def _unregister(self) -> None:
        if self.library is not None:
            self.library._destroy()
        self.library = None
        torch.backends.mha.set_fastpath_enabled(self.was_fused)


_OPEN = _OpenContexts()


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """The kernel: attention of the caller's context. Autocast has cast the arguments before it."""
    context = _OPEN.of_caller()
    return SDPA.decompose(*args, **kwargs) if context is None else context.attention(*args, **kwargs)


def _can_belong_to(group: ProcessGroup) -> bool:
    """Whether the calling thread can be one of the group's ranks: it has the group, or no groups at all."""
    if not dist.is_initialized():
        return True
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False
