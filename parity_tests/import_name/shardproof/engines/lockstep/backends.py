"""Calls that lockstep could carry out, but gloo or NCCL rejects.

Gloo's rules were measured on two processes with torch 2.13; NCCL's rules come from torch's ProcessGroupNCCL. Gloo
accepts some calls that it computes wrongly: a scatter or reduce_scatter of a list, an in-place all_reduce and a
broadcast return wrong numbers, without an error, if a tensor is not contiguous. A list of tensors with different sizes
is accepted in reduce_scatter and rejected in all_gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.engines.failure import CANNOT_RUN
from shardproof.engines.ledger import MESSAGES
from shardproof.engines.lockstep import world

# Neither gloo nor NCCL supports these. Only NCCL adds float8; both support complex numbers, NCCL as pairs.
MISSING_DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
UNEVEN = "its list has tensors of unlike sizes, which gloo rejects and NCCL carries out; pad them to one size for gloo"
FLOAT8 = "gloo has no reduction of float8, and NCCL has it on the newest GPUs alone; reduce in another dtype"
OF_GLOO = (UNEVEN, FLOAT8)  # not reported for a scheme that is not declared for gloo
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
REWRITTEN = ("all_reduce", "broadcast", "scatter", "reduce_scatter")  # gloo may return wrong numbers for these


class LockstepBackend:
    """The result of `group._get_backend(device)`, which torch 2.14 asks for optional features.

    Like gloo, it has none: the messages of a batch are issued one by one, and torch allocates tensors.
    """

    supports_coalescing = supports_reconfigure = supports_shrinking = supports_splitting = False
    supports_time_estimate = supports_window = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def name(self) -> str:
        return world.BACKEND

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise NotImplementedError(f"{CANNOT_RUN}: {name} of a backend; call the process group, or use --engine gloo")


def rejection(op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str | None:
    """Why gloo or NCCL rejects a call with these tensors, with the remedy; None if both accept it."""
    for name, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors:
            if tensor.dtype in MISSING_DTYPES:
                return f"gloo and NCCL have no {_name(tensor.dtype)}; pass another dtype"
            if op in REDUCTIONS and tensor.is_floating_point() and tensor.itemsize == 1:
                return FLOAT8
            if not _is_contiguous(tensor):
                strides = ", ".join(map(str, tensor.stride()))
                word = "buffer" if op == "recv" else name
                return f"its {word} has strides ({strides}), {_consequence(op, len(inputs))}; {_remedy(op, name)}"
    return UNEVEN if len(inputs) == 1 and _is_uneven(op, outputs) else None


def _is_uneven(op: str, outputs: Sequence[Tensor]) -> bool:
    """Whether this is an all_gather into a list of tensors of different sizes."""
    return op == "all_gather" and len({tensor.shape for tensor in outputs}) > 1


def _is_contiguous(tensor: Tensor) -> bool:
    """Whether NCCL accepts the tensor's strides: contiguous, or channels last."""
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _consequence(op: str, inputs: int) -> str:
    if op in MESSAGES:
        return "which gloo rejects ('Tensors must be contiguous') and NCCL sends in the order of memory"
    if op == "all_to_all" and inputs == 1:
        return "which gloo and NCCL reject ('Tensors must be contiguous')"
    other = " and of which gloo may give other numbers without an error" if op in REWRITTEN else ""
    return f"which NCCL rejects ('Tensors must be contiguous'){other}"


def _remedy(op: str, name: str) -> str:
    if op == "recv":  # numbers received into a copy would be lost
        return "receive into a contiguous one and copy from it"
    return "pass x.contiguous()" if name == "input" else "pass a contiguous output"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
