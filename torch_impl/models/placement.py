"""Where a model runs: the ranks that share its sequences and its columns, and how they exchange them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives.arguments import checked_group
from torch_impl.context_parallel.attention_arguments import EXCHANGES

MAMBA = ("hidden", "state")
ORDERS = ("dual_chunk_swap", "contiguous")


@dataclass(frozen=True)
class Placement:
    """Groups of one rank: `cp` cuts tokens in this `order`, `tp` cuts heads, MLP columns and the vocabulary.

    `exchange` is that of attention (usp wants `ring_and_heads`, a mesh of 2 dims over the ranks of cp); `mamba` is
    hidden, which exchanges tokens for heads, or state, which passes states.

    Errors: TypeError for a group that is none; ValueError for another exchange, strategy or order.
    """

    cp: ProcessGroup
    tp: ProcessGroup
    exchange: str = "ring"
    mamba: str = "hidden"
    order: str = "dual_chunk_swap"
    ring_and_heads: DeviceMesh | None = None

    def __post_init__(self) -> None:
        for name in ("cp", "tp"):
            checked_group("models.Placement", name, getattr(self, name))
        for name, known in {"exchange": EXCHANGES, "mamba": MAMBA, "order": ORDERS}.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"models.Placement: {name}={getattr(self, name)!r} is not known; it is one of {', '.join(known)}"
                )
