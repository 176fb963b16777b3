"""Parity of the kernels of CUDA where no kernel of a device takes the inputs, so that plain operations do."""

import jax.numpy as jnp
import pytest

from jax_ref.context_parallel import attention
from parity_tests.context_parallel.one_block import RULES, SCALE, OneBlock, masked, two_keys_or_more
from shardproof import scheme, values
from torch_impl.context_parallel.block_kernels import ROWS


def of_one_block(q, k, v, seen, rule):
    queries, keys = q.shape[2], k.shape[2]
    pairs = {
        "all": jnp.ones((queries, keys), bool),
        "causal": jnp.tril(jnp.ones((queries, keys), bool)),
        "keys": seen[:, None, :1] > 0,
        "pairs": seen[:, None] > 0,
    }
    return attention(q, k, v, pairs[rule], SCALE)


ONE_BLOCK = dict(
    reference=of_one_block,
    mesh={"tp": (1, 2)},
    inputs={"q": "b h/tp i p", "k": "b g/tp j p", "v": "b g/tp j p", "seen": "b i j tp=I"},
    outputs="b h/tp i p",
    nograd=("seen",),
    draw={**dict.fromkeys("qkv", values("normal", "ties", "zeros")), "seen": two_keys_or_more},
    options={"rule": RULES},
    reduction=("j", "p", "i"),
    roundings=3,  # the output, and its product with the cotangent, from which a gradient is computed
)


@scheme(
    **ONE_BLOCK,
    # No kernel takes rows of 3 or 5 numbers in 16 bits and 32, nor any in float64; some queries are in a second slice.
    dims={"b": (2, 1), "h": (4,), "g": (2, 4), "i": (5, ROWS + 3), "j": (4, 9), "p": (3, 5)},
    dtypes=("float32", "float64", "bfloat16"),
)
@pytest.mark.cases(3, engine="gloo")
@pytest.mark.cases(25)
def attention_by_plain_operations(mesh, q, k, v, seen, rule):
    return masked(OneBlock, q, k, v, seen, rule)
