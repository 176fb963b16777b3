"""The bridge to JAX: own copies, every dtype kept, nothing narrowed."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.harness.judge import bridge


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


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int32", "bool"])
def test_dtypes_survive(dtype):
    array = np.array([0, 1, 3]).astype(dtype)
    assert bridge.to_jax("x", array).dtype == dtype
    assert bridge.to_jax("x", torch.from_numpy(array)).dtype == dtype
    assert np.array_equal(bridge.to_jax("x", array), array)


def test_bits_survive():
    array = np.array([0.1, 1 / 3, 1e-310, -0.0, np.inf, -np.inf, np.nan])
    back = bridge.from_jax("x", bridge.to_jax("x", array))
    assert back.tobytes() == array.tobytes()
    large = np.array([2**62 + 1])
    assert bridge.from_jax("x", bridge.to_jax("x", large)).tolist() == [2**62 + 1]


def test_jax_has_its_own_copy():
    tensor = torch.ones(1000, dtype=torch.float64)
    array = np.ones(1000)
    moved = bridge.to_jax("x", tensor), bridge.to_jax("x", array)
    tensor.fill_(7.0)
    array[:] = 7.0
    assert [float(copy.max()) for copy in moved] == [1.0, 1.0]


def test_results_are_writable_copies():
    source = jnp.ones(5)
    back = bridge.from_jax("x", source)
    back[:] = 3.0
    assert float(source.max()) == 1.0


def test_awkward_tensors():
    base = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    for tensor in (base.t(), base[::2, 1::2], base[:, :1].expand(4, 5), base.clone().requires_grad_(), base[2, 3]):
        moved = bridge.to_jax("x", tensor)
        assert moved.shape == tuple(tensor.shape)
        assert np.array_equal(moved, tensor.detach().numpy())
    assert bridge.to_jax("x", torch.zeros(0, 3, dtype=torch.float64)).shape == (0, 3)


def test_bfloat16_must_be_widened_first():
    """NumPy has no bfloat16: whoever bridges one widens it first; the message says so."""
    with pytest.raises(TypeError) as caught:
        bridge.to_jax("x", torch.ones(3, dtype=torch.bfloat16))
    assert str(caught.value) == "bridge: 'x' is torch.bfloat16, which NumPy lacks; widen it to float64 first"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_narrow_float_is_rejected_on_the_way_back(dtype):
    with pytest.raises(TypeError) as caught:
        bridge.from_jax("output 'y'", jnp.ones(3, dtype=dtype))
    assert str(caught.value) == (
        f"bridge: output 'y' came out as {dtype} for float64 inputs; drop the cast in the reference, "
        "which states the mathematics in float64"
    )


@pytest.mark.parametrize("thing", [1.0, np.ones(3), [1.0]])
def test_only_jax_arrays_are_accepted(thing):
    with pytest.raises(TypeError) as caught:
        bridge.from_jax("output 'y'", thing)
    name = type(thing).__name__
    assert str(caught.value) == f"bridge: output 'y' is {name}; the reference must return JAX arrays"


NARROW = """
import jax, numpy as np
from parity_tests.harness.judge import bridge
for array in (np.ones(3), np.arange(3)):
    try:
        bridge.to_jax("logits", array)
    except TypeError as error:
        print(error)
bridge.start()
print(bridge.to_jax("logits", np.ones(3)).dtype)
"""


PLATFORMS = """
import sys
import jax
if sys.argv[1:]:
    jax.config.update("jax_platforms", sys.argv[1])
from parity_tests.harness.judge import bridge
print(bridge.start().config.jax_platforms)
"""


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


def test_with_x64_off_nothing_passes():
    environment = {**os.environ, "JAX_ENABLE_X64": "0", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", NARROW], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "bridge: 'logits' went in as float64 and came out as float32; jax_enable_x64 is off",
        "bridge: 'logits' went in as int64 and came out as int32; jax_enable_x64 is off",
        "float64",
    ]
