"""Parity of vocab_parallel.linear_logprob."""

import pytest
from hypothesis import given, settings

from jax_ref.vocab_parallel.linear_logprob import linear_logprob, linear_next_token_logprob
from parity_tests import Cost, check, every_case, ids, scheme, values
from parity_tests.vocab_parallel.shard import owned_range
from torch_impl import vocab_parallel as vp

FLOATS = values("normal", "zeros", "ones", "iota", "ties", "tiny")
DECLARED = dict(
    draw={"hidden": FLOATS, "weight": FLOATS, "target": ids("v", ignore=-100)},
    rank_options={"chunk_size": (None, 1, 2, 5)},
    dtypes=("float32", "float64", "bfloat16"),
    reduction=("v", "d"),
    roundings=4,  # logits, d logits, this rank's term of d hidden, the result
)
SHIFTED = dict(mesh={"tp": (1, 2, 3, 4)}, outputs="b s tp=I", reference=linear_logprob, **DECLARED)
NEXT = dict(
    mesh={"cp": (1, 2), "tp": (1, 2, 4)},
    outputs="b u tp=I cp=R",
    reference=linear_next_token_logprob,
    dims={"u": "s-1"},
    **DECLARED,
)


def replicated_cost(c, over_cp=False):
    """Three numbers per token over tp, d hidden back; over cp the scores there and the cotangents back."""
    cp, size = c.mesh.get("cp", 1), c.accumulator_itemsize
    n = c.b * c.s // cp
    return Cost(
        forward={"all_gather": (1 + over_cp, (3 + over_cp) * n * size)},
        backward={
            "all_reduce": (1, n * c.d * size),
            **({"reduce_scatter": (1, c.b * c.s * size)} if over_cp else {}),
        },
    )


def sequence_parallel_cost(c, over_cp=False):
    """The hidden states in both directions, and d hidden scattered."""
    whole = replicated_cost(c, over_cp)
    if c.tp == 1:
        return whole
    n, gathered = c.b * c.s // c.mesh.get("cp", 1) * c.d, whole.forward["all_gather"]
    shard = n // c.tp * c.itemsize
    further = whole.backward.get("reduce_scatter", (0, 0))
    return Cost(
        forward={"all_gather": (gathered[0] + 1, gathered[1] + shard)},
        backward={
            "all_gather": (1, shard),
            "reduce_scatter": (further[0] + 1, further[1] + n * c.accumulator_itemsize),
        },
    )


def scored(mesh, hidden, weight, target, chunk_size):
    return vp.ChunkedDistributedHiddenStatesToLogprobs.apply(
        hidden, target, weight, *owned_range(mesh), chunk_size, mesh["tp"]
    )


def next_scored(mesh, hidden, weight, target, chunk_size, tied=False, **further):
    weights = (None, weight) if tied else (weight, None)
    return vp.from_parallel_hidden_states_to_logprobs(
        hidden,
        *weights,
        False,
        target,
        *owned_range(mesh),
        mesh["tp"],
        cp_group=mesh["cp"],
        chunk_size=chunk_size,
        **further,
    )


@scheme(inputs={"hidden": "s b d tp=I", "weight": "v/tp:ragged d", "target": "b s"}, cost=replicated_cost, **SHIFTED)
def linear_logprobs(mesh, hidden, weight, target, chunk_size):
    return scored(mesh, hidden, weight, target, chunk_size)


@scheme(
    inputs={"hidden": "s/tp b d", "weight": "v/tp:ragged d", "target": "b s"}, cost=sequence_parallel_cost, **SHIFTED
)
def linear_logprobs_of_cut_states(mesh, hidden, weight, target, chunk_size):
    return scored(mesh, hidden, weight, target, chunk_size)


@scheme(
    inputs={"hidden": "s/cp:dual_chunk_swap b d tp=I", "weight": "v/tp:ragged d cp=R", "target": "b s"},
    cost=lambda c: replicated_cost(c, over_cp=True),
    **NEXT,
)
def linear_next_tokens(mesh, hidden, weight, target, chunk_size):
    return next_scored(mesh, hidden, weight, target, chunk_size)


@scheme(
    inputs={"hidden": "s/cp:dual_chunk_swap/tp b d", "weight": "v/tp:ragged d cp=R", "target": "b s"},
    cost=lambda c: sequence_parallel_cost(c, over_cp=True),
    **NEXT,
)
def linear_next_tokens_of_cut_states(mesh, hidden, weight, target, chunk_size):
    return next_scored(mesh, hidden, weight, target, chunk_size, tied=True)


SCHEMES = (linear_logprobs, linear_logprobs_of_cut_states, linear_next_tokens, linear_next_tokens_of_cut_states)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared, engine):
    @settings(max_examples=20 if engine == "lockstep" else 4)
    @given(every_case(declared, engine=engine))
    def example(case):
        check(case)

    example()
