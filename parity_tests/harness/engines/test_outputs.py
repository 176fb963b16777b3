"""Results, output and exceptions of a rank that could break the engines."""

import contextlib
import io
import sys

import pytest
import torch.distributed as dist

from shardproof import scheme
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.failure import Raised

CASE = CaseSpec("outputs", {"tp": 2})
ENGINES = pytest.mark.parametrize("engine", ["lockstep", "gloo"])


class Unprintable(ValueError):
    """An exception without a message."""

    def __str__(self):
        raise KeyError("no such field")


def raises_unprintable(mesh, case):
    if mesh.rank("tp") == 1:
        raise Unprintable
    dist.barrier(group=mesh["tp"])


@ENGINES
def test_an_exception_whose_message_raises_is_reported(engine):
    with pytest.raises(Raised, match=r"rank 1 raised .*Unprintable"):
        run(raises_unprintable, CASE, engine)


def redirects(mesh, case):
    with contextlib.redirect_stdout(io.StringIO()):
        dist.barrier(group=mesh["tp"])  # another rank enters its own block here


def replaces(mesh, case):
    sys.stdout = io.StringIO()


@pytest.mark.parametrize("function", [redirects, replaces])
def test_the_output_is_restored_after_a_run(function):
    before = sys.stdout
    run(function, CASE, "lockstep")
    assert sys.stdout is before


@pytest.mark.parametrize("kind", ["of layout torch.sparse_coo", "on meta"])
def test_a_tensor_without_dense_values_is_rejected(kind):
    def unreadable(mesh, x):
        return x.to("meta") if kind == "on meta" else x.to_sparse()

    declared = scheme(
        reference=lambda x: x, mesh={"tp": (2,)}, inputs={"x": "n/tp"}, outputs="n/tp", nograd=("x",),
        dtypes=("float32",),
    )(unreadable)  # fmt: skip
    text = str(declared.verify(n=4))
    assert f"rank 0 returned a tensor {kind} for 'out'; return a dense one" in text
