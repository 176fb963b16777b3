"""A step of Muon of mixtures of experts under ep, tp and FSDP: every weight is the reference's, within 1e-10."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from jax_ref import optimizers as reference
from parity_tests.parallelizer.expert_families import MAX_NORM, MUON, OF_MUON, alone, mixture, muon, on_rank
from parity_tests.parallelizer.training import broken_steps, deviation, full_arrays
from shardproof import CaseSpec
from shardproof.engines.engines import run
from shardproof.judge import bridge
from shardproof.judge.reference import evaluated

OF_ADAMW = ("model.embed_tokens.weight", "lm_head.weight")
MESHES = [
    {"ep": 2},
    {"ep": 2, "tp": 2},
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 2, "tp": 2},
]
OTHERS = [
    ("qwen3_moe", {"ep": 4}),
    ("deepseek_v3", {"dp_replicate": 2, "ep": 2}),
    ("mixtral", {"dp_shard": 2, "ep": 2, "tp": 2}),
    ("qwen3_moe", {"cp": 2, "ep": 2}),
]


def rows_of(name, shape):
    """Gate and up stand one above the other in a stack."""
    return (shape[-2] // 2,) * 2 if name.endswith("gate_up_proj") else None


@cache
def stepped(family):
    """The step of one process: Muon's weights where Muon steps, else AdamW's."""
    bridge.start()  # the reference in float64
    want, before = alone(family), full_arrays(mixture(family))
    weights = dict(want.weights)
    for name, gradient in want.clipped.items():
        if gradient.ndim > 1 and name not in OF_ADAMW:
            weights[name] = np.asarray(_muon(before[name], gradient, rows_of(name, gradient.shape)))
    return replace(want, weights=weights)


def _muon(weight, gradient, rows):
    step = evaluated(lambda w, g: reference.muon(w, g, 0.0 * g, rows=rows, **MUON)[0])
    return step(weight, gradient)


def on_mesh(mesh, family, engine="lockstep"):
    body = lambda view, case: on_rank(view, family, muon)  # noqa: E731
    return run(body, CaseSpec("experts", mesh, dtype="float64"), engine).results


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("family", OF_MUON)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_one_step_matches_one_process(family, mesh):
    assert broken_steps(stepped(family), mesh, on_mesh(mesh, family)) == []
    assert alone(family).norm > MAX_NORM


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), OTHERS, ids=str)
def test_one_step_on_other_meshes(family, mesh):
    assert broken_steps(stepped(family), mesh, on_mesh(mesh, family)) == []


@pytest.mark.slow
def test_one_step_on_processes():
    mesh = {"ep": 2, "tp": 2}
    assert broken_steps(stepped("qwen3_moe"), mesh, on_mesh(mesh, "qwen3_moe", "gloo")) == []


@pytest.mark.parametrize("family", OF_MUON)
def test_matrices_are_stepped_otherwise_than_by_adamw(family):
    """Muon moves every matrix of an expert, a router and an attention otherwise than AdamW, and no other weight."""
    with_muon, with_adamw = stepped(family).weights, alone(family).weights
    for name, weight in with_muon.items():
        is_matrix = weight.ndim > 1 and name not in OF_ADAMW
        assert (deviation(weight, with_adamw[name]) > 1e-4) is is_matrix, name
