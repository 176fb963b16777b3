"""Small random models of each family, as transformers builds them, and batches for them.

transformers computes norms, rotary angles and routers in float32 whatever the model's dtype. Under Float64Throughout
whoever asks for float32 gets float64, so that a float64 model differs from the mathematics by float64's rounding alone.
A model is built under it, and the modules that narrow enter it whenever they compute: backward, where they compute
again, knows no mode that stood around it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

NARROWING = (
    *("RMSNorm", "CohereLayerNorm", "Cohere2LayerNorm", "RotaryEmbedding", "TopKRouter", "TopkRouter"),
    *("RMSNormGated", "GatedDeltaNet", "Mamba2Mixer", "NemotronHForCausalLM"),
)


class Float64Throughout(TorchFunctionMode):
    """Each request for float32 is one for float64; so is that for a float without a dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.tensor and isinstance(args[0], float):
            keywords.setdefault("dtype", torch.float64)
        return func(*map(_widened, args), **keywords)


def keep_float64(model: nn.Module) -> None:
    """Have the modules that narrow compute in float64, in place."""
    for module in model.modules():
        if type(module).__name__.endswith(NARROWING):
            module.forward = _throughout(module.forward)


def _throughout(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with Float64Throughout():
            return forward(*args, **kwargs)

    return wide


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


IGNORED = -100
# Four heads share two KV heads, and no dim is as large as another. No vocabulary here divides by two ranks.
SIZES: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 31,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WITHOUT_DROPOUT: dict[str, tuple[str, ...]] = {
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "seed_oss": ("attention_dropout", "residual_dropout"),
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 3},
    "gemma": {"vocab_size": 67},
    "phi3": {"num_hidden_layers": 3, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}

DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}
MIXTURE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
}
SPARSE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 10, "sliding_window": 3},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **MIXTURE, "head_dim": 8},
    "qwen3_5_text": {**DELTA, "head_dim": 8},
    "qwen3_5_moe_text": {**DELTA, **MIXTURE, "head_dim": 8},
    "olmo_hybrid": DELTA,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "ssm_state_size": 5,
        "mamba_num_heads": 6,
        "mamba_head_dim": 4,
        "n_groups": 2,
        "conv_kernel": 3,
        "chunk_size": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "moe_shared_expert_intermediate_size": 14,
        "mlp_bias": True,
    },
}


@dataclass(frozen=True)
class Chosen:
    """A family, whether its head is tied, and the further settings of its configuration."""

    family: str
    tied: bool = False
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def config(self) -> Any:
        own = (OWN | SPARSE | HYBRIDS).get(self.family, {})
        of_family = dict.fromkeys(WITHOUT_DROPOUT.get(self.family, ()), 0.0) | own
        passed = {**SIZES, **of_family, **dict(self.changes), "tie_word_embeddings": self.tied}
        return AutoConfig.for_model(self.family, **passed)


def empty(chosen: Chosen, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Any:
    """The model of a configuration, its buffers as transformers makes them."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(chosen.config, dtype=dtype)
    return model.train()


def exact(chosen: Chosen, dtype: torch.dtype) -> Any:
    """`empty`; in float64 without one number of float32 inside."""
    if dtype != torch.float64:
        return empty(chosen, dtype)
    with Float64Throughout():
        model = empty(chosen, dtype)
    keep_float64(model)
    return model


@cache
def arrays(chosen: Chosen) -> dict[str, np.ndarray]:
    """Float64 values for each parameter, from its name alone; a tied head is left out."""
    by_name = {}
    for name, parameter in empty(chosen, device="meta").named_parameters():
        rng = np.random.Generator(np.random.Philox(key=[zlib.crc32(name.encode()), 0]))
        values = rng.standard_normal(tuple(parameter.shape))
        by_name[name] = values / np.sqrt(values.shape[-1]) if values.ndim > 1 else 1.0 + values / 4
    return by_name


def model_of(chosen: Chosen, dtype: torch.dtype = torch.float64) -> Any:
    """The model with the values of `arrays`, `exact`."""
    model = exact(chosen, dtype)
    if chosen.family in HYBRIDS | SPARSE:
        model.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(arrays(chosen)[name]))
    return model


def batch(chosen: Chosen, rows: int, length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids, and the next id of each; some rows are shorter, and no row but the first is as long as another."""
    rng = np.random.Generator(np.random.Philox(key=[seed, 1]))
    ids = rng.integers(0, chosen.config.vocab_size, size=(rows, length + 1))
    targets = ids[:, 1:].copy()
    for row in range(1, rows):
        targets[row, max(1, length - row) :] = IGNORED
    return ids[:, :-1].copy(), targets
