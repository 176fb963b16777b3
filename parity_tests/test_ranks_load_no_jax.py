"""No scheme's function brings JAX to a rank: a rank would pay for its import, and threads of JAX do not fork."""

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
