"""The lockstep engine itself: repeatable, isolated, and leaves the process unchanged."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from parity_tests import warm_python
from shardproof.declare.case import CaseSpec
from shardproof.engines import failure
from shardproof.engines.engines import run
from shardproof.engines.lockstep import lockstep


def case(world: int, **more: Any) -> CaseSpec:
    return CaseSpec("lockstep", {"tp": world}, **more)


def chatter(mesh: Any, case: CaseSpec) -> list[float]:
    """Random numbers, messages, an all_reduce and waits, whose order the schedule can change."""
    group, rank, size = mesh["tp"], mesh.rank("tp"), mesh.size("tp")
    draws = []
    for step in range(5):
        x = torch.rand(3)
        draws.append(x[0].item())
        works = [dist.isend(x.clone(), group_dst=(rank + 1) % size, group=group)]
        works.append(dist.irecv(torch.empty(3), group_src=(rank - 1) % size, group=group))
        dist.all_reduce(x, group=group)
        for work in works[:: 1 if step % 2 else -1]:
            work.wait()
    return draws


def polls(mesh: Any, case: CaseSpec) -> None:
    rank, size = mesh.rank("tp"), mesh.size("tp")
    if rank == 1 or case.seed:  # else the others wait
        work = dist.irecv(torch.empty(3), group_src=(rank + 1) % size, group=mesh["tp"])
        while work is not None and not work.is_completed():
            pass
    dist.barrier(group=mesh["tp"])


@pytest.mark.parametrize("all_poll", [False, True])
def test_polling_is_no_progress(all_poll):
    started = time.monotonic()
    with pytest.raises(failure.Stalled, match=r"reached no collective for 0\.5 s; last recv"):
        lockstep.run(polls, case(2, seed=int(all_poll)), quiet_s=0.5)
    assert time.monotonic() - started < 3


def loops(mesh: Any, case: CaseSpec) -> None:
    while mesh.rank("tp") == 1:
        pass
    dist.barrier(group=mesh["tp"])


def test_an_interrupt_leaves_no_rank_behind():
    """In a notebook the process goes on after an interrupt."""
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        lockstep.run(loops, case(2))
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("lockstep-rank-1") and _is_in(loops, thread) for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lockstep.run(chatter, case(2)).results == lockstep.run(chatter, case(2)).results


def _is_in(function: Callable[..., Any], thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


# Repeatable.


@pytest.mark.parametrize("world", (1, 2, 4))
@pytest.mark.parametrize("schedule", (0, 1, 17))
def test_the_same_case_gives_the_same_ledger_twice(world, schedule):
    first, second = (lockstep.run(chatter, case(world, schedule=schedule)) for _ in range(2))
    assert first.ledger.rows == second.ledger.rows
    assert first.results == second.results


def test_a_schedule_chooses_the_order():
    orders = {tuple(row.rank for row in lockstep.run(chatter, case(4, schedule=s)).ledger.rows) for s in range(8)}
    assert len(orders) == 8


def test_round_robin_starts_with_rank_zero_and_goes_up():
    def body(mesh: Any, case: CaseSpec) -> None:
        dist.barrier(group=mesh["tp"])

    assert [row.rank for row in lockstep.run(body, case(4)).ledger.rows] == [0, 1, 2, 3]


def test_rows_are_numbered_in_each_group():
    def body(mesh: Any, case: CaseSpec) -> None:
        half = dist.new_group([0, 1], group_desc="half")
        for group in (mesh["tp"], half, mesh["tp"]):
            dist.all_reduce(torch.ones(2), group=group)

    rows = lockstep.run(body, case(2)).ledger.of(0)
    assert [(row.group_name, row.seq) for row in rows] == [("tp", 0), ("half", 0), ("tp", 1)]


def test_a_view_without_elements_is_sent():
    """Its storage has memory all the same."""

    def body(mesh: Any, case: CaseSpec) -> None:
        peer, group = 1 - mesh.rank("tp"), mesh["tp"]
        works = [dist.isend(torch.ones(2, 3)[:, 3:], group_dst=peer, group=group)]
        works.append(dist.irecv(torch.ones(2, 3)[:, 3:], group_src=peer, group=group))
        for work in works:
            work.wait()

    assert {row.op for row in lockstep.run(body, case(2)).ledger.rows} == {"send", "recv"}


# Isolated.


@pytest.mark.parametrize("schedule", (0, 5))
def test_each_rank_has_its_own_random_stream(schedule):
    by_rank = lockstep.run(chatter, case(4, seed=100, schedule=schedule)).results
    for rank, draws in enumerate(by_rank):
        stream = torch.Generator().manual_seed(100 + rank)
        assert draws == [torch.rand(3, generator=stream)[0].item() for _ in range(5)]


def test_the_callers_stream_does_not_move():
    before = torch.get_rng_state()
    lockstep.run(chatter, case(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_grad_mode_and_autocast_are_separate_for_each_rank():
    def body(mesh: Any, case: CaseSpec) -> tuple[bool, bool, bool]:
        begins = torch.is_grad_enabled()
        first = mesh.rank("tp") == 0
        with torch.set_grad_enabled(not first), torch.autocast("cpu", enabled=first):
            dist.barrier(group=mesh["tp"])
            inside = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        torch.set_grad_enabled(False)
        return (begins, *inside)

    for _ in range(2):  # the next example does not find this one's leftovers
        assert lockstep.run(body, case(2)).results == ((True, False, True), (True, True, False))
    assert torch.is_grad_enabled()


def test_a_named_backend_still_gives_a_lockstep_group():
    """A library may name gloo beside NCCL; gloo's constructor would wait for ranks that have no turn."""

    def body(mesh: Any, case: CaseSpec) -> float:
        group = dist.new_group([0, 1, 2, 3], backend="gloo")
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=group)
        return x.item()

    assert lockstep.run(body, CaseSpec("lockstep", {"tp": 4}), quiet_s=5.0).results == (6.0,) * 4


