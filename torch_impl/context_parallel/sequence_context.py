"""A context in which tensors hold this rank's share of their sequence, and attention sees the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives.arguments import checked_dim
from torch_impl.context_parallel.arguments import checked_place
from torch_impl.context_parallel.sdpa_mode import SequenceAttention
from torch_impl.layouts import TokenLayout, uncuttable

EXCHANGES = {"allgather": "all_gather", "alltoall": "ring", "addtoall": "ring"}


class SequenceContext:
    """Buffers cut on entering and whole on leaving, unless they `stays`; can be entered again, not inside itself.

    A buffer keeps its identity and gets other memory, so what it held is untouched. `wholes` are what is cut in
    place of the buffers' own values, where these differ (padding). `exchange` None is torch's rotate method.
    """

    def __init__(
        self,
        group: ProcessGroup,
        layout: TokenLayout,
        exchange: str | None,
        buffers: Sequence[Tensor],
        dims: Sequence[int],
        stays: Sequence[bool],
        wholes: Sequence[Tensor | None] = (),
        causal_only: str | None = None,
    ) -> None:
        self.group, self.layout, self.exchange, self.causal_only = group, layout, exchange, causal_only
        self.buffers, self.dims, self.stays = list(buffers), list(dims), list(stays)
        self.wholes = list(wholes) or [None] * len(self.buffers)
        self._left: dict[int, Tensor] = {}  # position -> share of a buffer that was left cut
        self._stack: ExitStack | None = None

    def __enter__(self) -> SequenceContext:
        if self._stack is not None:
            raise RuntimeError("context_parallel: this context is entered already; leave it first, or make another")
        originals = [buffer.detach() for buffer in self.buffers]
        shares = [self._share(i, original) for i, original in enumerate(originals)]
        exchange = self.exchange or EXCHANGES[torch_rotate_method()]
        with ExitStack() as stack:
            stack.callback(self._restore, originals, shares)
            for buffer, share in zip(self.buffers, shares, strict=True):
                _replace(buffer, share)
            stack.enter_context(SequenceAttention(self.group, self.layout, exchange, self.causal_only))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> bool | None:
        stack, self._stack = self._stack, None
        return None if stack is None else stack.__exit__(*raised)

    def _share(self, i: int, original: Tensor) -> Tensor:
        """This rank's share; what was left cut is one already, written into or not, unless it has other memory now."""
        left = self._left.get(i)
        if left is not None and original.data_ptr() == left.data_ptr() and original.shape == left.shape:
            return original
        whole = self.wholes[i]
        return self.layout.shard(original if whole is None else whole, self.dims[i])

    def _restore(self, originals: list[Tensor], shares: list[Tensor]) -> None:
        for i, buffer in enumerate(self.buffers):
            if self.stays[i]:
                self._left[i] = shares[i]
            else:
                _replace(buffer, originals[i])


def checked_buffers(
    function: str, mesh: DeviceMesh | None, buffers: Sequence[Tensor], dims: Sequence[int], kept: set[Tensor]
) -> TokenLayout:
    """The layout that cuts all buffers; ValueError where there is none, TypeError without a mesh."""
    if not buffers:
        raise ValueError(f"{function}: cp_buffers is empty; pass the tensors to cut")
    if len(dims) != len(buffers):
        raise ValueError(
            f"{function}: cp_seq_dims has {len(dims)} entries for {len(buffers)} buffers; give one for each"
        )
    known = {id(buffer) for buffer in buffers}
    if any(id(buffer) not in known for buffer in kept):
        raise ValueError(f"{function}: cp_no_restore_buffers has a tensor that is not in cp_buffers; add it there")
    places: dict[int, int] = {}
    for i, buffer in enumerate(buffers):
        if (before := places.setdefault(id(buffer), i)) < i:
            raise ValueError(f"{function}: cp_buffers[{i}] is cp_buffers[{before}] again; give each tensor once")
        if why := _unfit(buffer):
            raise ValueError(f"{function}: cp_buffers[{i}] {why}; cut it by layout.shard instead")
    lengths = [x.shape[checked_dim(function, f"cp_seq_dims[{i}]", dims[i], x)] for i, x in enumerate(buffers)]
    for i, length in enumerate(lengths):
        if length != lengths[0]:
            raise ValueError(
                f"{function}: cp_buffers[{i}] has {length} positions along dim {dims[i]}, cp_buffers[0] has "
                f"{lengths[0]}; pass whole tensors of one length"
            )
    cp_size, cp_rank = checked_place(function, mesh)
    reason = uncuttable("s", lengths[0], "cp", cp_size, "dual_chunk_swap") if cp_size > 1 else None
    if reason:
        raise ValueError(f"{function}: {reason}")
    device = buffers[0].device
    return TokenLayout.dense("dual_chunk_swap", lengths[0], cp_size=cp_size, cp_rank=cp_rank, device=device)


def checked_exchange(function: str, rotate_method: str | None) -> str | None:
    """How keys travel; None leaves it to torch's setting at the time of entering."""
    if rotate_method is not None and rotate_method not in EXCHANGES:
        known = ", ".join(map(repr, EXCHANGES))
        raise ValueError(f"{function}: cp_rotate_method={rotate_method!r} is not one of {known} or None")
    return None if rotate_method is None else EXCHANGES[rotate_method]


def torch_rotate_method() -> str:
    """torch's process-wide setting, as its own function takes it; it is read and never written."""
    from torch.distributed.tensor.experimental import _context_parallel

    method = _context_parallel._attention._cp_options.rotate_method
    return "alltoall" if method.name == "ALL_TO_ALL" else "allgather"


def _unfit(buffer: Tensor) -> str | None:
    """Why a tensor cannot be given other memory, or None."""
    if isinstance(buffer, nn.Parameter):
        return "is an nn.Parameter"
    if buffer.requires_grad:
        return "requires a gradient"
    if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
        return "is an expanded view, which cannot be written in place"
    reach = 0  # of the dims with smaller strides
    for stride, size in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if size > 1 and stride <= reach:
            return "is a view whose entries overlap, which cannot be written in place"
        reach += max(size - 1, 0) * stride
    return None


def _replace(buffer: Tensor, by: Tensor) -> None:
    """The same object with other memory; a backward that saved what it was refuses to run."""
    with torch.no_grad():
        buffer.data = by
    if not buffer.is_inference():
        increment_version(buffer)
