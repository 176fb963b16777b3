"""The slots of a packed stream: which sequence each token belongs to, where it stands, and whether it has a next.

The stream holds sequences one after another, each cut over cp by DualChunkSwap inside itself: rank r holds its
share of sequence 0, then of sequence 1, ... All is index arrays for the whole batch; the number of sequences
changes the length of none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_gather
from torch_impl.layouts import contiguous, packed
from torch_impl.layouts.packed import check_rising, first
from torch_impl.vocab_parallel.vocab_range import NO_ID


@dataclass(frozen=True)
class PackedSlots:
    """Local slot i of cp rank r holds token place[r, i] of sequence[i], which is position[r, i] of the stream."""

    sequence: Int64[Tensor, " l"]
    position: Int64[Tensor, "cp l"]
    place: Int64[Tensor, "cp l"]
    has_next: Bool[Tensor, "cp l"]

    def next_ids(self, ids: Int[Tensor, "b t"], rank: int) -> Int[Tensor, "b l"]:
        """The id after each token of one rank, in its own sequence; nobody's where there is none."""
        after = torch.where(self.has_next[rank], self.position[rank] + 1, 0)
        return self.asked(ids[:, after], rank)

    def asked(self, target: Int[Tensor, "b l"], rank: int) -> Int[Tensor, "b l"]:
        """Targets of one rank's slots, nobody's where the token has no next."""
        return target.masked_fill(~self.has_next[rank], NO_ID)

    def spread(
        self, scores: Float[Tensor, "b m"], to: Int64[Tensor, "cp l"], size: int, cp_group: ProcessGroup | None
    ) -> Float[Tensor, "b size"]:
        """Scores of all ranks at the places `to` of `size`, 0 elsewhere; places from `size` on are dropped.

        "b t/cp:packed" -> "b size cp=R". Slots past the last sequence are padding.
        """
        cp, used = self.position.shape
        if cp_group is not None:
            scores = all_gather(scores, cp_group, out="R", dim=1)
        flat = scores.view(len(scores), cp, -1)[:, :, :used].flatten(1)
        index = torch.where(self.has_next, to, size).clamp_max(size).flatten()
        return flat.new_zeros(len(flat), size + 1).index_copy(1, index, flat)[:, :size]


def packed_slots(
    padded: Int64[Tensor, " n"], true: Int64[Tensor, " n"] | None, cp: int, device: torch.device
) -> PackedSlots:
    """Slots for offsets on the host that `checked_offsets` has let pass; with true ones padding has no next."""
    total, offsets = int(padded[-1]), padded.to(device)
    lengths = offsets.diff()
    ends = lengths if true is None else true.to(device).diff()
    held = packed(total, cp, padded, device=device) if cp > 1 else contiguous(total, 1, device=device)
    position = torch.stack(held)
    each = torch.arange(len(lengths), device=device)
    sequence = each.repeat_interleave(lengths // cp, output_size=total // cp)
    place = position - offsets[sequence]
    return PackedSlots(sequence, position, place, place + 1 < ends[sequence])


def checked_offsets(
    function: str, padded: Tensor, true: Tensor | None, cp: int, covered: int, by: str
) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"] | None]:
    """Both offsets on the host, as int64, by one read; `covered` positions are what `by` has."""
    given = {"cu_seqlens_padded": padded} if true is None else {"cu_seqlens_padded": padded, "cu_seqlens": true}
    for name, offsets in given.items():
        if offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{function}: {name} is {str(offsets.dtype).removeprefix('torch.')}; offsets are integers")
        if offsets.ndim != 1 or not len(offsets) or len(offsets) != len(padded):
            raise ValueError(
                f"{function}: {name} is {list(offsets.shape)}; offsets are one row of [batch + 1], as many in each"
            )
    on_host = torch.stack([offsets.long().to(padded.device) for offsets in given.values()]).cpu()
    for name, offsets in zip(given, on_host, strict=True):
        check_rising(f"{function}: {name}", offsets)
    lengths = on_host.diff()
    for j in first(lengths[0] % (2 * cp) != 0 if cp > 1 else lengths[0] < 0):
        length = int(lengths[0, j])
        raise ValueError(
            f"{function}: cu_seqlens_padded[{j + 1}] - cu_seqlens_padded[{j}] = {length} is not a multiple of "
            f"2*cp = {2 * cp}; pad sequence {j} to {length + -length % (2 * cp)}"
        )
    for j in first(lengths[-1] > lengths[0]):
        raise ValueError(
            f"{function}: cu_seqlens gives sequence {j} {int(lengths[-1, j])} tokens "
            f"but its padded slot has {int(lengths[0, j])}"
        )
    if on_host[0, -1] > covered:
        raise ValueError(f"{function}: cu_seqlens_padded ends at {int(on_host[0, -1])} but {by} covers {covered}")
    return on_host[0], None if true is None else on_host[1]
