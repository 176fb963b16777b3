"""Parity of min-p beside top-k, top-p and temperature."""

import math

import numpy as np
import pytest
import torch

from jax_ref.vocab_parallel import sampled_logprob
from parity_tests.parity import parity
from parity_tests.vocab_parallel.decided_rows import decided_rows
from parity_tests.vocab_parallel.ignored_rows import IGNORED_TARGETS, SOME_IGNORED
from parity_tests.vocab_parallel.shard import owned_range, wants_no_gradient
from parity_tests.vocab_parallel.test_sampling import filter_cost
from shardproof import Cost, scheme
from shardproof.declare.draws import FLOAT_KINDS
from torch_impl import vocab_parallel as vp
from torch_impl.vocab_parallel.filter_bounds import min_p_floor


def cost(c):
    """The cost of the other filters; where no list is sent, one more number for each token, its largest logit."""
    base = filter_cost(c, known_range=True)
    if c.mesh["tp"] == 1 or c.top_k is not None:
        return base
    calls, size = base.forward["all_gather"]
    more = c.b * c.s * c.accumulator_itemsize
    return Cost(forward={**base.forward, "all_gather": (calls + 1, size + more)})


# ln of these is just above -2 and -3. A whole logit that lies 2 T or 3 T below the largest is dropped, and is kept if
# the bound is first rounded to 16 bits.
JUST_BELOW = (0.1354, 0.0498)


@scheme(
    reference=sampled_logprob,
    mesh={"tp": (1, 2, 3, 4)},
    contract=vp.DistributedLogprobWithSampling,
    inputs={"logits": "b s v/tp:ragged", "target": "b s"},
    draw={"logits": decided_rows(*FLOAT_KINDS, "ties", "iota", nan_rows=IGNORED_TARGETS), "target": SOME_IGNORED},
    nan_cotangents={"out": IGNORED_TARGETS},
    dims={"b": (1, 2), "s": (3,), "v": (2, 7, 24)},
    options={
        "top_k": (None, 5),
        "top_p": (1.0, 0.9),
        "temperature": (1.0, 2.0, 0.5),
        "min_p": (*JUST_BELOW, 0.2, 1.0),
    },
    dtypes=("float32", "float64", "bfloat16", "float16"),
    reduction=("v",),
    sums="float32",
    roundings=2,  # log total, gradient
    cost=cost,
)
def logprob_with_min_p(mesh, logits, target, top_k, top_p, temperature, min_p):
    return vp.DistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, wants_no_gradient(), temperature, *owned_range(mesh), min_p
    )


@scheme(
    reference=sampled_logprob,
    mesh={"tp": (1, 2)},
    contract=vp.DistributedLogprobWithSampling,
    inputs={"logits": "b s v/tp:ragged", "target": "b s"},
    draw={"logits": decided_rows(nan_rows=IGNORED_TARGETS), "target": SOME_IGNORED},
    nan_cotangents={"out": IGNORED_TARGETS},
    dims={"b": (1,), "s": (2,), "v": (1030, 2100)},
    options={"top_k": (1025, 1028), "top_p": (1.0, 0.9), "temperature": (1.0, 8.0), "min_p": (0.01, 1e-9)},
    reduction=("v",),
    sums="float32",
    roundings=2,
)
def logprob_with_min_p_and_long_top_k(mesh, logits, target, top_k, top_p, temperature, min_p):
    return vp.DistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, wants_no_gradient(), temperature, *owned_range(mesh), min_p
    )


SCHEMES = (logprob_with_min_p, logprob_with_min_p_and_long_top_k)
test_parity = parity(SCHEMES, lockstep=15, gloo=5)


def test_the_next_token_routes_take_it_from_their_params():
    """Two equal logits are kept of four: each has one half."""
    logits = torch.tensor([0.0, 0.0, -3.0, -9.0]).expand(1, 2, 4)
    params = vp.TrainingSamplingParams(min_p=0.1)
    ids_of = [torch.tensor([[0, token]]) for token in range(4)]
    scores = [vp.get_next_token_logprobs_from_logits(each, logits, sampling_params=params).item() for each in ids_of]
    half = math.log(0.5)
    np.testing.assert_array_equal(np.float32(scores), np.float32([half, half, -math.inf, -math.inf]))


@pytest.mark.parametrize("largest", [0.0, 1.5, 1000.0, 30000.0, -7e6, math.inf])
def test_the_floor_is_rounded_up(largest):
    """No float32 below the exact bound passes, however coarse floats are at the largest logit."""
    row_max = torch.tensor([largest])
    floor = min_p_floor(row_max, 0.7, 0.05).double().item()
    exact = largest + 0.7 * math.log(0.05)
    assert exact <= floor
    below = torch.nextafter(torch.tensor(floor, dtype=torch.float32), torch.tensor(-math.inf)).double().item()
    assert below < exact or math.isinf(largest)


@pytest.mark.parametrize(("wrong", "error"), [(1.5, ValueError), (-0.1, ValueError), ("0.1", TypeError)])
def test_a_value_that_is_no_share_is_rejected(wrong, error):
    with pytest.raises(error) as caught:
        vp.TrainingSamplingParams(min_p=wrong)
    must = "must be a number" if error is TypeError else "must lie in [0, 1]"
    assert str(caught.value) == f"vocab_parallel.TrainingSamplingParams: min_p={wrong!r} {must} (0.0 turns it off)"
