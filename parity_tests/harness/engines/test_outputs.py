"""Results, output and exceptions of a rank that could break the engines."""

import contextlib
import io
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from jaxtyping import Int
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardproof import integers, scheme
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


def returning(function, **how):
    return scheme(**{
        "reference": lambda x: 2.0 * x, "mesh": {"tp": (2,)}, "inputs": {"x": "n/tp"}, "outputs": "n/tp",
        "nograd": ("x",), "dtypes": ("float32",), **how,
    })(function)  # fmt: skip


def test_complex_numbers_are_no_integers():
    """Complex numbers without an imaginary part compare equal to integers."""

    def counted(mesh, n: Int[torch.Tensor, "n"]) -> Int[torch.Tensor, "n"]:
        return (2 * n).to(torch.complex64)

    declared = returning(
        counted, inputs={"n": "n/tp"}, reference=lambda n: 2 * n, draw={"n": integers(0, 9)}, nograd=()
    )
    text = " ".join(str(declared.verify(n=4, examples=1)).split())
    assert "rank 0 returned torch.complex64 for 'out'; return its torch.view_as_real" in text


def test_a_tensor_whose_storage_ends_before_it_is_rejected():
    def freed(mesh, x):
        y = 2 * x
        y.untyped_storage().resize_(4)
        return y

    text = str(returning(freed).verify(n=4))
    assert "rank 0 returned 'out', which needs 8 bytes of a storage that has 4: it was freed or resized" in text


ROWS, FEATURES = "n/tp", "n tp=I"


@pytest.mark.parametrize(
    ("placement", "outputs", "sentence"),
    [
        (Shard(0), ROWS, None),
        (Replicate(), FEATURES, None),
        (Replicate(), ROWS, "is Replicate() over tp; 'n/tp' says Shard(0)"),
        (Partial(), ROWS, "is Partial(sum) over tp; 'n/tp' says Shard(0)"),
        (Shard(0), FEATURES, "is Shard(dim=0) over tp; 'n tp=I' says Replicate()"),
        (Partial(), FEATURES, "is Partial(sum) over tp; 'n tp=I' says Replicate()"),
    ],
)
def test_placements_that_contradict_the_spec_are_rejected(placement, outputs, sentence):
    def placed(mesh, x):
        return DTensor.from_local(2 * x, mesh.device_mesh, [placement])

    inputs = {"x": ROWS if outputs == ROWS else "n tp=R"}
    report = returning(placed, inputs=inputs, outputs=outputs).verify(n=4, examples=1)
    assert report.ok == (sentence is None)
    assert sentence is None or f"rank 0 returned a DTensor for 'out' that {sentence}" in str(report)


def starts_a_thread(mesh, case):
    if mesh.rank("tp") == 1:
        thread = threading.Thread(target=lambda: {}["no such weight"])
        thread.start()
        thread.join()
    dist.barrier(group=mesh["tp"])


@ENGINES
def test_an_exception_in_a_thread_of_a_rank_is_reported_for_the_rank(engine):
    with pytest.raises(Raised, match=r"rank 1 raised KeyError: 'no such weight'"):
        run(starts_a_thread, CASE, engine)


def gathers_in_a_thread(mesh, case):
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3), group=mesh["tp"]))
    thread.start()
    thread.join()


def test_a_collective_in_a_thread_of_a_rank_is_in_the_ledger():
    rows = run(gathers_in_a_thread, CASE, "gloo").ledger.rows
    assert [(row.rank, row.op) for row in rows] == [(0, "all_reduce"), (1, "all_reduce")]
    assert all(row.source.startswith("test_outputs.py:") for row in rows)
    with pytest.raises(Raised, match=r"lockstep cannot run this: there a rank is one thread"):
        run(gathers_in_a_thread, CASE, "lockstep")


class Stop(BaseException):
    """Like some exceptions of asyncio and pytest, it does not derive from Exception."""


def stops_in_a_thread(mesh, case):
    def stops():
        raise Stop

    if mesh.rank("tp") == 1:
        thread = threading.Thread(target=stops)
        thread.start()
        thread.join()
    dist.barrier(group=mesh["tp"])


@ENGINES
def test_a_base_exception_in_a_thread_of_a_rank_is_reported(engine):
    with pytest.raises(Raised, match=r"rank 1 raised .*Stop"):
        run(stops_in_a_thread, CASE, engine)
