"""Parity of mamba.delta_rule."""

import jax.numpy as jnp

from jax_ref.mamba import gated_delta_rule as reference
from parity_tests.mamba.uneven import TOKENS, uneven, uneven_layout
from shardproof import Cost, offsets, scheme, values
from torch_impl.collectives import accumulator
from torch_impl.mamba import gated_delta_rule


def rows(query, key, value, g, beta, initial_state):
    """Keys that are not normalized: short ones, since a share above 2 / |k|^2 would let the state grow."""
    return reference(query, key, value, -jnp.exp(g), beta, initial_state)


def normalized_rows(query, key, value, g, beta, initial_state):
    return reference(query, key, value, -jnp.exp(g), beta, initial_state, use_qk_l2norm=True)


def stream(query, key, value, g, beta, initial_state, cu):
    return reference(query, key, value, -jnp.exp(g), beta, initial_state, cu, use_qk_l2norm=True)


def over_cp(mesh, query, key, value, g, beta, initial_state, **options):
    """Outputs and final states; the decays are the exponentials of what is drawn, in float32 or wider."""
    g = -g.to(accumulator(g.dtype)).exp()
    return gated_delta_rule(
        query, key, value, g, beta, mesh["cp"], initial_state=initial_state, output_final_state=True, **options
    )


def inputs(cut, batch="b", states="b", decay=""):
    return {
        "query": f"{batch} {cut} hk/tp k",
        "key": f"{batch} {cut} hk/tp k",
        "value": f"{batch} {cut} h/tp v",
        "g": f"{batch} {cut} h/tp{decay}",
        "beta": f"{batch} {cut} h/tp",
        "initial_state": f"{states} h/tp k v cp=R",
    }


def outputs(cut, batch="b", states="b"):
    return f"{batch} {cut} h/tp v", f"{states} h/tp k v cp=I"


def cost(segments, states=lambda c: c.b):
    """One message with a state and a transition per segment, and the cotangents of the states back."""

    def declared(c):
        wide, heads = max(c.itemsize, 4), c.h // c.tp
        final = {"all_reduce": (1, states(c) * heads * c.k * c.v * wide)}
        if c.cp == 1:
            return Cost(forward=final)
        sent = segments(c) * c.dims.get("b", 1) * heads * c.k * wide
        return Cost(forward={"all_gather": (1, sent * (c.k + c.v)), **final}, backward={"all_gather": (1, sent * c.v)})

    return declared


ORDINARY = values("normal", "ties")
DRAW = {
    **dict.fromkeys(("query", "key", "value", "initial_state"), ORDINARY),
    "g": values("normal", "zeros"),
    "beta": values("uniform"),
}
SIZES = {"hk": (2,), "h": ("2*hk", "hk"), "k": (3,), "v": (2,), "t": (24,)}
DECLARED = dict(
    contract=gated_delta_rule,
    mesh={"cp": (1, 2, 3, 4), "tp": (1, 2)},
    rank_options={"chunk_size": (64, 1, 3, 4)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("t", "k"),
    sums="float32",
)


@scheme(
    reference=rows,
    inputs=inputs("t/cp:dual_chunk_swap"),
    outputs=outputs("t/cp:dual_chunk_swap"),
    dims={**SIZES, "h": "2*hk", "b": (2,)},
    draw={**DRAW, "key": values("uniform")},
    cost=cost(lambda c: 2),
    **DECLARED,
)
def delta_rule(mesh, query, key, value, g, beta, initial_state, chunk_size):
    return over_cp(mesh, query, key, value, g, beta, initial_state, chunk_size=chunk_size)


@scheme(
    reference=normalized_rows,
    inputs=inputs("t/cp"),
    outputs=outputs("t/cp"),
    dims={**SIZES, "h": "hk", "b": (2,), "t": (12,)},
    draw=DRAW,
    cost=cost(lambda c: 1),
    **DECLARED,
)
def delta_rule_contiguous(mesh, query, key, value, g, beta, initial_state, chunk_size):
    options = {"layout": "contiguous", "use_qk_l2norm": True, "chunk_size": chunk_size}
    return over_cp(mesh, query, key, value, g, beta, initial_state, **options)


@scheme(
    reference=stream,
    inputs={**inputs("t/cp:packed", "1", "n"), "cu": "q"},
    outputs=outputs("t/cp:packed", "1", "n"),
    dims={**SIZES, "h": "2*hk", "q": (4,), "n": "q-1"},
    draw={**DRAW, "cu": offsets("t", padded=True)},
    cost=cost(lambda c: 2 * c.n, lambda c: c.n),
    **DECLARED,
)
def delta_rule_packed(mesh, query, key, value, g, beta, initial_state, cu, chunk_size):
    options = {"cu_seqlens": cu, "use_qk_l2norm": True, "chunk_size": chunk_size}
    return over_cp(mesh, query, key, value, g, beta, initial_state, **options)


@scheme(
    reference=stream,
    inputs={**inputs("t/cp", "1", "n"), "cu": "q"},
    outputs=outputs("t/cp", "1", "n"),
    dims={**SIZES, "h": "2*hk", "q": (4,), "n": "q-1"},
    draw={**DRAW, "cu": offsets("t", padded=True)},
    cost=cost(lambda c: 1, lambda c: c.n),
    **DECLARED,
)
def delta_rule_stream(mesh, query, key, value, g, beta, initial_state, cu, chunk_size):
    options = {"layout": "contiguous", "cu_seqlens": cu, "use_qk_l2norm": True, "chunk_size": chunk_size}
    return over_cp(mesh, query, key, value, g, beta, initial_state, **options)


@scheme(
    reference=normalized_rows,
    inputs=inputs("t/cp:uneven"),
    outputs=outputs("t/cp:uneven"),
    layouts={"uneven": uneven},
    dims={**SIZES, "h": "hk", "b": (2,), "t": (TOKENS,)},
    draw=DRAW,
    cost=cost(lambda c: 1),
    **DECLARED,
)
def delta_rule_ragged(mesh, query, key, value, g, beta, initial_state, chunk_size):
    """Ranks of which some have fewer tokens than a chunk, or none."""
    options = {"layout": uneven_layout(mesh), "use_qk_l2norm": True, "chunk_size": chunk_size}
    return over_cp(mesh, query, key, value, g, beta, initial_state, **options)


@scheme(
    reference=normalized_rows,
    inputs=inputs("t/cp:dual_chunk_swap", decay=" k"),
    outputs=outputs("t/cp:dual_chunk_swap"),
    dims={**SIZES, "h": "2*hk", "b": (2,)},
    draw=DRAW,
    cost=cost(lambda c: 2),
    **DECLARED,
)
def delta_rule_per_channel(mesh, query, key, value, g, beta, initial_state, chunk_size):
    return over_cp(mesh, query, key, value, g, beta, initial_state, use_qk_l2norm=True, chunk_size=chunk_size)
