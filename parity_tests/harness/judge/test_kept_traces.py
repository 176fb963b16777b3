"""A reference is judged as it is now: a notebook's cell, or a reload, changes what it uses under the same object."""

import importlib
import types
from functools import partial

import jax
import numpy as np
import pytest

from shardproof import check, scheme, values
from shardproof.judge import kept_traces, reference

CELL = """
import jax.numpy as jnp
FACTOR = 2.0
WEIGHTS = [1.0, 1.0]
def scaled(x):
    return FACTOR * x
def rooted(x):
    return jnp.sqrt(x)
class Layer:
    gain = 1.0
    def __call__(self, x):
        return self.gain * x
layer = Layer()
def function(x):
    return layer(scaled(x)) * WEIGHTS[0]
"""
CHANGES = [
    "FACTOR = 3.0",
    "def scaled(x):\n    return 3.0 * x",
    "scaled.__code__ = (lambda x: 3.0 * x).__code__",
    "WEIGHTS[0] = 1.5",
    "layer.gain = 1.5",
    "layer = Layer(); layer.gain = 1.5",
    "function.__code__ = (lambda x: 3.0 * x).__code__",
]


@pytest.fixture
def notebook(monkeypatch):
    """The namespace of a notebook."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(__import__("sys").modules, "__main__", main)
    exec(CELL, vars(main))
    return vars(main)


def doubled(mesh, x):
    return 2.0 * x


def declared(function):
    return scheme(
        reference=function, mesh={"tp": (2,)}, inputs={"x": "b/tp"}, outputs="b/tp", draw={"x": values("normal")},
        dtypes=("float32",), dims={"b": (4,)},
    )(doubled)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_below_a_reference_is_noticed(notebook, change):
    before = kept_traces._state(notebook["function"])
    assert before is not None and before == kept_traces._state(notebook["function"])
    exec(change, notebook)
    assert kept_traces._state(notebook["function"]) != before


@pytest.mark.slow
def test_a_change_below_a_reference_changes_the_verdict(notebook):
    twice = declared(notebook["function"])
    assert twice.verify(examples=1).ok and twice.verify(examples=1).ok
    notebook["FACTOR"] = 3.0
    assert twice.verify(examples=1).verdict == "mismatch"


def test_check_notices_it_too(notebook):
    twice = declared(notebook["function"])
    assert check(twice.case()).ok
    notebook["FACTOR"] = 3.0
    with pytest.raises(AssertionError):
        check(twice.case())


def test_an_unchanged_reference_is_traced_once(notebook):
    twice = declared(notebook["function"])
    twice.verify(examples=1)
    before = reference.CLOCK.count
    notebook["of_another_cell"] = 1
    twice.verify(examples=1)
    assert reference.CLOCK.count == before


def test_a_reference_that_cannot_be_pickled_is_traced_again():
    array, lock = jax.numpy.ones(4), __import__("threading").Lock()

    def with_a_lock(x):
        with lock:
            return 2.0 * x * array.astype(x.dtype)

    twice = declared(with_a_lock)
    counts = []
    for _ in range(2):
        before = reference.CLOCK.count
        assert twice.verify(examples=1).ok
        counts.append(reference.CLOCK.count - before)
    assert counts == [1, 1]


def test_arrays_are_part_of_a_references_state():
    table = np.ones(4)

    def tabled(x):
        return 2.0 * x * table

    state = kept_traces._state(tabled)
    assert state == kept_traces._state(tabled)
    table[0] = 2.0
    assert state != kept_traces._state(tabled)


def test_a_change_below_a_partial_is_noticed(tmp_path, monkeypatch):
    """A partial has no module of its own."""
    (tmp_path / "numbers_of_a_user.py").write_text("FACTOR = 2.0\ndef times(scale, x): return scale * FACTOR * x")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("numbers_of_a_user")
    function = partial(module.times, 1.0)
    before = kept_traces._state(function)
    assert before is not None and before == kept_traces._state(function)
    module.FACTOR = 3.0
    assert kept_traces._state(function) != before
