"""What real backends reject of a call that lockstep itself could carry out.

Measured with gloo of torch 2.13 on two processes; NCCL's rules are those of torch's ProcessGroupNCCL. Gloo accepts more
than it can do: a scatter or reduce_scatter of a list, an in-place all_reduce and a broadcast of tensors that are not
contiguous end without an error and with other numbers. Of tensors of unlike sizes it takes the list of a reduce_scatter
and rejects that of an all_gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from parity_tests.harness.run.failure import CANNOT_RUN
from parity_tests.harness.run.lockstep import world

# Neither gloo nor NCCL has these; float8 is NCCL's alone, complex numbers are gloo's and, as pairs, NCCL's.
MISSING_DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
UNEVEN = "its list has tensors of unlike sizes, which gloo rejects and NCCL carries out; pad them to one size for gloo"
MESSAGES = ("send", "recv")
REWRITTEN = ("all_reduce", "broadcast", "scatter", "reduce_scatter")  # of these gloo may give other numbers


class LockstepBackend:
    """The answer to `group._get_backend(device)`: torch 2.14 asks it which optional features the backend has.

    It has none of them, as gloo: a batch of messages is issued one by one, and a tensor is allocated by torch.
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
    """Why gloo or NCCL would not carry out a call of these tensors, and what to pass instead; None if both would."""
    for name, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors:
            if tensor.dtype in MISSING_DTYPES:
                return f"gloo and NCCL have no {_name(tensor.dtype)}; pass another dtype"
            if not _is_contiguous(tensor):
                strides = ", ".join(map(str, tensor.stride()))
                word = "buffer" if op == "recv" else name
                return f"its {word} has strides ({strides}), {_consequence(op, len(inputs))}; {_remedy(op, name)}"
    return UNEVEN if len(inputs) == 1 and _is_uneven(op, outputs) else None


def _is_uneven(op: str, outputs: Sequence[Tensor]) -> bool:
    """Whether the list of an all_gather has tensors of unlike sizes."""
    return op == "all_gather" and len({tensor.shape for tensor in outputs}) > 1


def _is_contiguous(tensor: Tensor) -> bool:
    """In the layout that NCCL compares with: that of channels last is one."""
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _consequence(op: str, inputs: int) -> str:
    if op in MESSAGES:
        return "which gloo rejects ('Tensors must be contiguous') and NCCL sends in the order of memory"
    if op == "all_to_all" and inputs == 1:
        return "which gloo and NCCL reject ('Tensors must be contiguous')"
    other = " and of which gloo may give other numbers without an error" if op in REWRITTEN else ""
    return f"which NCCL rejects ('Tensors must be contiguous'){other}"


def _remedy(op: str, name: str) -> str:
    if op == "recv":  # into a copy the numbers would be lost
        return "receive into a contiguous one and copy from it"
    return "pass x.contiguous()" if name == "input" else "pass a contiguous output"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
