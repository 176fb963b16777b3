"""Ranks compile while tensors are in flight: a rank that waits for the compiler's lock lets the others run."""

import pytest
import torch
import torch.distributed._functional_collectives as functional

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run


def case(world, schedule=0):
    return CaseSpec("compiles", {"tp": world}, schedule=schedule)


def compile_anew(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager")


def compile_with_an_unfinished_input(mesh, case):
    """The compiler waits for its input while it holds its lock, as it would on a rank with its own processor."""
    on_its_way = functional.all_reduce(torch.full((3,), mesh.rank("tp") + 1.0), "sum", mesh["tp"])
    return compile_anew(lambda x: 2 * x)(on_its_way).sum().item()


def compile_at_different_times(mesh, case):
    """Rank 0 compiles before the collective, the others after it."""
    x = torch.full((3,), mesh.rank("tp") + 1.0)
    if mesh.rank("tp") == 0:
        x = compile_anew(lambda x: 1 * x)(x)
    total = functional.all_reduce(x, "sum", mesh["tp"])
    return compile_anew(lambda x: 2 * x)(total).sum().item()


@pytest.mark.slow
@pytest.mark.timeout(100)  # the engine would report a deadlock only after ten minutes
@pytest.mark.parametrize("function", [compile_with_an_unfinished_input, compile_at_different_times])
@pytest.mark.parametrize("schedule", range(3))
def test_a_rank_that_compiles_lets_the_others_run(function, schedule):
    assert run(function, case(3, schedule)).results == (36.0,) * 3


@pytest.mark.slow
def test_the_lock_is_torchs_own_afterwards():
    from torch._dynamo import convert_frame

    before, compile_of_torch = convert_frame.compile_lock, torch.compile
    run(compile_at_different_times, case(2))
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
