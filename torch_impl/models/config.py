"""The sizes of a hybrid language model, the kinds of its layers, and the process groups that it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.context_parallel.kinds import EXCHANGES
from torch_impl.contract import Rejected, check, contract
from torch_impl.contract.tensor_kinds import GroupKind

KINDS = ("attention", "mamba", "moe")
MAMBA = ("hidden", "state")
ORDERS = ("dual_chunk_swap", "contiguous")


@dataclass(frozen=True)
class HybridConfig:
    """The sizes and layers of a model; fields with a name from Hugging Face configs have the same meaning.

    `layers` has the kind of each layer. A "moe" layer is an attention layer with a mixture of experts as its MLP. A
    training step multiplies a router's balance loss of each sequence by `balance_coefficient`, and its z-loss by
    `z_coefficient`.

    Errors: ValueError for an unknown kind, a size below 1, an odd head_dim, query heads that the KV heads do not
            divide, Mamba heads that the groups do not divide, more experts per token than experts, and a negative
            coefficient.
    """

    vocab_size: int = 256
    hidden_size: int = 32
    layers: tuple[str, ...] = ("attention", "mamba")
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 48
    num_experts: int = 4
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 16
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0
    mamba_heads: int = 4
    mamba_head_dim: int = 8
    mamba_groups: int = 2
    state_size: int = 4
    conv_width: int = 4
    chunk_size: int = 16
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    is_tied: bool = False

    @contract
    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            # Every int is a size, except the bool `is_tied`, which Python counts as an int.
            if isinstance(size, int) and not isinstance(size, bool) and size < 1:
                raise Rejected(f"{name}={size} is not a size; it is 1 or more")
        for kind in self.layers:
            if kind not in KINDS:
                raise Rejected(f"layers has {kind!r}; a layer is one of {', '.join(KINDS)}")
        if self.head_dim % 2:
            raise Rejected(f"head_dim={self.head_dim} must be even, since rotation pairs columns")
        self._check_divides("num_attention_heads", "num_key_value_heads")
        self._check_divides("mamba_heads", "mamba_groups")
        if self.num_experts_per_tok > self.num_experts:
            raise Rejected(
                f"num_experts_per_tok={self.num_experts_per_tok} must be at most num_experts={self.num_experts}"
            )
        for name in ("balance_coefficient", "z_coefficient"):
            if not getattr(self, name) >= 0:
                raise Rejected(f"{name}={getattr(self, name)} must be at least 0")

    def _check_divides(self, heads: str, groups: str) -> None:
        if getattr(self, heads) % getattr(self, groups):
            raise Rejected(f"{heads}={getattr(self, heads)} must be divisible by {groups}={getattr(self, groups)}")


@dataclass(frozen=True)
class Placement:
    """Groups of one rank: `cp` shards tokens in this `order`; `tp` shards heads, MLP columns and the vocabulary.

    `exchange` is the exchange of context-parallel attention; usp needs `ring_and_heads`, a 2-D mesh over the cp ranks.
    `mamba` is "hidden" to exchange tokens for heads, or "state" to pass states.

    Errors: TypeError unless cp and tp are process groups; ValueError for an unknown exchange, strategy or order.
    """

    cp: ProcessGroup
    tp: ProcessGroup
    exchange: str = "ring"
    mamba: str = "hidden"
    order: str = "dual_chunk_swap"
    ring_and_heads: DeviceMesh | None = None

    @contract
    def __post_init__(self) -> None:
        for name in ("cp", "tp"):
            # A dataclass generates its constructor, so its signature cannot state a contract.
            check(GroupKind(name), name, getattr(self, name))
        for name, choices in {"exchange": EXCHANGES, "mamba": MAMBA, "order": ORDERS}.items():
            if getattr(self, name) not in choices:
                raise Rejected(f"{name}={getattr(self, name)!r} is not known; it is one of {', '.join(choices)}")
