"""The bridge to JAX: how JAX is set up, and which references may broadcast."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from shardproof.judge import bridge


@pytest.fixture(autouse=True, scope="module")
def started():
    bridge.start()


def test_jax_is_set_up_for_a_reference():
    assert jax.config.jax_enable_x64
    assert jax.config.jax_numpy_rank_promotion == "raise"
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert jax.devices()[0].platform == "cpu"
    with pytest.raises(ValueError, match="rank"):
        jnp.ones((2, 3)) + jnp.ones(3)


def biased(x, b):
    return x + b


@pytest.mark.parametrize("module", ["jax_ref.norms", "parity_tests.judge.test_bridge", "my_project.reference", None])
def test_this_projects_references_must_not_broadcast(module):
    biased.__module__ = module
    if module is not None and module.startswith(("jax_ref", "parity_tests")):
        with pytest.raises(ValueError, match="rank"):
            bridge.call_reference(biased, x=jnp.ones((2, 3)), b=jnp.ones(3))
    else:
        assert bridge.call_reference(biased, x=jnp.ones((2, 3)), b=jnp.ones(3)).shape == (2, 3)
    assert jax.config.jax_numpy_rank_promotion == "raise"


PLATFORMS = """
import sys
import jax
if sys.argv[1:]:
    jax.config.update("jax_platforms", sys.argv[1])
from shardproof.judge import bridge
print(bridge.start().config.jax_platforms)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "configured", "expected"),
    [({}, [], "cpu"), ({"JAX_PLATFORMS": "cuda"}, [], "cuda"), ({}, ["cuda"], "cuda")],
)
def test_jax_runs_on_the_cpu_unless_the_user_says_otherwise(environment, configured, expected):
    """Also if it was imported before: where JAX finds a GPU it would take most of its memory."""
    environment = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"} | environment
    command = [sys.executable, "-c", PLATFORMS, *configured]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == expected
