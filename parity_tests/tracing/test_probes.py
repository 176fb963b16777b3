"""Probes: the rounding errors of a dtype, and a weight as the dtype stores it."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shardproof.judge import bridge
from shardproof.judge.reference import UNIT_ROUNDOFF
from shardproof.tracing.probes import BITS, POOL, Probes, draws


def probes(dtype, unit):
    bridge.start()
    return Probes(dtype, unit, jnp.asarray(draws(dtype, (POOL,), 0)))


X = np.random.default_rng(0).standard_normal(500)
WHOLE = np.arange(1.0, 100.0)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_weight_of_a_wide_dtype_is_read_with_an_error_of_one_unit(dtype):
    assert set(draws(dtype, (100,), 0)) == {-1.0, 1.0}
    read = probes(dtype, 1 / 64).read(jnp.asarray(WHOLE, float))
    assert set(np.abs(np.asarray(read) / WHOLE - 1)) == {1 / 64}  # exact: both are sums of few powers of two


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_dtype_draws_errors_within_a_unit_and_reads_rounded_weights(dtype):
    errors = draws(dtype, (POOL,), 0)
    assert np.abs(errors).max() <= 1.0 and len(np.unique(errors)) == POOL
    read = probes(dtype, 1 / 64).read(jnp.asarray(X, float))
    assert np.array_equal(np.asarray(read), torch.tensor(X).to(getattr(torch, dtype)).double().numpy())


@pytest.mark.parametrize("dtype", BITS)
def test_a_unit_of_zero_changes_no_value(dtype):
    assert np.array_equal(np.asarray(probes(dtype, 0.0).rounded(jnp.asarray(X, float))), X)
    assert set(BITS) == set(UNIT_ROUNDOFF) and 2.0 ** -(BITS[dtype][1] + 1) == UNIT_ROUNDOFF[dtype]


@pytest.mark.slow
def test_no_two_arrays_have_the_same_errors():
    through = probes("bfloat16", 1 / 64)
    first, second = through.rounded(jnp.ones(7, float)), through.rounded(jnp.ones(7, float))
    assert not np.array_equal(np.asarray(first), np.asarray(second))


def test_probes_move_a_stored_bfloat16_by_at_most_its_rounding():
    """A number is moved at most half way to its neighbour in the dtype, and some are moved nearly as far."""
    stored = torch.tensor(X).bfloat16()
    moved = np.asarray(
        probes("bfloat16", UNIT_ROUNDOFF["bfloat16"]).rounded(jnp.asarray(stored.double().numpy(), float))
    )
    ulp = torch.nextafter(stored, torch.full_like(stored, torch.inf) * stored.sign()).double() - stored.double()
    share = np.abs(moved - stored.double().numpy()) / (ulp.abs().numpy() / 2)
    assert 0.9 < share.max() <= 1.0
