"""The initial weights of a run, drawn from the seed and each name alone, for PyTorch and JAX alike."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
from numpy.random import Generator, Philox


def initial_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """float64 arrays with PyTorch's names and shapes, rounded to float32, so that runs in both dtypes start equal."""
    weights = {}
    for name, shape in shapes(config).items():
        rng = Generator(Philox(key=[seed, zlib.crc32(name.encode())]))
        weights[name] = _draw(name, shape, rng).astype(np.float32).astype(np.float64)
    return weights


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter."""
    d, vocab = config["hidden_size"], config["vocab_size"]
    by_name: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, d)}
    for index, kind in enumerate(config["layers"]):
        layer = {"attention": _attention, "mamba": _mamba, "moe": _moe}[kind](config)
        by_name |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    by_name["norm.weight"] = (d,)
    return by_name if config["is_tied"] else {**by_name, "lm_head.weight": (vocab, d)}


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, f = config["hidden_size"], config["intermediate_size"]
    mlp = {"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d), "mlp.down_proj.weight": (d, f)}
    return _attention_alone(config) | mlp


def _moe(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    e, d, f = config["num_experts"], config["hidden_size"], config["moe_intermediate_size"]
    experts = {"mlp.experts.gate_up_proj": (e, 2 * f, d), "mlp.experts.down_proj": (e, d, f)}
    return _attention_alone(config) | {"mlp.router.weight": (e, d)} | experts


def _attention_alone(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, p = config["hidden_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * p, config["num_key_value_heads"] * p
    return {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (wide, d),
        "self_attn.k_proj.weight": (narrow, d),
        "self_attn.v_proj.weight": (narrow, d),
        "self_attn.o_proj.weight": (d, wide),
        "post_attention_layernorm.weight": (d,),
    }


def _mamba(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads = config["hidden_size"], config["mamba_heads"]
    inner, shared = heads * config["mamba_head_dim"], 2 * config["mamba_groups"] * config["state_size"]
    return {
        "input_layernorm.weight": (d,),
        "mixer.dt_bias": (heads,),
        "mixer.A_log": (heads,),
        "mixer.D": (heads,),
        "mixer.in_proj.weight": (2 * inner + shared + heads, d),
        "mixer.conv1d.weight": (inner + shared, 1, config["conv_width"]),
        "mixer.conv1d.bias": (inner + shared,),
        "mixer.norm.weight": (inner,),
        "mixer.out_proj.weight": (d, inner),
    }


def _draw(name: str, shape: tuple[int, ...], rng: Generator) -> np.ndarray:
    if name.endswith(("norm.weight", ".D")):
        return 1.0 + 0.1 * rng.standard_normal(shape)  # all different, so that a permutation shows
    if name.endswith("A_log"):
        return np.log(rng.uniform(1.0, 16.0, shape))
    if name.endswith("dt_bias"):
        dt = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
        return dt + np.log(-np.expm1(-dt))  # the inverse of softplus
    fan_in = 50 if name.startswith("embed") else shape[-1] if len(shape) > 1 else 1
    return rng.standard_normal(shape) / math.sqrt(fan_in)
