"""Parity of the kernels of CUDA where no kernel of a device takes the inputs, so that plain operations do."""

import jax.numpy as jnp
import pytest
import torch

from jax_ref.context_parallel import attention
from shardproof import check_cases, scheme, values
from torch_impl.context_parallel.block_kernels import ROWS, cuda_backward, cuda_forward

SCALE = 0.375
RULES = ("all", "causal", "keys", "pairs")


class OneBlock(torch.autograd.Function):
    """Attention of one block. A query that sees no key has an lse of -inf, which its backward takes as inf."""

    @staticmethod
    def forward(ctx, q, k, v, seen, is_causal):
        out, lse = cuda_forward(q, k, v, seen, is_causal, SCALE)
        ctx.save_for_backward(q, k, v, out, lse.masked_fill(lse == -torch.inf, torch.inf))
        ctx.rules = seen, is_causal
        return out

    @staticmethod
    def backward(ctx, cotangent):
        return *cuda_backward(cotangent, *ctx.saved_tensors, *ctx.rules, SCALE), None, None


def of_one_block(q, k, v, seen, rule):
    queries, keys = q.shape[2], k.shape[2]
    pairs = {
        "all": jnp.ones((queries, keys), bool),
        "causal": jnp.tril(jnp.ones((queries, keys), bool)),
        "keys": seen[:, None, :1] > 0,
        "pairs": seen[:, None] > 0,
    }
    return attention(q, k, v, pairs[rule], SCALE)


def two_keys_or_more(generator, shape):
    """1 where a query sees a key, else 0. The gradient of a query of one key is 0, and so would be its budget."""
    seen = generator.random(shape).argsort(-1) < generator.integers(2, shape[-1] + 1, (*shape[:-1], 1))
    return seen.astype("float64")


@scheme(
    reference=of_one_block,
    mesh={"tp": (1, 2)},
    inputs={"q": "b h/tp i p", "k": "b g/tp j p", "v": "b g/tp j p", "seen": "b i j tp=I"},
    outputs="b h/tp i p",
    # No kernel takes rows of 3 or 5 numbers in 16 bits and 32, nor any in float64; some queries are in a second slice.
    dims={"b": (2, 1), "h": (4,), "g": (2, 4), "i": (5, ROWS + 3), "j": (4, 9), "p": (3, 5)},
    nograd=("seen",),
    draw={**dict.fromkeys("qkv", values("normal", "ties", "zeros")), "seen": two_keys_or_more},
    options={"rule": RULES},
    dtypes=("float32", "float64", "bfloat16"),
    reduction=("j", "p", "i"),
    roundings=3,  # the output, and its product with the cotangent, from which a gradient is computed
)
def attention_by_plain_operations(mesh, q, k, v, seen, rule):
    masks = {"keys": seen[:, None, :1] > 0, "pairs": seen[:, None] > 0}
    return OneBlock.apply(q, k, v, masks.get(rule), rule == "causal")


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_parity(engine):
    check_cases(attention_by_plain_operations, 25 if engine == "lockstep" else 3, engine=engine)
