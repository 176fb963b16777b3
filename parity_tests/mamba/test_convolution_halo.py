"""Parity of mamba.convolution_halo."""

import jax.numpy as jnp
import pytest
import torch

from jax_ref.mamba import causal_conv
from parity_tests.mamba.uneven import TOKENS, uneven, uneven_layout
from parity_tests.rejections import rejected
from shardproof import Cost, integers, offsets, scheme, stored, values
from torch_impl.mamba import causal_conv_over_cp, convolution_halo


def convolved_rows(x, weight, bias, has_bias):
    return causal_conv(x, weight.T, bias if has_bias else jnp.zeros_like(bias))


def convolved_stream(x, weight, bias, cu, has_bias):
    bias = bias if has_bias else jnp.zeros_like(bias)
    return causal_conv(x, weight.T, bias, jnp.zeros(x.shape[1], bool).at[cu[:-1]].set(True, mode="drop"))


def cost(segments):
    """Forward gathers k - 1 rows of x per segment; backward sums the ranks' cotangents in float32 or wider."""

    def declared(c):
        rows = segments(c) * c.dims.get("b", 1) * (c.k - 1) * c.c // c.tp
        return Cost(
            forward={"all_gather/cp": (1, rows * c.itemsize)},
            backward={"reduce_scatter/cp": (1, c.cp * rows * max(c.itemsize, 4))},
        )

    return declared


