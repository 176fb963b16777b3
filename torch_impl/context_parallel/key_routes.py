"""The route of keys to the ranks that need them: around a ring, or directly, as a halo.

The *source* of keys is the rank that has them before anything is sent. In a ring keys go from rank to rank up to the
last rank that needs any: every rank on the way receives all rows that at least one other rank needs. A halo is one
all_to_all, in which each rank sends every other rank exactly the rows that it needs. A halo never sends more in total.
But a ring computes while keys travel, and sends to neighbours only, so it is used unless the halo's peak
(`KeyTraffic.peak_rows`) is a quarter lower or a rank would have no message before the ring's step 1. The two peaks are
equal for sequences without padding that DualChunkSwap shards over all ranks, if no window hides keys.

The route depends on the layout only, so every rank makes the same choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from torch_impl.context_parallel.block_schedule import Block, BlockSchedule, Rows, schedule_of
from torch_impl.context_parallel.kinds import Window
from torch_impl.context_parallel.needed_keys import needed_rows
from torch_impl.contract import Instance, contract
from torch_impl.layouts.token_layout import TokenLayout

MAX_HALO_SHARE = 0.75  # fraction of the ring's peak; a halo with a higher peak is not used
BuiltLayout = Annotated[TokenLayout, Instance(TokenLayout, "pass a TokenLayout", shows_value=False)]


@dataclass(frozen=True)
class KeyTraffic:
    """Rank r sends `keys[r]` rows of keys and `gradients[r]` rows of their gradients by this `route`, ring or halo."""

    route: str
    keys: tuple[int, ...]
    gradients: tuple[int, ...]

    @property
    def peak_rows(self) -> int:
        """The most rows of keys that any rank sends, plus the most rows of gradients that any rank sends."""
        return max(self.keys) + max(self.gradients)


@contract
def key_traffic(layout: BuiltLayout, *, causal: bool = True, window: Window | None = None) -> list[KeyTraffic]:
    """The rows that each rank sends around a ring and as a halo; the route that `exchange="ring"` takes comes first.

    A row is K and V of one token: `2 * b * hk * p` numbers. Keys are sent in forward and again in backward, in their
    dtype; their gradients are sent in backward, in float32 or wider. Let `needed[r, s]` be the number of rows of rank s
    that queries of rank r see, `union[s]` the number of its rows that at least one other rank sees, and `reach[s]` the
    largest i for which rank s + i needs any row of s:

        ring    keys[r] = sum of union[r - i] over i >= 0 with reach[r - i] > i;   gradients[r] = the same over i >= 1
                with reach[r - i] >= i
        halo    keys[r] = sum_q needed[q, r];   gradients[r] = sum_s needed[r, s]

    The halo is used if max(keys) + max(gradients), its `peak_rows`, is at most 3/4 of the ring's, or if a rank would
    have no message before the ring's step 1. If no keys travel at all, the route is the ring.

    >>> documents = TokenLayout.packed([0, 8, 16], cp_size=2, cp_rank=0, kind="contiguous")
    >>> key_traffic(documents)[0]
    KeyTraffic(route='ring', keys=(0, 0), gradients=(0, 0))
    >>> one, two = key_traffic(TokenLayout.dense("contiguous", 16, cp_size=2, cp_rank=0), window=3)
    >>> one, two.route
    (KeyTraffic(route='ring', keys=(2, 0), gradients=(0, 2)), 'halo')

    Cost:   no collective; for each rank a search of all positions, cached with the layout.
    Errors: TypeError for a layout, causal or window of a wrong type; ValueError for a window below 1.
    """
    counts = layout.cached(
        ("needed_counts", causal, window), lambda: _needed_counts(needed_rows(layout, causal, window))
    )
    ring, halo = counts.ring_traffic(), counts.halo_traffic()
    return [ring, halo] if counts.prefers_ring() else [halo, ring]


@dataclass(frozen=True)
class NeededCounts:
    """Rank r needs `rows[r][s]` rows of rank s; at least one rank needs `union[s]` rows of rank s."""

    rows: list[list[int]]
    union: list[int]

    @property
    def reach(self) -> tuple[int, ...]:
        """The number of ranks from each source on to the last rank that needs its keys; 0 if no rank does."""
        n = len(self.rows)
        return tuple(max((i for i in range(n) if self.rows[(s + i) % n][s]), default=0) for s in range(n))

    def ring_traffic(self) -> KeyTraffic:
        reach, n = self.reach, len(self.rows)
        # For each rank and step: the number of rows of the step's source, how far they travel, and the step.
        steps = [[(self.union[r - i], reach[r - i], i) for i in range(n)] for r in range(n)]
        # The last rank that receives keys does not send them on, but it sends their gradient to the source.
        keys = (sum(count for count, last, i in of_rank if last > i) for of_rank in steps)
        gradients = (sum(count for count, last, i in of_rank if last >= i > 0) for of_rank in steps)
        return KeyTraffic("ring", tuple(keys), tuple(gradients))

    def halo_traffic(self) -> KeyTraffic:
        return KeyTraffic("halo", tuple(map(sum, zip(*self.rows, strict=True))), tuple(map(sum, self.rows)))

    def prefers_ring(self) -> bool:
        """Whether the route is the ring and not a halo, by the rule in `key_traffic`."""
        reach = self.reach
        # The first call over a group must include every rank, because NCCL connects all ranks in it.
        starts_on_all = all(reach[r] or reach[r - 1] for r in range(len(reach))) or not any(reach)
        ring, halo = self.ring_traffic().peak_rows, self.halo_traffic().peak_rows
        return starts_on_all and (halo > MAX_HALO_SHARE * ring or not ring)


def _needed_counts(needed: Bool[Tensor, "n n rows"]) -> NeededCounts:
    """Count the needed rows, with one copy to the host."""
    *rows, union = torch.cat([needed.sum(2), needed.any(0).sum(1)[None]]).tolist()
    return NeededCounts(rows, union)


@dataclass(frozen=True)
class RingRoute:
    """A ring in which `counts[s]` rows of each source s travel `reach[s]` ranks on.

    `rank` is this rank in the layout, and `rows` are the rows of its own keys that it sends.
    """

    rank: int
    reach: tuple[int, ...]
    counts: tuple[int, ...]
    rows: Rows

    @property
    def last_step(self) -> int:
        """The last step of the ring: the largest number of ranks that any keys travel."""
        return max(self.reach)


@dataclass(frozen=True)
class HaloRoute:
    """A halo in which this rank sends `sent[r]` rows of its keys to rank r and receives `received[s]` from rank s.

    `rows` are the rows that it sends, in order of the receiver; `rank` is this rank in the layout.
    """

    rank: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    rows: Int64[Tensor, " sent"]


@dataclass(frozen=True)
class KeyTransfer:
    """A route, and a block schedule that indexes other ranks' keys by their rows in the received buffer."""

    route: RingRoute | HaloRoute
    schedule: BlockSchedule