def test_groups_created_by_an_example_are_gone_in_the_next():
    def body(mesh: Any, case: CaseSpec) -> tuple[str, int]:
        group = dist.new_group([0, 1])
        other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        dist.all_reduce(torch.ones(1), group=other.get_group("b"))
        name = group.group_name
        dist.destroy_process_group(group)
        return name, len(c10d._world.pg_map)

    assert len({lockstep.run(body, case(2)).results for _ in range(3)}) == 1


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_axes_that_an_example_flattened_are_there_in_the_next(engine):
    def body(mesh: Any, case: CaseSpec) -> float:
        both = mesh.device_mesh["dp", "tp"]._flatten("both")
        x = torch.ones(1)
        dist.all_reduce(x, group=both.get_group())
        return x.item()

    spec = CaseSpec(scheme="flattened", mesh={"dp": 2, "tp": 2})
    assert [run(body, spec, engine).results for _ in range(3)] == [(4.0,) * 4] * 3


def test_a_destroyed_world_is_back_in_the_next_example():
    def body(mesh: Any, case: CaseSpec) -> bool:
        dist.all_reduce(torch.ones(1), group=mesh["tp"])
        dist.destroy_process_group()
        return dist.is_initialized()

    assert [lockstep.run(body, case(2)).results for _ in range(2)] == [(False, False)] * 2


def test_the_process_is_as_before():
    def state() -> tuple:
        return sys.excepthook, c10d._world, c10d._backend, dict(dist.Backend._plugins), dist.is_initialized()

    before = state()
    lockstep.run(chatter, case(3))
    assert state() == before
    with pytest.raises(failure.Raised):
        lockstep.run(lambda mesh, case: 1 / 0, case(3))
    assert state() == before


def in_a_stage(mesh: Any, case: CaseSpec) -> None:
    try:
        raise KeyError("no such weight")
    except KeyError as error:  # as PipelineStage does
        raise RuntimeError("[Stage 1] failed to run forward:") from error


def test_a_stages_own_exception_is_reported():
    with pytest.raises(failure.Raised, match=r"^raised: rank 0 raised KeyError: 'no such weight'") as caught:
        lockstep.run(in_a_stage, case(1))
    assert repr(caught.value.__cause__) == "KeyError('no such weight')" and "failed to run" not in str(caught.value)


def test_two_runs_at_once_are_rejected():
    with pytest.raises(failure.Raised) as caught:
        lockstep.run(lambda mesh, _: lockstep.run(chatter, case(2)), case(2))
    message = "lockstep.run: another run is going on in this process; use engine='gloo'"
    assert str(caught.value.__cause__) == message


def test_a_verdict_that_a_rank_raises_is_raised_unchanged():
    def body(mesh: Any, case: CaseSpec) -> None:
        if mesh.rank("tp") == 1:
            raise failure.Modified("input 'x' was changed", rank=1)
        dist.barrier(group=mesh["tp"])

    with pytest.raises(failure.Modified) as caught:
        lockstep.run(body, case(2))
    assert caught.value.args == ("input 'x' was changed",)
    assert caught.value.others[0].startswith("rank 0 waits in barrier")


# Threads.


def ident(mesh: Any, case: CaseSpec) -> int:
    return threading.get_native_id()


def test_threads_are_reused_between_examples_and_new_after_a_failure():
    first = lockstep.run(ident, case(2)).results
    assert lockstep.run(ident, case(2)).results == first
    with pytest.raises(failure.Raised):
        lockstep.run(lambda mesh, case: 1 / 0, case(2))
    assert not set(first) & set(lockstep.run(ident, case(2)).results)


