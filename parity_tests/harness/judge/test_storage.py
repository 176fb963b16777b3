"""Stored intermediates: the reference rounds them as the function does, and a rounding more is a mismatch."""

import jax
import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from jax_ref.stored import stored
from shardproof import scheme, values, verify
from shardproof.judge.storage import storage_of


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_nearest_number_is_torchs(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(4000) * 10.0 ** rng.uniform(-8, 4, 4000)
    x = np.concatenate([x, [0.0, -0.0, np.inf, -np.inf, np.nan, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-24, 2.0**-25]])
    want = torch.tensor(x).to(getattr(torch, dtype)).double().numpy()
    assert np.array_equal(storage_of(dtype).nearest(np, x), want, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_dtype_of_sums_is_not_stored_in(dtype):
    assert storage_of(dtype) is None


def test_an_error_before_is_absorbed_or_is_a_whole_step():
    """1 + 2^-10 rounds to 1 with any error up to 2^-12; 1 + 2^-8 lies in the middle of 1 and 1 + 2^-7."""
    x, tangent = np.array([1 + 2.0**-10, 1 + 2.0**-8]), np.full((8, 2), 2.0**-15)
    value, left = storage_of("bfloat16").rounded(np, x, tangent, np.ones((8, 2)))
    assert value.tolist() == [1.0, 1.0]
    assert (left[:, 0] == 0.0).all() and ((left[:, 1] >= 2.0**-7) & (left[:, 1] <= 2.01 * 2.0**-7)).all()


def test_a_tie_is_never_certain():
    """Torch rounds it to even, but in an embedding_bag on a CPU away from zero; errors before it may cancel."""
    x = np.array([196.5, 196.0, np.inf])
    value, left = storage_of("bfloat16").rounded(np, x, np.zeros((8, 3)), np.ones((8, 3)))
    assert value.tolist() == [196.0, 196.0, np.inf]
    assert (left[:, 0] >= 1.0).all() and (left[:, 1:] == 0.0).all()


def test_two_steps_never_cancel_in_all_directions():
    """With equal steps, two of opposite signs left no error, and a right sum was a mismatch."""
    x, tangent = np.full(2, 1 + 2.0**-8), np.full((8, 2), 2.0**-20)
    _, left = storage_of("bfloat16").rounded(np, x, tangent, np.tile([1.0, -1.0], (8, 1)))
    assert np.sqrt((left.sum(1) ** 2).mean()) > 2.0**-9


def gated(x, a, b):
    """A hidden layer that is stored, and a product of it."""
    return stored(jax.nn.silu(x @ a)) @ b


def unmarked(x, a, b):
    return jax.nn.silu(x @ a) @ b


def in_float32(x, a, b):
    hidden = silu(x.float() @ a.float()).to(x.dtype)
    return (hidden.float() @ b.float()).to(x.dtype)


def with_one_rounding_more(x, a, b):
    hidden = silu((x.float() @ a.float()).to(x.dtype))
    return (hidden.float() @ b.float()).to(x.dtype)


def declared(function, reference, **more):
    return scheme(
        reference=reference,
        mesh={"dp": (1, 2)},
        inputs={"x": "t/dp d", "a": "d f dp=R", "b": "f d dp=R"},
        outputs="t/dp d",
        draw=dict.fromkeys("xab", values("normal", "zeros", "ties")),
        dtypes=("float32", "bfloat16", "float16"),
        reduction=("d", "f"),
        **more,
    )(lambda mesh, x, a, b: function(x, a, b))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("seed", range(3))
def test_stored_intermediates_keep_the_promise(seed):
    assert verify(declared(in_float32, gated, sums="float32"), seed=seed).ok


@pytest.mark.fast_values(1)
@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("seed", range(3))
def test_a_rounding_more_breaks_it(seed, tmp_path):
    broken = declared(with_one_rounding_more, gated, sums="float32")
    assert verify(broken, seed=seed, replay_folder=str(tmp_path)).verdict == "mismatch"


def test_a_budget_of_two_roundings_hides_it():
    assert verify(declared(with_one_rounding_more, unmarked, roundings=2)).ok


@pytest.mark.usefixtures("unexplained")
def test_without_a_mark_nothing_may_be_stored(tmp_path):
    assert verify(declared(in_float32, unmarked, sums="float32"), replay_folder=str(tmp_path)).verdict == "mismatch"


def in_a_loop(x):
    return jax.lax.scan(lambda total, row: (total, stored(row)), 0.0, x)[1]


def in_a_branch(x):
    return jax.lax.cond(x.sum() > 0, lambda x: jax.jit(stored)(x), lambda x: x, x)


@pytest.mark.parametrize(("reference", "name"), [(in_a_loop, "scan"), (in_a_branch, "cond")])
def test_a_mark_that_would_round_nothing_is_rejected(reference, name):
    marked = scheme(
        reference=reference, mesh={"tp": (1,)}, inputs={"x": "b v"}, outputs="b v", draw={"x": values("normal")},
        dtypes=("bfloat16",), sums="float32",
    )(lambda mesh, x: x.clone())  # fmt: skip
    with pytest.raises(Exception, match=rf"stored\(\) inside {name} would round nothing"):
        verify(marked, examples=2)
