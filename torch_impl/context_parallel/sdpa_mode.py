"""Replace torch's `scaled_dot_product_attention` by attention over the full sequence while a context is open.

Every call of that function ends in one operator of the dispatcher: calls by name, through an earlier import, from a
module, from recomputation in backward or from another thread. While any context is open, our kernel is registered for
that operator. It serves the calling thread's context, and falls back to torch's own kernel if the thread is another
rank. No torch function is replaced, and the kernel is removed when the last context closes.

Attention weights and flex_attention end in other operators; a mode on the context's thread rejects them.

`local_attention` is a scope in which a thread uses torch's own attention again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
# Autograd keys for tensors that may require a gradient, device keys for tensors in inference mode.
DISPATCH_KEYS = ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA")
MASKS = "adapt_model_to_context drops a Hugging Face model's masks"
OTHER_TOKENS = "attention over other tokens (a vision tower, an encoder, cross attention) goes into local_attention()"


class SequenceAttention(TorchFunctionMode):
    """A context in which `F.scaled_dot_product_attention` is attention over the full sequence, sharded by `layout`.

    `causal_only` is the reason why attention must be causal, or None.
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
        # The mode only rejects calls; other functions run unchanged, and attention reaches the kernel below.
        kwargs = kwargs or {}
        if _SCOPES.rules[-1].is_local:
            return func(*args, **kwargs)
        if func is MULTI_HEAD and kwargs.get("need_weights", True):
            raise ValueError(
                f"{FUNCTION}: need_weights=True would return weights for this rank's keys only; pass need_weights=False"
            )
        if getattr(func, "__name__", "") == "flex_attention":  # the operator that the function of this name calls
            raise ValueError(
                f"{FUNCTION}: flex_attention would see only this rank's tokens, at local positions; "
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
        """SDPA with the same arguments, over the full sequence."""
        # Reject masks (their columns are not sharded), dropout (it would differ by rank), attention to the padding of
        # a dropped mask, grouped heads without enable_gqa (like SDPA), and tensors that are not this rank's shard.
        if attn_mask is not None:
            raise ValueError(
                f"{FUNCTION}: attn_mask is {list(attn_mask.shape)}, whose columns are not sharded over cp; "
                f"pass is_causal=True and no mask; {MASKS}; {OTHER_TOKENS}"
            )
        if dropout_p > 0:
            raise ValueError(f"{FUNCTION}: dropout_p={dropout_p} would differ over cp; pass 0.0")
        if self.causal_only and not is_causal:
            raise ValueError(f"{FUNCTION}: is_causal=False {self.causal_only}; pass is_causal=True")
        if not enable_gqa and query.shape[-3] != key.shape[-3]:
            raise ValueError(
                f"{FUNCTION}: query has {query.shape[-3]} heads and key {key.shape[-3]}; pass enable_gqa=True"
            )
        rows = self.layout.counts[self.layout.cp_rank]
        if query.shape[-2] != rows or key.shape[-2] != rows:
            raise ValueError(
                f"{FUNCTION}: query has {query.shape[-2]} rows and key {key.shape[-2]}, this rank's shard of the "
                f"sequence has {rows}; {OTHER_TOKENS}"
            )
        return context_parallel_attention(
            query,
            key,
            value,
            group=self.group,
            layout=self.layout,
            causal=is_causal,
            exchange=self.exchange,
            window=_SCOPES.rules[-1].window,
            scale=scale,
        )


@dataclass(frozen=True)
class _Rules:
    """The rules of a scope that `owner` opened: whether attention is torch's own, and otherwise its window."""

    owner: int
    is_local: bool
    window: int | None


class _Scopes(local):
    """The open scopes of the calling thread."""

    def __init__(self) -> None:
        self.rules = [_Rules(0, False, None)]


class _OpenContexts:
    """The open contexts of all threads. Our kernel is registered while there are any.

    Fused inference of whole layers is switched off meanwhile: its operator contains attention and does not call SDPA.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.thread = local()  # .contexts of the calling thread, the innermost last
        self.threads: list[list[SequenceAttention]] = []  # the lists of all threads that have contexts
        self.library: Library | None = None
        self.was_fused = True

    def add(self, context: SequenceAttention) -> None:
        """Open a context in the calling thread; the first context registers the kernel."""
        # All threads share the dispatcher, so contexts are counted under a lock.
        with self.lock:
            if not self.threads:
                self._register()
            if not self._of_this_thread():
                self.thread.contexts = []
                self.threads.append(self.thread.contexts)
            self.thread.contexts.append(context)

    def remove(self) -> None:
        """Close the calling thread's innermost context; the last context removes the kernel."""
        with self.lock:
            self.thread.contexts.pop()
            self.threads = [contexts for contexts in self.threads if contexts]
            if not self.threads:
                self._unregister()

    def of_caller(self) -> SequenceAttention | None:
        """The calling thread's context, or the only open one that it can belong to; None if there is none, or in a
        local scope.

        A thread that has process groups, but not the context's, is another rank. Autograd's threads have the groups of
        the thread that called backward.
        """
        if _SCOPES.rules[-1].is_local:
            return None
        # 1. Look for the innermost context of this thread.
        contexts = self._of_this_thread()
        if contexts:
            return contexts[-1]
        # 2. Else look for a context in another thread of the same rank, for autograd's threads and users' workers.
        with self.lock:
            matches = [opened[-1] for opened in self.threads if _can_belong_to(opened[-1].group)]
        if len(matches) > 1:
            raise RuntimeError(
                f"{FUNCTION}: this thread has no context and {len(matches)} are open in other threads; enter one here"
            )
        return matches[0] if matches else None

    def _of_this_thread(self) -> list[SequenceAttention]:
        return getattr(self.thread, "contexts", [])

    def _register(self) -> None:
        # Our kernels override torch's until the library is destroyed.
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
_SCOPES = _Scopes()


@contextmanager
def local_attention() -> Iterator[None]:
    """A scope inside a context in which attention is torch's own, over local tensors.

    It is for tokens that the context does not shard: a vision tower, a bidirectional encoder, cross attention to
    tensors that each rank has in full. It accepts torch's masks, dropout and weights, applies to the calling thread
    only, and can be nested. It can also decorate a function, `@local_attention()`: an activation checkpoint then enters
    it again during recomputation, when a scope around the checkpoint has already been left.

    Gradients of tensors that each rank has in full come from its own queries only (`cp=R`): sum them over cp.

    >>> q = torch.zeros(1, 1, 2, 4)
    >>> with local_attention():
    ...     F.scaled_dot_product_attention(q, q, q).shape
    torch.Size([1, 1, 2, 4])

    Cost:   no collective.
    """
    owner = object()
    open_scope(owner, is_local=True)
    try:
        yield
    finally:
        close_scope(owner)


def open_scope(owner: object, *, is_local: bool = False, window: int | None = None) -> None:
    """Open a scope in the calling thread. A window is for attention of a context, not for local attention."""
    _SCOPES.rules.append(_Rules(id(owner), is_local, window))


def close_scope(owner: object) -> None:
    """Close the innermost scope if `owner` opened it; a module that rejected its inputs has not opened one."""
    if _SCOPES.rules[-1].owner == id(owner):
        _SCOPES.rules.pop()


def layout_inside() -> TokenLayout | None:
    """The layout of the calling thread's context; None outside a context and in local attention."""
    context = _OPEN.of_caller()
    return None if context is None else context.layout


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """The dispatcher's kernel: attention in the caller's context. Autocast has already cast the arguments."""
    context = _OPEN.of_caller()
    # Without a context use torch's own decomposition: a call of SDPA would end in this kernel again.
    return SDPA.decompose(*args, **kwargs) if context is None else context.attention(*args, **kwargs)


def _can_belong_to(group: ProcessGroup) -> bool:
    """Whether the calling thread can be a rank of the group: it has the group, or no process groups at all."""
    if not dist.is_initialized():
        return True
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:  # a group of another rank, in an engine that runs ranks as threads
        return False
