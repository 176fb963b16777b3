"""The mixtures with stored intermediates give the values and gradients of the plain mixtures, on a mesh."""

import jax
import numpy as np
import pytest

from jax_ref.expert_parallel import mixture, mixture_with_biases
from parity_tests.expert_parallel import stored_mixture

MESH = {"ep": 2, "tp": 3}
TOKENS, EXPERTS, COLUMNS, HIDDEN, LIMIT = 5, 6, 4, 6, 0.7
# Each operation in the sums of a number may add an error of half a unit in the last place of the greatest number.
ERROR = TOKENS * EXPERTS * COLUMNS * HIDDEN * np.finfo(np.float64).eps / 2


def arrays():
    rng = np.random.default_rng(0)
    experts = rng.permuted(np.tile(np.arange(EXPERTS), (TOKENS, 1)), axis=1)[:, :3]
    experts[0] = -1
    shapes = {"x": (TOKENS, COLUMNS), "gates": experts.shape, "gate_up": (EXPERTS, COLUMNS, 2, HIDDEN)}
    shapes |= {"down": (EXPERTS, HIDDEN, COLUMNS), "up_bias": (EXPERTS, HIDDEN, 2), "down_bias": (EXPERTS, COLUMNS)}
    return experts, {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def check_same(function, reference, floats):
    """Compare the values, and the gradients of their sum of squares."""

    def both(f):
        return jax.jit(lambda x: (f(x), jax.grad(lambda x: (f(x) ** 2).sum())(x)))

    with jax.enable_x64(True):
        for got, want in zip(*(jax.tree.leaves(both(f)(floats)) for f in (function, reference)), strict=True):
            assert np.abs(got - want).max() <= ERROR * np.abs(want).max()


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_the_stored_mixture_equals_the_mixture(exchange):
    stored = getattr(stored_mixture, f"by_{exchange}")
    experts, floats = arrays()
    floats = {name: floats[name] for name in ("x", "gates", "gate_up", "down")}
    check_same(lambda x: stored(**x, experts=experts, mesh=MESH), lambda x: mixture(**x, experts=experts), floats)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_the_stored_mixture_equals_the_mixture_with_biases(exchange):
    stored = getattr(stored_mixture, f"pairs_by_{exchange}")
    experts, floats = arrays()

    def by_columns(x):
        tensors = x["x"], x["gates"], experts, x["gate_up"].swapaxes(2, 3).reshape(EXPERTS, COLUMNS, -1), x["down"]
        return stored(*tensors, x["up_bias"].reshape(EXPERTS, -1), x["down_bias"], LIMIT, MESH)

    def by_pairs(x):
        tensors = x["x"], x["gates"], experts, x["gate_up"].swapaxes(2, 3), x["down"]
        return mixture_with_biases(*tensors, x["up_bias"], x["down_bias"], LIMIT)

    check_same(by_columns, by_pairs, floats)
