"""Parity of the simulation with pipelining.closed_forms: idle time and live chunks of every rank, as arrays."""

import jax.numpy as jnp
import torch
from hypothesis import given, settings
from jaxtyping import Int
from torch import Tensor

from jax_ref.pipelining import closed_forms
from parity_tests import check, every_case, scheme, token_below
from torch_impl.pipelining import Times, schedule_order, simulate, stage_to_rank
from torch_impl.pipelining.rules import RULES

RANKS = 4  # the most; what is compared has one column for each
EXACT = closed_forms.FILL_AND_DRAIN
TIMES = ((1, 1, 1), (2, 3, 5))
# (name, p, n, v, times); the last three schedules are in closed form for equal times alone
SIZES = tuple(
    (name, p, rounds * p, RULES[name].stages or 2, times)
    for name in RULES
    for p, rounds in ((2, 2), (4, 2), (3, 3))
    for times in (TIMES if name in EXACT else TIMES[:1])
)


def row(of_ranks):
    return [*of_ranks, *[0] * (RANKS - len(of_ranks))]


def by_formula(ids):
    """Idle time of every rank, then live chunks, where these are in closed form."""
    idle = [row([closed_forms.idle(name, p, n, v, *times)] * p) for name, p, n, v, times in SIZES]
    live = [
        row([closed_forms.live_chunks(name, p, n, v, rank) for rank in range(p)] if name in EXACT else [])
        for name, p, n, v, _ in SIZES
    ]
    return jnp.asarray([*idle, *live], ids.dtype) + 0 * ids


@scheme(
    reference=by_formula,
    mesh={"pp": (1, 2, 4)},
    inputs={"ids": "k r/pp"},
    outputs="k r/pp",
    dims={"k": (2 * len(SIZES),), "r": (RANKS,)},
    draw={"ids": token_below("r")},
)
def cost_of_schedules(mesh, ids) -> Int[Tensor, "k r/pp"]:
    """Each rank fills in its own columns."""
    runs = [
        simulate(schedule_order(name, p, n, v), stage_to_rank(p, p * v, RULES[name].style), Times(*times))
        for name, p, n, v, times in SIZES
    ]
    found = [row(run.idle) for run in runs]
    found += [row(run.peak_live if name in EXACT else []) for run, (name, *_) in zip(runs, SIZES, strict=True)]
    return torch.tensor(found, dtype=ids.dtype, device=ids.device)[:, mesh.global_ids("r")]


@settings(max_examples=3)
@given(every_case(cost_of_schedules))
def test_parity(case):
    check(case)
