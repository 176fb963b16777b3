"""The sizes of a hybrid language model, the kind of each layer, and the ranks that it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives.arguments import checked_group
from torch_impl.context_parallel.kinds import EXCHANGES

KINDS = ("attention", "mamba")


@dataclass(frozen=True)
class HybridConfig:
    """`layers` names the kind of each layer; names that Hugging Face configs have mean the same here.

    Errors: ValueError for a kind that is none, a size below 1, an odd head_dim, query heads that KV heads do not share
            equally, and Mamba heads that their groups do not.
    """

    vocab_size: int = 256
    hidden_size: int = 32
    layers: tuple[str, ...] = ("attention", "mamba")
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 48
    mamba_heads: int = 4
    mamba_head_dim: int = 8
    mamba_groups: int = 2
    state_size: int = 4
    conv_width: int = 4
    chunk_size: int = 16
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    is_tied: bool = False

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if isinstance(size, int) and not isinstance(size, bool) and size < 1:
                raise ValueError(f"models.HybridConfig: {name}={size} is not a size; it is 1 or more")
        for kind in self.layers:
            if kind not in KINDS:
                raise ValueError(f"models.HybridConfig: layers has {kind!r}; a layer is one of {', '.join(KINDS)}")
        if self.head_dim % 2:
            raise ValueError(f"models.HybridConfig: head_dim={self.head_dim} must be even, since positions turn pairs")
        self._check_shared("num_attention_heads", "num_key_value_heads")
        self._check_shared("mamba_heads", "mamba_groups")

    def _check_shared(self, many: str, few: str) -> None:
        heads, shared = getattr(self, many), getattr(self, few)
        if heads % shared:
            raise ValueError(f"models.HybridConfig: {many}={heads} must be divisible by {few}={shared}")


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
