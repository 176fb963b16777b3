"""The first weights: every parameter of both models, the same for every mesh."""

import numpy as np
import pytest
import torch

from jax_ref.models import Config
from shardproof import CaseSpec
from shardproof.engines.engines import run
from shardproof.training.by_name import flax_model
from shardproof.training.initial import initial_weights
from shardproof.training.run import Run
from torch_impl.models import HybridConfig, HybridLM, Placement


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_initial_values_match_the_model(is_tied):
    config = Run(mesh={}, is_tied=is_tied).config

    def body(mesh, case):
        model = HybridLM(HybridConfig(**config), Placement(mesh["cp"], mesh["cp"]), dtype=torch.float64)
        return {name: tuple(x.shape) for name, x in model.named_parameters()}

    (shapes,) = run(body, CaseSpec(scheme="initial", mesh={"cp": 1})).results
    weights = initial_weights(config, 0)
    assert {name: x.shape for name, x in weights.items()} == shapes
    assert flax_model(Config(**config), weights) is not None


def test_they_are_all_different_and_follow_the_seed():
    config = Run(mesh={}).config
    one, same, other = (initial_weights(config, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in one)
    assert all(len(np.unique(x)) == x.size for name, x in one.items() if x.size < 500)
    assert all(np.array_equal(x, x.astype(np.float32)) for x in one.values())
