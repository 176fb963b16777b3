"""DTensors at the border: ids and logits whose sequence is stored in an order of its own and cut over cp.

Stored position j is original position seq_index[j]. A mesh dim named `cp` cuts the stored order evenly; rank r
of it holds block r. Nothing else may cut the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_gather
from torch_impl.collectives.plain import gathered
from torch_impl.layouts.inverse import inverted
from torch_impl.vocab_parallel.scoring import Scoring, next_ids, scored_over_cp

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class StoredIds:
    """Ids as a rank holds them, `local`, and the cp group that cuts them; None for ids that are whole here."""

    local: Int[Tensor, "b _"]
    cp_group: ProcessGroup | None
    is_cut: bool

    @property
    def cp(self) -> int:
        return 1 if self.cp_group is None else self.cp_group.size()

    @property
    def size(self) -> int:
        """Positions of the whole stored order."""
        return self.local.shape[1] * (self.cp if self.is_cut else 1)

    def whole(self) -> Int[Tensor, "b s"]:
        """All ids in stored order."""
        if self.cp_group is None or not self.is_cut:
            return self.local
        return gathered(self.local, self.cp_group, 1, [self.local.shape[1]] * self.cp)


def stored_ids(function: str, name: str, ids: Tensor | DTensor) -> StoredIds:
    """The ids of a DTensor, of which only the mesh dim `cp` may cut the sequence; or plain ones, which are whole."""
    from torch.distributed.tensor import DTensor

    if not isinstance(ids, DTensor):
        return StoredIds(ids, None, False)
    check_placements(function, name, ids, {"cp": 1})
    names = ids.device_mesh.mesh_dim_names or ()
    group = ids.device_mesh.get_group("cp") if "cp" in names else None
    is_cut = group is not None and ids.placements[names.index("cp")].is_shard(1)
    if group is not None and is_cut and ids.shape[1] % group.size():
        world = group.size()
        padded = -(-ids.shape[1] // world) * world
        raise ValueError(
            f"{function}: s={ids.shape[1]} cannot be cut by contiguous over cp={world} "
            f"(needs a multiple of {world}); pad to {padded}"
        )
    return StoredIds(ids.to_local(), group, is_cut)


def check_placements(function: str, name: str, x: DTensor, cuts: dict[str, int]) -> None:
    """Each named mesh dim cuts its own dim or nothing, every other, those without a name too, the batch or nothing."""
    names = x.device_mesh.mesh_dim_names
    for number, placement in enumerate(x.placements):
        axis = names[number] if names else f"dim {number} of a mesh without names"
        dim = cuts.get(axis, 0)
        if not (placement.is_replicate() or placement.is_shard(dim)):
            said = repr(placement).removesuffix("()")
            remedy = "redistribute" if names else "pass mesh_dim_names to the mesh, or redistribute"
            raise ValueError(f"{function}: {name} is {said} over {axis}; {remedy} to Shard({dim}) or Replicate")


def scored_in_stored_order(
    scoring: Scoring, logits: Float[Tensor, "b l v"], ids: StoredIds, seq_index: Int64[Tensor, " s"] | None
) -> Float[Tensor, "b u"]:
    """Next-token scores in original order: "b s/cp v/tp", "b s/cp" -> "b u cp=I"."""
    cp_group = ids.cp_group
    if seq_index is None and ids.cp == 1:
        return scored_over_cp(scoring, logits, ids.local, None)
    if cp_group is None:
        raise ValueError(
            f"{scoring.function}: seq_index is given but {scoring.ids_name} has no mesh dim 'cp'; pass it as a "
            "DTensor of such a mesh, or no seq_index"
        )
    scoring.check(logits, ids.local)
    size = logits.shape[1] * ids.cp
    scoring.check_length(ids.size, logits.shape[1], ids.cp)
    stored = _checked_index(scoring, ids, seq_index, size).to(logits.device)
    original = inverted(stored)
    target = next_ids(ids.whole().to(logits.device)[:, original], size)[:, stored]
    scores = scoring.scores(logits, target.chunk(ids.cp, dim=1)[cp_group.rank()])
    return all_gather(scores, cp_group, out="I", dim=1)[:, original][:, : max(size - 1, 0)]


def _checked_index(scoring: Scoring, ids: StoredIds, seq_index: Tensor | None, size: int) -> Int64[Tensor, " s"]:
    """`seq_index`, a permutation of as many positions as the logits and the ids have."""
    name = scoring.ids_name
    if seq_index is None:
        raise ValueError(
            f"{scoring.function}: seq_index is None but {name} is cut over cp={ids.cp}; "
            "pass the [s] index of stored positions"
        )
    if ids.size != size:
        raise ValueError(
            f"{scoring.function}: {name} has {ids.size} positions but {scoring.logits_name} covers {size}; "
            "a stored order is not padded"
        )
    every = torch.arange(size, device=seq_index.device)
    if seq_index.shape != every.shape or not torch.equal(seq_index.sort().values.long(), every):
        raise ValueError(f"{scoring.function}: seq_index is not a permutation of 0..{size - 1}")
    return seq_index.long()
