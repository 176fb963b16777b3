"""Parity of the calls of mamba-ssm's and causal-conv1d's kernels, with stand-ins that compute token by token."""

import jax.numpy as jnp
import torch

from jax_ref.mamba import causal_conv
from parity_tests.mamba import ssm_kernels
from parity_tests.mamba.test_scan import DECLARED
from parity_tests.parity import parity
from shardproof import offsets, scheme, values
from torch_impl.layouts import TokenLayout
from torch_impl.mamba.mamba_ssm_kernels import kernel_conv, kernel_scan

D_SHAPES = ("h", "h 1", "h p", "hp")


def in_a_wider_tensor(x):
    """The same values, with the strides of a tensor that has more columns."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def shaped_D(D, shape, p):
    """D with a number for each head, or with the same number for each channel of a head."""
    by_channel = D[:, None].expand(-1, p)
    return {"h": D, "h 1": D[:, None], "h p": by_channel, "hp": by_channel.flatten()}[shape]


@scheme(
    rank_options={"chunk_size": (4, 1, 256), "shape": D_SHAPES, "first": (0, 5)},
    dtypes=("float32", "bfloat16"),
    **{**DECLARED, "dims": {**DECLARED["dims"], "s": (9, 2)}},
)
def scanned_by_a_kernel(mesh, x, dt, A, B, C, D, entering, cu, chunk_size, shape, first):
    """Ids of sequences may start at any number."""
    ids = first + TokenLayout.packed(cu, cp_size=1, cp_rank=0).sequence_ids.expand(x.shape[:2])
    parts = in_a_wider_tensor(x), in_a_wider_tensor(dt.float().exp()), -A.exp()
    shared = in_a_wider_tensor(B), in_a_wider_tensor(C), shaped_D(D, shape, x.shape[-1])
    return kernel_scan(ssm_kernels.scan, *parts, *shared, chunk_size, ids, entering)


def reference_conv(x, weight, bias, cu, has_bias, packed):
    first = jnp.zeros(x.shape[1], bool).at[cu[:-1]].set(True, mode="drop")
    return causal_conv(x, weight.T, bias if has_bias else None, first if packed else None)


@scheme(
    reference=reference_conv,
    mesh={"cp": (1,)},
    inputs={"x": "b s c cp=R", "weight": "c k cp=R", "bias": "c cp=R", "cu": "q"},
    outputs="b s c cp=R",
    dims={"b": (2,), "s": (9, 2), "c": (3,), "k": (4, 2), "q": (4,)},
    draw={**dict.fromkeys(("x", "weight", "bias"), values("normal", "ties")), "cu": offsets("s", padded=True)},
    options={"has_bias": (True, False), "packed": (True, False)},
    dtypes=("float32", "bfloat16"),
    reduction=("k",),
    roundings=2,
)
def convolved_by_a_kernel(mesh, x, weight, bias, cu, has_bias, packed):
    """A bias may be wider than the weight."""
    ids = TokenLayout.packed(cu, cp_size=1, cp_rank=0).sequence_ids.int().expand(x.shape[:2]) if packed else None
    rows, wide_bias = in_a_wider_tensor(x), bias.float() if has_bias else None
    return kernel_conv(ssm_kernels.conv, rows, in_a_wider_tensor(weight), wide_bias, ids)


SCHEMES = (scanned_by_a_kernel, convolved_by_a_kernel)
test_parity = parity(SCHEMES, lockstep=20)
