"""Ranks that compile while tensors are in flight: none keeps its turn at the compiler's lock."""

import pytest
import torch
import torch.distributed._functional_collectives as functional

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run


def case(world, schedule=0):
    return CaseSpec("compiles", {"tp": world}, schedule=schedule)


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager")


def of_an_unfinished_tensor(mesh, case):
    """The compiler waits for its input, inside of its lock; on a processor of its own a rank would do so too."""
    on_its_way = functional.all_reduce(torch.full((3,), mesh.rank("tp") + 1.0), "sum", mesh["tp"])
    return compiled(lambda x: 2 * x)(on_its_way).sum().item()


def of_different_places(mesh, case):
    """Rank 0 compiles before the collective, the others after it."""
    x = torch.full((3,), mesh.rank("tp") + 1.0)
    if mesh.rank("tp") == 0:
        x = compiled(lambda x: 1 * x)(x)
    total = functional.all_reduce(x, "sum", mesh["tp"])
    return compiled(lambda x: 2 * x)(total).sum().item()


@pytest.mark.slow
@pytest.mark.timeout(100)  # it would end as stalled after ten minutes
@pytest.mark.parametrize("function", [of_an_unfinished_tensor, of_different_places])
@pytest.mark.parametrize("schedule", range(3))
def test_a_rank_that_compiles_lets_the_others_run(function, schedule):
    assert run(function, case(3, schedule)).results == (36.0,) * 3


@pytest.mark.slow
def test_the_lock_is_torchs_own_afterwards():
    from torch._dynamo import convert_frame

    before, compile_of_torch = convert_frame.compile_lock, torch.compile
    run(of_different_places, case(2))
    assert convert_frame.compile_lock is before and torch.compile is compile_of_torch
    assert before.acquire(blocking=False)
    before.release()


def test_a_compiler_error_frees_the_lock():
    def broken(mesh, case):
        return torch.compile(lambda x: 2 * x, backend=lambda graph, inputs: 1 / 0)(torch.ones(2))

    from torch._dynamo import convert_frame

    with pytest.raises(Exception, match="division by zero"):
        run(broken, case(2))
    assert convert_frame.compile_lock.acquire(blocking=False)
    convert_frame.compile_lock.release()