PARAMETERS = {"weight": "c/tp k cp=R", "bias": "c/tp cp=R"}
DECLARED = dict(
    contract=causal_conv_over_cp,
    mesh={"cp": (1, 2, 3, 4), "tp": (1, 2)},
    draw={"x": values("normal", "iota"), "weight": values("normal"), "bias": values("normal", "zeros")},
    options={"has_bias": (True, False)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("k", "t"),
    roundings=4,  # the result; the gradient of a row for this rank, for another one, and their sum
)
SIZES = {
    "c": (4,),
    "k": (4, 1, 7),
    "t": (24,),
}  # a shard has 6 rows, or 2 halves of 3, and the convolution up to 7 taps
STREAM = {**DECLARED, "draw": {**DECLARED["draw"], "cu": offsets("t", padded=True)}}


def rows(cut):
    """A batch of rows, each one sequence."""
    return {"reference": convolved_rows, "inputs": {"x": f"b {cut} c/tp", **PARAMETERS}, "outputs": f"b {cut} c/tp"}


def stream(cut):
    """A row of several sequences."""
    shapes = {"inputs": {"x": f"1 {cut} c/tp", **PARAMETERS, "cu": "q"}, "outputs": f"1 {cut} c/tp"}
    return {"reference": convolved_stream, **shapes}


@scheme(dims={**SIZES, "b": (2,)}, cost=cost(lambda c: 2), **rows("t/cp:dual_chunk_swap"), **DECLARED)
@pytest.mark.cases(12)
def convolution_over_cp(mesh, x, weight, bias, has_bias):
    return causal_conv_over_cp(x, weight, mesh["cp"], bias=bias if has_bias else None)


@scheme(dims={**SIZES, "b": (2,), "t": (12,)}, cost=cost(lambda c: 1), **rows("t/cp"), **DECLARED)
@pytest.mark.cases(12)
def convolution_contiguous(mesh, x, weight, bias, has_bias):
    return causal_conv_over_cp(x, weight, mesh["cp"], bias=bias if has_bias else None, layout="contiguous")


@scheme(
    dims={**SIZES, "b": (2,), "t": (TOKENS,)},
    layouts={"uneven": uneven},
    cost=cost(lambda c: 1),
    **rows("t/cp:uneven"),
    **DECLARED,
)
@pytest.mark.cases(12)
def convolution_ragged(mesh, x, weight, bias, has_bias):
    return causal_conv_over_cp(x, weight, mesh["cp"], bias=bias if has_bias else None, layout=uneven_layout(mesh))


@scheme(dims={**SIZES, "q": (4,)}, cost=cost(lambda c: 2 * (c.q - 1)), **stream("t/cp:packed"), **STREAM)
@pytest.mark.cases(12)
def convolution_packed(mesh, x, weight, bias, cu, has_bias):
    return causal_conv_over_cp(x, weight, mesh["cp"], bias=bias if has_bias else None, cu_seqlens=cu)


@scheme(dims={**SIZES, "q": (4,)}, cost=cost(lambda c: 1), **stream("t/cp"), **STREAM)
@pytest.mark.cases(12)
@pytest.mark.cases(1, engine="gloo")
def convolution_stream(mesh, x, weight, bias, cu, has_bias):
    return causal_conv_over_cp(
        x, weight, mesh["cp"], bias=bias if has_bias else None, layout="contiguous", cu_seqlens=cu
    )


# The halo alone. Its segments are the chunks of the sequence in order, so a layout shards them as it shards tokens.


def rows_before(x, chunks, taps, reader=lambda m, count: m):
    """The rows before each of equal chunks of the sequence, and zeros before the first.

    The rank that reads a chunk has a copy of the rows, and stores the copy's gradient before the ranks' are added.
    """
    width, count = len(taps), len(chunks)
    length = x.shape[1] // count
    copies = {reader(m, count): stored(x) for m in range(count)}
    padded = [jnp.pad(copies[reader(m, count)], ((0, 0), (width, 0), (0, 0))) for m in range(count)]
    return jnp.stack([rows[:, m * length : m * length + width] for m, rows in enumerate(padded)], axis=1)


def rows_before_swapped(x, chunks, taps):
    """Rank r reads before chunk r and before the chunk that is as far from the end."""
    return rows_before(x, chunks, taps, lambda m, count: min(m, count - 1 - m))


def halo_cost(segments):
    def declared(c):
        rows = segments * c.b * c.w * c.c
        sent = {"all_gather": (1, rows * c.itemsize)}
        return Cost(forward=sent, backward={"reduce_scatter": (1, c.cp * rows * max(c.itemsize, 4))})

    return declared


HALO = dict(
    contract=convolution_halo,
    mesh={"cp": (1, 2, 3, 4)},
    draw={"x": values("normal", "iota"), **dict.fromkeys(("chunks", "taps"), integers(0, 0))},
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
)


@scheme(
    reference=rows_before,
    inputs={"x": "b t/cp c", "chunks": "m", "taps": "w"},
    outputs="b m/cp w c",
    dims={"b": (2,), "t": (12,), "c": (3,), "w": (3, 1, 7), "m": "cp"},
    cost=halo_cost(1),
    **HALO,
)
@pytest.mark.cases(8)
def halo_contiguous(mesh, x, chunks, taps):
    return convolution_halo(x, len(taps) + 1, mesh["cp"], layout="contiguous")


@scheme(
    reference=rows_before_swapped,
    inputs={"x": "b t/cp:dual_chunk_swap c", "chunks": "m", "taps": "w"},
    outputs="b m/cp:dual_chunk_swap w c",
    dims={"b": (2,), "t": (24,), "c": (3,), "w": (3, 1, 7), "m": "2*cp"},
    cost=halo_cost(2),
    **HALO,
)
@pytest.mark.cases(8)
def halo_in_dual_chunk_swap(mesh, x, chunks, taps):
    return convolution_halo(x, len(taps) + 1, mesh["cp"])


REJECTED = (
    (
        "no taps",
        lambda mesh: causal_conv_over_cp(torch.zeros(1, 4, 3), torch.zeros(3, 0), mesh["cp"]),
        "mamba.causal_conv_over_cp: weight is [3, 0]; a convolution has at least one tap, [c, k]",
        ValueError,
    ),
    (
        "offsets in a list",
        lambda mesh: convolution_halo(torch.zeros(1, 4, 3), 4, mesh["cp"], cu_seqlens=[0, 8]),
        "mamba.convolution_halo: cu_seqlens is a list; pass a Tensor",
        TypeError,
    ),
)
test_rejections = rejected({"cp": 2}, REJECTED)
