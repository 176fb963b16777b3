"""A verdict is computed by functions that no file of schemes has replaced."""

import builtins
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from parity_tests.specimens.small_scheme import declared
from shardproof.judge import own_functions


def wrong(mesh, x):
    np.abs = lambda values, *_, **__: np.zeros_like(values)
    return x * 3


def test_a_function_that_makes_every_error_0_gives_no_verdict(monkeypatch):
    monkeypatch.setattr(np, "abs", np.abs)  # restored after the test
    scheme = declared(wrong, inputs={"x": "b/tp"})
    with pytest.raises(ValueError, match=r"numpy\.abs has been replaced, and verdicts are computed with it"):
        scheme.verify(examples=1, tp=2)


@pytest.mark.parametrize(
    ("module", "name"), [(np.linalg, "norm"), (math, "isfinite"), (jnp, "where"), (builtins, "all")]
)
def test_a_replaced_function_is_named(module, name, monkeypatch):
    monkeypatch.setattr(module, name, lambda *_, **__: True)
    with pytest.raises(ValueError, match=rf"{module.__name__}\.{name} has been replaced"):
        own_functions.check()


# With this answer, every error is within the allowance for underflow.
ANSWERS = {"equal": True, "finfo": SimpleNamespace(eps=1e30, tiny=1e30, smallest_normal=1e30, max=1e30)}


@pytest.mark.parametrize(("owner", "name"), own_functions.OF_TORCH)
def test_a_replaced_function_of_torch_gives_no_verdict(owner, name, monkeypatch):
    """These functions make the arrays that are compared: the reference's inputs and the ranks' results would be 0."""
    before = getattr(owner, name)
    monkeypatch.setattr(
        owner, name, lambda *given, **how: ANSWERS[name] if name in ANSWERS else 0 * before(*given, **how)
    )
    scheme = declared(lambda mesh, x: x * 3, inputs={"x": "b/tp"})
    with pytest.raises(ValueError, match=rf"torch\.(Tensor\.)?{name} has been replaced"):
        scheme.verify(examples=1, tp=2)


def test_a_function_that_is_only_added_replaces_none(monkeypatch):
    monkeypatch.setattr(np, "float", float, raising=False)  # as in files for a numpy before 1.24
    own_functions.check()