def test_meshes_of_different_sessions_are_never_equal():
    """DTensor keeps caches for the full process, keyed by mesh."""
    meshes = set()
    for _ in range(5):
        meshes |= set(lockstep.run(lambda mesh, case: mesh.device_mesh, case(2)).results)
        with pytest.raises(failure.Raised):
            lockstep.run(lambda mesh, case: 1 / 0, case(2))
    assert len(meshes) == 10


def test_failures_leave_no_threads_behind():
    lockstep.run(ident, case(4))
    before = threading.active_count()
    for rank in (0, 1, 2, 3) * 3:  # the others have finished, wait for it, or not begun
        with pytest.raises(failure.Raised):
            lockstep.run(lambda mesh, case, rank=rank: 1 / (mesh.rank("tp") - rank), case(4))
        lockstep.run(ident, case(4))
    assert threading.active_count() <= before


@pytest.mark.slow
def test_many_meshes_do_not_keep_their_threads():
    for mesh in [{"a": a, "b": b} for a in (1, 2, 3, 4) for b in (1, 2, 3, 4, 5)] * 2:
        outcome = lockstep.run(lambda mesh, case: (mesh.rank("a"), mesh.rank("b")), CaseSpec("many", mesh))
        assert outcome.results == tuple((a, b) for a in range(mesh["a"]) for b in range(mesh["b"]))
    ranks = [thread for thread in threading.enumerate() if thread.name.startswith("lockstep-rank")]
    assert len(ranks) <= 16 * 20


@pytest.mark.slow
def test_overhead_of_an_example(capsys):
    """At most 10 times its ranks' computation, run one after the other without collectives.

    This corresponds to the 250, 150 and 80 examples a second of docs/benchmarks.md, at world 2, 4 and 8, on two cores
    of that page's machine; a limit in seconds would depend on the machine more than on lockstep.
    """
    for world in (2, 4, 8):
        alone = partial(toy_logprob, Alone(world), case(world), lambda x, *_: x)
        lockstep.run(toy_logprob, case(world))
        ratio = min(
            seconds_for_20_calls(lambda world=world: lockstep.run(toy_logprob, case(world)))
            / seconds_for_20_calls(lambda alone=alone, world=world: [alone() for _ in range(world)])
            for _ in range(5)  # other work runs beside
        )
        with capsys.disabled():
            print(f"\nlockstep, world {world}: {ratio:.1f} times the arithmetic of its ranks (at most 10)", end="")
        assert ratio <= 10


def seconds_for_20_calls(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    for _ in range(20):
        function()
    return time.perf_counter() - started


@dataclass
class Alone:
    """Rank 0 of a mesh, without its other ranks."""

    world: int

    def __getitem__(self, axis: str) -> None:
        return None

    def rank(self, axis: str) -> int:
        return 0

    def size(self, axis: str) -> int:
        return self.world


def over_group(x: torch.Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    dist.all_reduce(x, op, group=group)
    return x


def toy_logprob(mesh: Any, case: CaseSpec, reduced: Callable[..., torch.Tensor] = over_group) -> Any:
    """Forward and backward of log-probabilities over a sharded vocabulary: three all_reduces."""
    group, rank, width = mesh["tp"], mesh.rank("tp"), 16 // mesh.size("tp")
    logits = torch.randn(2, 3, width, requires_grad=True)
    local = torch.arange(6).reshape(2, 3) - rank * width
    mine = (local >= 0) & (local < width)
    top = reduced(logits.detach().amax(-1), group, dist.ReduceOp.MAX)
    weights = (logits - top[..., None]).exp()
    total = Summed.apply(weights.sum(-1), group, reduced)
    picked = logits.gather(-1, local.clamp(0, width - 1)[..., None])[..., 0] * mine
    out = Summed.apply(picked, group, reduced) - top - total.log()
    (grad,) = torch.autograd.grad(out, logits, torch.ones_like(out))
    return grad.numpy()


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, reduced: Callable[..., torch.Tensor]) -> torch.Tensor:
        return reduced(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad, None, None


def leaves(mesh: Any, case: CaseSpec) -> None:
    if mesh.rank("tp") == 1:
        os._exit(0)


def forks(mesh: Any, case: CaseSpec) -> int:
    child = os.fork() if mesh.rank("tp") == 0 else None
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 7


def run_in_new_process(job: str) -> subprocess.CompletedProcess[str]:
    """Run a job in a new process: it would end this one silently, and a process that has started JAX must not fork."""
    program = f"from {__name__} import *; print(run({job}, case(2)).results, os._exit)"
    return warm_python.run("-c", program, imported=warm_python.TORCH)


def test_a_rank_that_ends_its_process_is_a_failed_rank():
    completed = run_in_new_process("leaves")
    assert completed.returncode == 1
    assert "rank 1 raised SystemExit: os._exit(0), which ends a rank's process" in completed.stderr


def test_a_process_that_a_rank_forks_may_leave():
    assert run_in_new_process("forks").stdout == f"(7, 7) {os._exit}\n"
