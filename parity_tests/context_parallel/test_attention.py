"""Parity of context_parallel.attention on dense sequences, for every exchange and order of tokens."""

import jax.numpy as jnp
import pytest

from jax_ref.context_parallel import attention, dense_attention, seen_pairs
from jax_ref.layouts import contiguous, ragged
from parity_tests.context_parallel.attention_schemes import (
    DTYPES,
    HEADS,
    ROUNDINGS,
    RULES,
    SCALE,
    can_share_heads,
    dense_cost,
    exchange_cost,
    limits,
    rules,
    usp_cost,
)
from parity_tests.parity import parity
from shardproof import scheme
from torch_impl.context_parallel import context_parallel_attention
from torch_impl.layouts import TokenLayout


def by_rules(q, k, v, causal, window):
    token = jnp.arange(q.shape[2])
    width = jnp.where(window[0] > 0, window[0] + 2, len(token))
    return attention(q, k, v, seen_pairs(0 * token, token, token >= 0, causal[0] > 0, width), SCALE)


EXCHANGES = ("ring", "all_gather", "ulysses")
DECLARED = dict(
    draw={**HEADS, **RULES}, dtypes=DTYPES, reduction=("s", "p"), roundings=ROUNDINGS, assume=can_share_heads
)
SIZES = {"b": (2,), "h": (12,), "g": (12, 1), "s": (24,), "p": (4,), "one": (1,)}


def specs(cut):
    heads = {"q": f"b h {cut} p", "k": f"b g {cut} p", "v": f"b g {cut} p"}
    return dict(inputs={**heads, "causal": "one", "window": "one"}, outputs=f"b h {cut} p", reference=by_rules)


DENSE = dict(mesh={"cp": (1, 2, 3, 4)}, dims=SIZES, rank_options={"exchange": EXCHANGES}, **DECLARED)


@scheme(
    contract=context_parallel_attention, **specs("s/cp:dual_chunk_swap"), cost=dense_cost("dual_chunk_swap"), **DENSE
)
@pytest.mark.cases(8, inside_subgroup=True)
def attention_in_dual_chunk_swap(mesh, q, k, v, causal, window, exchange):
    return context_parallel_attention(
        q, k, v, group=mesh["cp"], layout="dual_chunk_swap", exchange=exchange, **rules(causal, window)
    )


@scheme(contract=context_parallel_attention, **specs("s/cp:striped"), cost=dense_cost("striped"), **DENSE)
def attention_in_stripes(mesh, q, k, v, causal, window, exchange):
    return context_parallel_attention(
        q, k, v, group=mesh["cp"], layout="striped", exchange=exchange, **rules(causal, window)
    )


def contiguous_cost(c):
    return exchange_cost(c, contiguous(c.s, c.cp), (c.causal, c.window))


IN_ORDER = dict(
    reference=dense_attention,
    mesh={"cp": (1, 2, 3, 4)},
    inputs={"q": "b h s/cp p", "k": "b g s/cp p", "v": "b g s/cp p"},
    outputs="b h s/cp p",
    dims={"b": (1,), "h": (12,), "g": (1,), "s": (24,), "p": (4,)},
    draw=HEADS,
    dtypes=DTYPES,
    reduction=("s", "p"),
    roundings=ROUNDINGS,
    cost=contiguous_cost,
    assume=can_share_heads,
)


@scheme(
    contract=context_parallel_attention,
    options={"causal": (True, False), "window": (None, 3, 8)},
    rank_options={"exchange": EXCHANGES},
    **IN_ORDER,
)
def attention_in_order(mesh, q, k, v, causal, window, exchange):
    return context_parallel_attention(
        q, k, v, group=mesh["cp"], layout="contiguous", exchange=exchange, causal=causal, window=window
    )


@scheme(
    contract=context_parallel_attention,
    options={"causal": (True,), "window": (8, 3)},
    rank_options={"exchange": ("ring",)},
    **IN_ORDER,
)
def attention_to_a_halo(mesh, q, k, v, causal, window, exchange):
    return context_parallel_attention(
        q, k, v, group=mesh["cp"], layout="contiguous", exchange=exchange, causal=causal, window=window
    )


def shares(size, world):
    """Rank r has r times the rows of rank 1, so that rank 0 has none."""
    return [size * rank * 2 // (world * (world - 1)) for rank in range(world)] if world > 1 else [size]


def uneven(size, world):
    return ragged(size, world, shares(size, world))


@scheme(
    contract=context_parallel_attention,
    **specs("s/cp:uneven"),
    mesh={"cp": (1, 2, 3, 4)},
    layouts={"uneven": uneven},
    dims={**SIZES, "s": (12,), "h": (4,), "g": (2,)},
    rank_options={"exchange": ("ring", "all_gather")},
    cost=lambda c, causal, window: exchange_cost(c, uneven(c.s, c.cp), limits(causal, window)),
    **DECLARED,
)
def attention_of_uneven_shares(mesh, q, k, v, causal, window, exchange):
    cp = mesh.size("cp")
    ragged_rows = TokenLayout.dense("ragged", 12, cp_size=cp, cp_rank=mesh.rank("cp"), counts=shares(12, cp))
    return context_parallel_attention(
        q, k, v, group=mesh["cp"], layout=ragged_rows, exchange=exchange, **rules(causal, window)
    )


@scheme(
    contract=context_parallel_attention,
    **specs("s/ring:dual_chunk_swap/heads:dual_chunk_swap"),
    mesh={"ring": (1, 2), "heads": (1, 2)},
    dims=SIZES,
    cost=usp_cost,
    **DECLARED,
)
def attention_over_two_axes(mesh, q, k, v, causal, window):
    return context_parallel_attention(
        q, k, v, mesh=mesh.device_mesh, layout="dual_chunk_swap", exchange="usp", **rules(causal, window)
    )


# A rank has an odd number of rows, so that the halves of its triangle differ.
LONG = {**IN_ORDER, "mesh": {"cp": (2,)}, "dims": {**IN_ORDER["dims"], "b": (1,), "h": (1,), "g": (1,), "s": (642,)}}


@scheme(
    contract=context_parallel_attention,
    options={"causal": (True, False), "window": (20, 300, None)},
    rank_options={"exchange": ("ring",)},
    **LONG,
)
@pytest.mark.cases(6)
def attention_of_runs_of_queries(mesh, q, k, v, causal, window, exchange):
    """A rank has more rows than one run of queries under a window, and more than one triangle."""
    return context_parallel_attention(
        q, k, v, group=mesh["cp"], layout="contiguous", exchange=exchange, causal=causal, window=window
    )


SCHEMES = (
    attention_in_dual_chunk_swap,
    attention_in_stripes,
    attention_in_order,
    attention_to_a_halo,
    attention_of_uneven_shares,
    attention_over_two_axes,
)
test_parity = parity(SCHEMES, lockstep=30)


test_parity_on_processes = pytest.mark.fast_values(2)(parity(SCHEMES, gloo=5))
