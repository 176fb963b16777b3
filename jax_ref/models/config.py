"""The sizes of a hybrid language model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """`layers` names the kind of each layer, attention or mamba. How a scan is cut into chunks changes no value."""

    vocab_size: int
    hidden_size: int
    layers: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    state_size: int
    conv_width: int
    rope_base: float
    norm_eps: float
    is_tied: bool
    chunk_size: int | None = None
