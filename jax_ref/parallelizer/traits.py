"""What distinguishes one family of decoders from another, read from a Hugging Face configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class DecoderTraits:
    """Sizes and rules of one decoder.

    `windows` has, for each layer, how many keys a query sees, itself among them, or None for all before it.
    `rotated` is how many of a head's columns are rotated. A norm multiplies by `norm_offset` + weight.
    The lookup of `padding_id` has no gradient, as torch.nn.Embedding has it.
    """

    vocab: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    windows: tuple[int | None, ...]
    eps: float
    rope_theta: float
    rotated: int
    activation: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False
    is_fused: bool = False
    is_tied: bool = False
    embed_scale: float = 1.0
    norm_offset: float = 0.0
    padding_id: int | None = None

    @classmethod
    def of(cls, config: Any) -> DecoderTraits:
        """The traits of a configuration. Errors: ValueError for a family, rotation or activation not stated here."""
        family, attention_bias = config.model_type, bool(getattr(config, "attention_bias", False))
        if family not in FAMILIES:
            raise ValueError(f"decoder: model_type {family!r} is not one of {', '.join(FAMILIES)}")
        rope = config.rope_parameters
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"decoder: rope_type {rope['rope_type']!r} is not 'default', the one stated here")
        if config.hidden_act not in ACTIVATIONS:
            raise ValueError(f"decoder: hidden_act {config.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
        if getattr(config, "use_bidirectional_attention", None):
            raise ValueError("decoder: use_bidirectional_attention=True is not stated here; attention is causal")
        head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        given = {
            "qkv_bias": attention_bias,
            "out_bias": attention_bias,
            "mlp_bias": bool(getattr(config, "mlp_bias", False)),
            **FAMILIES[family],
        }
        return cls(
            vocab=config.vocab_size,
            width=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=head_width,
            windows=_windows(config),
            eps=config.rms_norm_eps,
            rope_theta=rope["rope_theta"],
            rotated=int(head_width * rope.get("partial_rotary_factor", 1.0)),
            activation=ACTIVATIONS[config.hidden_act],
            is_tied=bool(config.tie_word_embeddings),
            embed_scale=config.hidden_size**0.5 if family == "gemma" else 1.0,
            padding_id=config.pad_token_id,
            **given,
        )


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "out_bias": False},
    "qwen3": {"has_qk_norm": True},
    "mistral": {"qkv_bias": False, "out_bias": False},
    "gemma": {"norm_offset": 1.0},
    "phi3": {"is_fused": True},
}


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
