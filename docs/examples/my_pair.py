"""A gated feed-forward block in PyTorch, and the same in flax under other names."""

import jax
import numpy as np
import torch
from flax import nnx
from torch import nn

from shardproof import Pair


class Block(nn.Module):
    def __init__(self, d=8, f=12):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.gate, self.up = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.down = nn.Linear(f, d, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class FlaxBlock(nnx.Module):
    def __init__(self, d, f, rngs):
        self.ln = nnx.LayerNorm(d, epsilon=1e-5, rngs=rngs)
        self.w_gate, self.w_up = (nnx.Linear(d, f, use_bias=False, rngs=rngs) for _ in range(2))
        self.w_down = nnx.Linear(f, d, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = self.ln(x)
        return x + self.w_down(jax.nn.silu(self.w_gate(h)) * self.w_up(h))


NAMES = {"norm": "ln", "gate": "w_gate", "up": "w_up", "down": "w_down"}


def make_flax(weights):
    """The flax module with weights that come by PyTorch's names: a weight is [out, in], a kernel [in, out]."""
    f, d = weights["up.weight"].shape
    block = nnx.eval_shape(lambda: FlaxBlock(d, f, nnx.Rngs(0)))
    block.ln.scale, block.ln.bias = nnx.Param(weights["norm.weight"]), nnx.Param(weights["norm.bias"])
    for name in ("gate", "up", "down"):
        getattr(block, NAMES[name]).kernel = nnx.Param(weights[f"{name}.weight"].T)
    return block


x = np.random.default_rng(0).standard_normal((2, 5, 8))
torch.manual_seed(0)
block = Pair(Block(), make_flax, (x,), names=NAMES)
in_bfloat16 = Pair(Block().bfloat16(), make_flax, (x,), names=NAMES)
