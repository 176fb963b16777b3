"""No rank pays for an import that it does not need: of JAX, whose threads do not fork, or of SymPy."""

import pickle
import subprocess
import sys

import pytest

from shardproof.declare.discover import built_in
from shardproof.declare.travel import dumps
from shardproof.engines.program import Program

ARRIVE = """
import pickle, sys

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoJax())
for key, function in pickle.load(sys.stdin.buffer).items():
    try:
        pickle.loads(function)
    except ModuleNotFoundError as missing:
        print(key, "imports", missing)
"""


def arriving(functions: dict[str, bytes]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ARRIVE], input=pickle.dumps(functions), capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.slow
def test_no_scheme_brings_jax_to_its_ranks():
    assert arriving({scheme.key: dumps(Program.of(scheme)) for scheme in built_in()}) == ""


def test_one_that_does_is_named():
    import jax.numpy as jnp

    def both(mesh, x):
        return jnp.tanh(x)

    assert arriving({"both": dumps(both)}) == "both imports jax\n"


def test_a_backward_needs_no_sympy():
    program = """
import sys, torch
from shardproof.engines.calling import total_with
x = torch.ones(3, requires_grad=True)
(gradient,) = torch.autograd.grad(total_with([torch.arange(3.0)], [2 * x]), x)
assert gradient.tolist() == [0, 2, 4]
print("sympy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
