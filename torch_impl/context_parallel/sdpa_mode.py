"""scaled_dot_product_attention of a rank's own tokens, sent to attention over the whole sequence.

A mode sees every call on this thread, of functions too that were bound before it was entered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from torch_impl.context_parallel.attention import context_parallel_attention
from torch_impl.layouts import TokenLayout

SDPA = F.scaled_dot_product_attention
FUNCTION = "context_parallel.sdpa"


class SequenceAttention(TorchFunctionMode):
    """Within it `F.scaled_dot_product_attention` is attention over the sequence that `layout` cuts.

    `causal_only` says why attention that is not causal would be wrong, or None.
    """

    def __init__(self, group: ProcessGroup, layout: TokenLayout, exchange: str, causal_only: str | None = None) -> None:
        super().__init__()
        self.group, self.layout, self.exchange, self.causal_only = group, layout, exchange, causal_only

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is SDPA:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
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