def key_transfer(layout: TokenLayout, causal: bool, window: int | None) -> KeyTransfer:
    """The route of keys from and to this rank with its block schedule, cached with the layout.

    Cost: as `schedule_of`, and two copies to the host, of n + 1 numbers per rank and of one byte per position. A halo
    also copies one number.
    """
    return layout.cached(("route", causal, window), lambda: _key_transfer(layout, causal, window))


def _key_transfer(layout: TokenLayout, causal: bool, window: int | None) -> KeyTransfer:
    schedule, rank = schedule_of(layout, causal, window), layout.cp_rank
    needed = needed_rows(layout, causal, window)
    counts = _needed_counts(needed)
    if counts.prefers_ring():
        # 1. In a ring all ranks on the way receive the rows that at least one rank needs.
        arrived = needed.any(0).cpu()
        route = RingRoute(rank, counts.reach, tuple(counts.union), _as_rows(arrived[rank], layout.index.device))
    else:
        # 2. In a halo each rank receives its own rows: `nonzero` lists the rows that this rank sends, by receiver.
        arrived = needed[rank].cpu()
        sent = tuple(of_rank[rank] for of_rank in counts.rows)
        route = HaloRoute(rank, sent, tuple(counts.rows[rank]), needed[:, rank].nonzero()[:, 1])
    # 3. Index other ranks' keys by their rows in the received buffer. This rank's own keys are read from the buffer
    #    that it sends from, which has all their rows.
    blocks = [
        source_blocks if source == rank else tuple(_block_of_arrived(block, arrived[source]) for block in source_blocks)
        for source, source_blocks in enumerate(schedule.blocks)
    ]
    return KeyTransfer(route, replace(schedule, blocks=tuple(blocks)))


def _as_rows(is_row: Bool[Tensor, " rows"], device: torch.device) -> Rows:
    """Rows as a slice if they are adjacent, which copies nothing, else as an index array."""
    rows = is_row.nonzero()[:, 0]
    if not len(rows):
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows.to(device)


def _block_of_arrived(block: Block, is_arrived: Bool[Tensor, " rows"]) -> Block:
    """The block with its keys renumbered among the arriving keys; its queries see none of the other keys."""
    if is_arrived.all():
        return block
    number = is_arrived.cumsum(0) - is_arrived.long()
    if isinstance(block.keys, Tensor):
        # A key that does not arrive is hidden from all queries by the mask: give it any valid index.
        keys = number.to(block.keys.device)[block.keys].clamp(max=int(is_arrived.sum()) - 1)
        return replace(block, keys=keys)
    is_needed = is_arrived[block.keys]
    first = int(number[block.keys.start])
    mask = block.mask if block.mask is None or is_needed.all() else block.mask[..., is_needed.to(block.mask.device)]
    return replace(block, keys=slice(first, first + int(is_needed.sum())), mask=mask)
