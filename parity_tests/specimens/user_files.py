"""Files as a user would write them, right and wrong, for the tests of the command."""

import importlib.util
from pathlib import Path

HEAD = """
import jax.numpy as jnp
from shardproof import scheme, token_below, values

def double(x):
    return 2.0 * x

def declare(function, **changes):
    return scheme(**{
        "reference": double, "mesh": {"tp": (1, 2)}, "inputs": {"x": "b/tp"}, "outputs": "b/tp",
        "draw": {"x": values("normal")}, **changes})(function)
"""
RIGHT = """
def right(mesh, x):
    return x * 2
declare(right)
"""
WRONG = """
def wrong(mesh, x):
    return x * 3
declare(wrong)
"""
# Wrong on tp=2. Its number has a meaning, so that no edit of the line is searched for, which takes a second and more.
TIMES_RANKS = """
def wrong(mesh, x):
    return x * 2 * mesh.size("tp")
declare(wrong)
"""
RAISING = """
def raising(mesh, x):
    raise RuntimeError("no such thing")
declare(raising)
"""
SCALED = """
def scaled(mesh, x, scale):
    return x * scale
declare(scaled, reference=lambda x, scale: x * scale, options={"scale": (1.0, 2.0)}, dims={"b": (4, 8)})
"""


# Of schemes whose failures need no second opinion: gloo's processes take seconds to start.
LOCKSTEP = {"engines": ("lockstep",)}


def written(name, *parts, **of_all):
    """The name of a file of these parts; keywords are of every scheme that `declare` declares in it."""
    Path(name).write_text(HEAD.replace(", **changes}", f", **{of_all}, **changes}}") + "".join(parts))
    return name


def module_of(file, text):
    """A module of this text, in a file of its own."""
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
