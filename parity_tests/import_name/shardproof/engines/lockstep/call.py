"""One collective or message that one rank issues: its row, copies of its input, and the tensors for its results.

Also the two traps of asynchronous communication: an output holds poison until its wait, and the input must be unchanged
at the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardproof.engines.ledger import LedgerRow


@dataclass(slots=True, eq=False)
class CommunicationCall:
    """`pieces` are slices of the copies, which the operation combines; `results` are this rank's part of the answer."""

    row: LedgerRow
    place: int  # the rank's position in the group
    sources: Sequence[Tensor]
    outputs: Sequence[Tensor]
    copies: list[Tensor] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    expected: Sequence[Tensor] = ()  # all_to_all: the buffer for each rank's message
    results: list[Tensor] = field(default_factory=list)
    done: bool = False
    waited: bool = False
    tracked: bool = False
    order: int = 0  # among all calls of the run
    origin: int = -1  # of a receive: the sender's place

    storages: set[int] = field(default_factory=set)  # of all input tensors
    writes: set[int] = field(default_factory=set)  # of the outputs

    def __post_init__(self) -> None:
        self.writes = _storages(self.outputs)
        self.storages = self.writes | _storages(self.sources)

    def take(self, split: Callable[[list[Tensor]], list[Tensor]] | None) -> None:
        """Copy the input; if the work is waited for later, fill the outputs with poison."""
        self.copies = [source.data.clone(memory_format=torch.contiguous_format) for source in self.sources]
        self.pieces = split(self.copies) if split else self.copies
        if self.tracked:
            for output in self.outputs:
                output.data.fill_(_poison(output.dtype))

    def write(self) -> None:
        """Put the results into the outputs: one each, or several joined in one.

        After a reduce, the tensors of all ranks but the root hold poison, since torch leaves them undefined.
        """
        if self.row.op == "reduce" and not self.outputs:
            for source in self.sources:
                source.data.fill_(_poison(source.dtype))
        if not self.outputs:
            return
        span = len(self.results) // len(self.outputs)
        for index, output in enumerate(self.outputs):
            parts = self.results[index * span : (index + 1) * span]
            gathered = parts[0] if span == 1 else torch.cat([part.reshape(-1) for part in parts])
            output.data.copy_(gathered.reshape(output.shape))

    def disturbed(self) -> str | None:
        """A sentence about a tensor that was written between issue and wait, or None."""
        for index, output in enumerate(self.outputs):
            poison = _poison(output.dtype)
            spoiled = output.data.isnan() if poison != poison else output.data == poison
            if not bool(spoiled.all()):
                return f"output {index} was written at {_first(~spoiled)} before its wait"
        homes = {output.untyped_storage().data_ptr() for output in self.outputs}
        for index, (source, copy) in enumerate(zip(self.sources, self.copies, strict=True)):
            home = source.untyped_storage()
            if home.data_ptr() in homes or not home.nbytes() or source.shape != copy.shape or not copy.numel():
                continue  # gathered in place (the poison shows it), freed, resized by its owner, or without elements
            same = (_bits(source.data) == _bits(copy)).reshape(*copy.shape, -1).all(-1)
            if not bool(same.all()):
                return f"input {index} was changed at {_first(~same)} before its wait"
        return None


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    """Addresses of the tensors' memory; fake tensors of a memory estimate, and meta tensors, have none."""
    homes = (
        tensor.untyped_storage()
        for tensor in tensors
        if not is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, FakeTensor)
    )
    return {address for home in homes if home.nbytes() and (address := home.data_ptr())}


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _bits(tensor: Tensor) -> Tensor:
    # A single element is contiguous at any stride, but can be viewed as bytes only at stride 1.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())
