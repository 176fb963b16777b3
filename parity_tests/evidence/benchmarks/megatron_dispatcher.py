"""Megatron-core's MoEAlltoAllTokenDispatcher on a machine without CUDA, as a layer whose experts change nothing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class _NoStream:
    """The methods of a CUDA stream that the dispatcher calls; there is nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None)


def megatron_layer(
    num_experts: int, experts: Tensor, width: int, group: ProcessGroup
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """(y, rows at their experts, gates of these rows) of tokens and gates, for these `experts` [t, k] of each token.

    All ranks of `group` call it together.
    """
    dispatcher = _dispatcher(num_experts, experts.shape[1], width, group)
    routing_map = torch.zeros(len(experts), num_experts, dtype=torch.bool).scatter_(1, experts, True)

    def layer(x: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probabilities = gates.new_zeros(routing_map.shape).scatter(1, experts, gates)
        rows, of_rows = dispatcher.dispatch_preprocess(x, routing_map, probabilities)
        # On CUDA it copies these to the host, where the lengths of messages are lists; on a CPU it leaves tensors.
        dispatcher.input_splits = dispatcher.input_splits.tolist()
        dispatcher.output_splits = dispatcher.output_splits.tolist()
        rows, of_rows = dispatcher.token_dispatch(rows, of_rows)
        rows, _, of_rows = dispatcher.dispatch_postprocess(rows, of_rows)
        # Its experts multiply by the gates, inside; here nothing is done to the rows.
        returned = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return dispatcher.combine_postprocess(returned), rows, of_rows

    return layer


def _dispatcher(num_experts: int, k: int, width: int, group: ProcessGroup) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of optional packages
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=1,
            hidden_size=width,
            num_attention_heads=1,
            num_moe_experts=num_experts,
            moe_router_topk=k,
            expert_model_parallel_size=group.size(),
            moe_token_dispatcher_type="alltoall",
            use_cpu_initialization=True,
        )
    stream: Any = _NoStream()
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    local = num_experts // group.size()
    first = group.rank() * local
    groups: Any = SimpleNamespace(ep=group, expt_tp=alone, tp_ep=group)
    return MoEAlltoAllTokenDispatcher(local, list(range(first, first + local)), config, groups)
