"""A rank is waited for while torch.compile or Triton compiles, but not while compiled code runs."""

import time
import types

import pytest
import torch.distributed as dist

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.failure import Stalled

CASE, QUIET_S = CaseSpec("compiling", {"tp": 2}), 0.5
SOURCE = """
def compile_for(seconds, sleep):
    sleep(seconds)

def _bench(seconds, sleep):
    sleep(seconds)

def run_compiled(function):
    function()
"""


def compiler(file):
    """Three functions that seem to be defined in a compiler's file."""
    scope = {}
    exec(compile(SOURCE, f"/site-packages/{file}", "exec"), scope)
    return [types.FunctionType(scope[name].__code__, {}) for name in ("compile_for", "_bench", "run_compiled")]


COMPILE_FOR, _, RUN_COMPILED = compiler("torch/_inductor/of_this_test.py")
_, TUNE_FOR, LAUNCH = compiler("triton/runtime/autotuner.py")


def compiles(mesh, case):
    if mesh.rank("tp") == 1:
        COMPILE_FOR(3 * QUIET_S, time.sleep)
    dist.barrier(group=mesh["tp"])
    return True


def tunes_a_kernel(mesh, case):
    if mesh.rank("tp") == 1:
        TUNE_FOR(3 * QUIET_S, time.sleep)
    dist.barrier(group=mesh["tp"])
    return True


def compiles_and_computes(mesh, case):
    if mesh.rank("tp") == 1:
        COMPILE_FOR(2.5 * QUIET_S, time.sleep)
        time.sleep(QUIET_S / 2)
    dist.barrier(group=mesh["tp"])
    return True


def runs_compiled_code(mesh, case):
    def hangs():
        time.sleep(5 * QUIET_S)

    if mesh.rank("tp") == 1:
        RUN_COMPILED(hangs)
    dist.barrier(group=mesh["tp"])


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("function", [compiles, tunes_a_kernel, compiles_and_computes])
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_a_compilation_is_waited_for(engine, function):
    assert run(function, CASE, engine, quiet_s=QUIET_S).results == (True, True)


def launches_a_tuned_kernel(mesh, case):
    if mesh.rank("tp") == 1:
        LAUNCH(lambda: time.sleep(5 * QUIET_S))
    dist.barrier(group=mesh["tp"])


@pytest.mark.slow
@pytest.mark.parametrize("function", [runs_compiled_code, launches_a_tuned_kernel])
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_compiled_code_that_hangs_is_stalled(engine, function):
    with pytest.raises(Stalled):
        run(function, CASE, engine, quiet_s=QUIET_S)
