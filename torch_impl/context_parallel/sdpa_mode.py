"""scaled_dot_product_attention of a rank's own tokens, sent to attention over the whole sequence.

A mode sees the calls of this thread, of functions too that were bound before it was entered. A torch function written
in Python, as multi_head_attention_forward, runs with the mode off, and so do recomputations that backward starts, and
other threads: these call torch.nn.functional by name, where our functions stand while any context is open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from threading import Lock, local
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode

from torch_impl.context_parallel.attention import context_parallel_attention
from torch_impl.layouts import TokenLayout

SDPA, FLEX = F.scaled_dot_product_attention, flex_attention.flex_attention
FUNCTION = "context_parallel.sdpa"
NO_FLEX = (
    f"{FUNCTION}: flex_attention would see this rank's tokens alone, by their places here; "
    "call F.scaled_dot_product_attention, or context_parallel_attention with cu_seqlens or window"
)


class SequenceAttention(TorchFunctionMode):
    """Within it `F.scaled_dot_product_attention` is attention over the sequence that `layout` cuts.

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
        if func is SDPA:
            check_not_recomputed()
            return self.attention(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == FLEX.__name__:  # the operation that it calls
            raise ValueError(NO_FLEX)
        return func(*args, **(kwargs or {}))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """SDPA's arguments, and what it gives, under autocast too."""
        if attn_mask is not None:
            raise ValueError(
                f"{FUNCTION}: attn_mask is {list(attn_mask.shape)}, whose columns are not cut over cp; "
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
        q, k, v = (_autocast(x) for x in (query, key, value))
        return context_parallel_attention(
            q,
            k,
            v,
            group=self.group,
            layout=self.layout,
            causal=is_causal,
            exchange=self.exchange,
            scale=scale,
        )


class _OpenContexts:
    """The contexts of all threads, and our functions in torch's place while there are any.

    Fused inference of whole layers is off meanwhile: it has attention inside, and asks nobody.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.own = local()  # .contexts of the calling thread, the innermost last
        self.threads: list[list[SequenceAttention]] = []  # those of all threads that have any
        self.replaced: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []  # (module, torch's, ours)
        self.was_fused = True

    def add(self, context: SequenceAttention) -> None:
        with self.lock:
            if not self.threads:
                self._replace()
            if not self._own():
                self.own.contexts = []
                self.threads.append(self.own.contexts)
            self.own.contexts.append(context)

    def remove(self) -> None:
        with self.lock:
            self.own.contexts.pop()
            self.threads = [held for held in self.threads if held]
            if not self.threads:
                self._put_back()

    def here(self) -> SequenceAttention | None:
        """The calling thread's context, or the only one that it can belong to; None outside of any.

        A thread that has process groups and not the context's is another rank. Autograd's threads have their caller's.
        """
        own = self._own()
        if own:
            return own[-1]
        with self.lock:
            others = [held[-1] for held in self.threads if _is_known(held[-1].group)]
        if len(others) > 1:
            raise RuntimeError(
                f"{FUNCTION}: this thread has no context and {len(others)} are open in other threads; enter one here"
            )
        return others[0] if others else None

    def _own(self) -> list[SequenceAttention]:
        return getattr(self.own, "contexts", [])

    def _replace(self) -> None:
        sdpa, mha = F.scaled_dot_product_attention, F.multi_head_attention_forward
        flex = flex_attention.flex_attention
        self.replaced = [
            (F, sdpa, _attending(sdpa)),
            (F, mha, _without_weights(mha)),
            (flex_attention, flex, _refusing(flex)),
        ]
        for module, torchs, ours in self.replaced:
            setattr(module, torchs.__name__, ours)
        self.was_fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def _put_back(self) -> None:
        for module, torchs, ours in self.replaced:
            if getattr(module, torchs.__name__) is ours:  # and not what somebody else has put there since
                setattr(module, torchs.__name__, torchs)
        torch.backends.mha.set_fastpath_enabled(self.was_fused)


_OPEN = _OpenContexts()


def _attending(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """scaled_dot_product_attention by name."""

    @wraps(torchs)
    def attention(*args: Any, **kwargs: Any) -> Any:
        context = _OPEN.here()
        return torchs(*args, **kwargs) if context is None else context.attention(*args, **kwargs)

    return attention


def _without_weights(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """multi_head_attention_forward by name; weights are asked for unless it is told otherwise."""

    @wraps(torchs)
    def forward(*args: Any, need_weights: bool = True, **kwargs: Any) -> Any:
        if need_weights and _OPEN.here() is not None:
            raise ValueError(
                f"{FUNCTION}: need_weights=True would be weights of this rank's keys alone; pass need_weights=False"
            )
        return torchs(*args, need_weights=need_weights, **kwargs)

    return forward


def _refusing(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """flex_attention by name, whose masks ask for places in the whole sequence."""

    @wraps(torchs)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if _OPEN.here() is not None:
            raise ValueError(NO_FLEX)
        return torchs(*args, **kwargs)

    return attention


def check_not_recomputed() -> None:
    """Refuse what only the mode sees inside a reentrant checkpoint: backward computes it again, with the mode off.

    Such a checkpoint is an autograd function that computes without gradients; so are those of other libraries.
    """
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        first = "".join(code.co_varnames[:1])
        if code.co_name == "forward" and isinstance(frame.f_locals.get(first), FunctionCtx):
            raise ValueError(
                f"{FUNCTION}: scaled_dot_product_attention, imported before the context, is inside a checkpoint that "
                "backward computes again, where it would see this rank's tokens alone; call it as "
                "F.scaled_dot_product_attention"
            )
        frame = frame.f_back


def _autocast(x: Tensor) -> Tensor:
    """What autocast makes of an argument of SDPA, which it runs in the lower precision."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if is_cast else x


def _is_known(group: ProcessGroup) -> bool:
    """Whether the calling thread can be one of the group's ranks: it has the group, or none at all."""
    if not dist.is_initialized():
        return True
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False
