"""The persistent pool: its results, its state between runs, and its speed at the start."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parity_tests.slow import slow_but
from parity_tests.specimens.small_scheme import declared
from shardproof import verification
from shardproof.declare.case import CaseSpec
from shardproof.engines.failure import NotRun, Raised, RankFailure
from shardproof.engines.processes import forks, pool
from shardproof.engines.processes import rank as rank_process
from shardproof.engines.processes.recorder import FUNCTIONAL, IN_PLACE, MISSING, SILENT

HOT_START_S = 0.5
LARGE = ("torch_impl.optimizers.muon", "transformers.models.llama.modeling_llama")
LOADED = 2.0  # other work on the machine may slow these tests by this factor


def case(world: int, **more: Any) -> CaseSpec:
    return CaseSpec("pool", {"tp": world}, **more)


def total(mesh: Any, case: CaseSpec) -> float:
    x = torch.full((3,), float(mesh.rank("tp")))
    dist.all_reduce(x, group=mesh["tp"])
    return x[0].item()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_results_and_ledger(world: int) -> None:
    ranks = pool.run(total, case(world))
    assert ranks.results == (world * (world - 1) / 2,) * world
    assert [row.rank for row in ranks.ledger.rows] == list(range(world))
    assert {row.group for row in ranks.ledger.rows} == {tuple(range(world))}
    assert 0 < ranks.seconds < HOT_START_S * LOADED


def test_hot_start_at_world_8() -> None:
    pool.run(total, case(8))
    pool._pools[8, "gloo"].kill()
    start = time.monotonic()
    pool.run(total, case(8))
    assert time.monotonic() - start < HOT_START_S * LOADED


def find_new_modules(mesh: Any, case: CaseSpec) -> list[str]:
    x, before = torch.ones(2, requires_grad=True), set(sys.modules)
    torch.autograd.grad(x * x, x, torch.ones(2))
    return sorted(set(sys.modules) - before)


def test_the_first_backward_of_a_rank_imports_nothing() -> None:
    """Torch imports SymPy when a cotangent is given. That takes a third of a second, so the server imports it first."""
    assert pool.run(find_new_modules, case(2)).results == ([], [])


def has_modules(mesh: Any, case: CaseSpec) -> list[bool]:
    return [name in sys.modules for name in LARGE]


def test_ranks_are_forked_with_the_parents_large_packages() -> None:
    """The server keeps a single thread, because a fork of several would lose the others."""
    for name in LARGE:
        importlib.import_module(name)
    pool.renew(1)
    assert pool.run(has_modules, case(1)).results == ([True, True],)
    assert len(list(Path(f"/proc/{pool.pids()[0]}/task").iterdir())) == 1


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def processor_seconds(pids: list[int]) -> float:
    times = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
    return sum(int(ticks) for each in times for ticks in each) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_an_idle_pool_takes_no_processor_time_and_runs_again() -> None:
    def with_groups(mesh: Any, case: CaseSpec) -> float:
        return total(mesh, case) + sum(dist.new_group([0, 1]).size() for _ in range(10))

    assert pool.run(with_groups, case(2)).results == (21.0, 21.0)
    ranks = pool._pools[2, "gloo"].pids
    deadline = time.monotonic() + 20 * pool.IDLE_S * LOADED
    while not all(map(is_stopped, ranks)) and time.monotonic() < deadline:
        time.sleep(pool.IDLE_S / 4)
    before = processor_seconds(ranks)
    time.sleep(1.0)
    assert processor_seconds(ranks) == before
    assert pool.run(total, case(2)).results == (1.0, 1.0) and pool._pools[2, "gloo"].pids == ranks


KEPT: dict[str, Any] = {}


def test_a_kept_group_serves_the_next_case() -> None:
    def keeping(mesh: Any, case: CaseSpec) -> tuple[float, float, int]:
        if not KEPT:
            KEPT["group"] = dist.new_group([0, 1])
            KEPT["mesh"] = init_device_mesh("cpu", (2,), mesh_dim_names=("mine",))
        dist.new_group([0, 1])  # unused groups hold sockets, and are gone before the next case
        x, y = torch.ones(1), torch.ones(1)
        dist.all_reduce(x, group=KEPT["group"])
        dist.all_reduce(y, group=KEPT["mesh"].get_group())
        return x.item(), y.item(), len(dist.distributed_c10d._world.pg_map)

    pool.renew(2)
    first, second, third = (pool.run(keeping, case(2)).results for _ in range(3))
    assert first == second == third and first[0][:2] == (2.0, 2.0)


def test_a_mesh_has_one_group_per_axis() -> None:
    def both(mesh: Any, case: CaseSpec) -> list[float]:
        x, y = torch.ones(1) * dist.get_rank(), torch.ones(1) * dist.get_rank()
        dist.all_reduce(x, group=mesh["dp"])
        dist.all_reduce(y, group=mesh["tp"])
        return [x.item(), y.item()]

    ranks = pool.run(both, CaseSpec("pool", {"dp": 2, "tp": 2}))
    assert ranks.results == ([2, 1], [4, 1], [2, 5], [4, 5])
    assert [(row.group_name, row.group) for row in ranks.ledger.of(1)] == [("dp", (1, 3)), ("tp", (0, 1))]


@pytest.mark.slow
def test_a_rank_has_one_thread_for_torch_and_no_jax() -> None:
    def inside(mesh: Any, case: CaseSpec) -> tuple:
        return "jax" in sys.modules, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    pool.close()  # new ranks, without modules from other tests
    assert pool.run(inside, case(2)).results == ((False, 1, "1"),) * 2
    assert len(list(Path(f"/proc/{pool.pids()[0]}/task").iterdir())) == 1


def test_only_the_loopback_device_is_listened_on() -> None:
    def listening(mesh: Any, case: CaseSpec) -> list[str]:
        total(mesh, case)
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        lines = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        ]
        return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes]

    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    results = pool.run(listening, case(2)).results
    assert all(results)
    assert {address for addresses in results for address in addresses} == {loopback}


def test_a_function_travels_once() -> None:
    def counts(mesh: Any, case: CaseSpec, calls: list = []) -> int:  # noqa: B006  a rank keeps it between runs
        calls.append(1)
        return len(calls)

    assert [pool.run(counts, case(2)).results for _ in range(3)] == [(1, 1), (2, 2), (3, 3)]


def test_closure_variables_are_sent_with_current_values() -> None:
    factor = 2

    def scaled(mesh: Any, case: CaseSpec) -> int:
        return factor

    assert pool.run(scaled, case(2)).results == (2, 2)
    factor = 3
    assert pool.run(scaled, case(2)).results == (3, 3)


def test_operators_of_torch_travel() -> None:
    relu = torch.ops.aten.relu.default

    def uses(mesh: Any, case: CaseSpec) -> list[float]:
        return torch.ops.aten.add(relu(torch.tensor([-1.0])), 1).tolist()

    assert pool.run(uses, case(2)).results == ([1.0], [1.0])


def test_each_rank_draws_its_own_numbers_and_the_same_again() -> None:
    def draws(mesh: Any, case: CaseSpec) -> list[float]:
        return torch.rand(2).tolist()

    first, second = pool.run(draws, case(2, seed=5)).results, pool.run(draws, case(2, seed=5)).results
    assert first == second
    assert first[0] != first[1]
    assert first != pool.run(draws, case(2, seed=7)).results


def test_groups_that_a_function_makes_do_not_pile_up() -> None:
    def open_files(mesh: Any, case: CaseSpec) -> int:
        total(mesh, case)
        inner = dist.new_group(list(range(mesh.size("tp"))))
        dist.all_reduce(torch.ones(1), group=inner)
        return len(list(Path("/proc/self/fd").iterdir()))

    counts = [pool.run(open_files, case(2)).results for _ in range(6)]
    assert counts[-1] == counts[1]


def test_an_exception_that_cannot_be_pickled() -> None:
    def raises(mesh: Any, case: CaseSpec) -> None:
        class Local(Exception):
            def __reduce__(self) -> str:
                raise RuntimeError("not this one")

        raise Local("deep inside")

    with pytest.raises(Raised, match=r"rank 0 raised Local: deep inside at test_pool\.py:") as caught:
        pool.run(raises, case(2))
    assert "in raises" in caught.value.__notes__[0]


def test_a_result_that_cannot_be_pickled() -> None:
    def returns(mesh: Any, case: CaseSpec) -> Any:
        return (i for i in range(3))

    with pytest.raises(Raised, match="cannot pickle 'generator' object"):
        pool.run(returns, case(2))


def test_leaving_by_exit_is_an_exception() -> None:
    def leaves(mesh: Any, case: CaseSpec) -> None:
        sys.exit(0)

    with pytest.raises(Raised, match="rank 0 raised SystemExit: 0"):
        pool.run(leaves, case(2))


@pytest.mark.parametrize(("crash", "name"), [(partial(ctypes.string_at, 0), "SIGSEGV"), (os.abort, "SIGABRT")])
def test_a_crash_has_the_users_line_and_its_stack(crash: Callable[[], object], name: str) -> None:
    def crashes(mesh: Any, case: CaseSpec) -> None:
        if mesh.rank("tp") == 1:
            crash()
        dist.barrier()

    with pytest.raises(RankFailure) as caught:
        pool.run(crashes, case(2))
    line = crashes.__code__.co_firstlineno + 2
    assert f"rank 1 was killed by {name} at test_pool.py:{line}; it was last seen so: computes" in str(caught.value)
    (note,) = caught.value.__notes__
    assert "Fatal Python error: " in note and f'test_pool.py", line {line} in crashes' in note
    assert pool.run(total, case(2)).results == (1.0, 1.0)


def test_a_rank_killed_between_runs_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(total, case(2))
    assert capsys.readouterr().err == ""
    before = pool._pools[2, "gloo"].pids
    os.kill(before[1], signal.SIGKILL)
    while pool._server.exit_code(before[1]) is None:
        time.sleep(0.01)
    assert pool.run(total, case(2)).results == (1.0, 1.0)
    assert pool._pools[2, "gloo"].pids != before
    assert re.fullmatch(
        r"shardproof: between two examples rank 1 was killed by SIGKILL; it was last seen so: returned; its last was "
        r"all_reduce float32\[3\] SUM \(group tp, #0\) at test_pool.py:\d+; all ranks were started again\n",
        capsys.readouterr().err,
    )


@pytest.mark.slow
def test_a_server_killed_between_runs_is_replaced() -> None:
    pool.run(total, case(2))
    os.kill(pool.pids()[0], signal.SIGKILL)
    pool._server._process.wait(10)
    assert pool.run(total, case(2)).results == (1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", slow_but([False], [False, True]))
def test_a_server_started_ahead_is_taken_while_it_is_alive(is_killed: bool) -> None:
    pool.close()
    forks.start_ahead()
    forks.start_ahead()
    ahead = forks._ahead
    assert ahead is not None
    if is_killed:
        os.kill(ahead.pid, signal.SIGKILL)
        ahead._process.wait(10)
    assert pool.run(total, case(2)).results == (1.0, 1.0)
    assert (pool._server is ahead) != is_killed and forks._ahead is None


SETTINGS = [("JAX_NUMPY_RANK_PROMOTION", True), ("TORCH_COMPILE_DISABLE", False)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_taken"), slow_but(SETTINGS[:1], SETTINGS))
def test_ranks_of_an_early_server_have_the_current_environment(
    name: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that torch reads at import come too late for that server, variables that JAX reads do not."""

    def value(mesh: Any, case: CaseSpec) -> str | None:
        return os.environ.get(name)

    pool.close()
    forks.start_ahead()
    ahead = forks._ahead
    assert ahead is not None
    monkeypatch.setenv(name, "1")
    assert pool.run(value, case(2)).results == ("1", "1")
    assert (pool._server is ahead) == is_taken
    monkeypatch.undo()
    pool.close()  # the next one has the environment of the other tests


@pytest.mark.slow
def test_threads_of_the_caller_take_turns() -> None:
    results: dict[int, tuple] = {}

    def ask(world: int) -> None:
        results[world] = pool.run(total, case(world)).results

    threads = [threading.Thread(target=ask, args=(world,)) for world in (1, 2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: (0.0,), 2: (1.0,) * 2, 4: (6.0,) * 4}


@pytest.mark.parametrize(
    ("count", "world", "gpus", "hosts"), [(4, 4, [0, 1, 2, 3], 0), (1, 3, [0, 0, 0], 3), (2, 4, [0, 1, 0, 1], 4)]
)
def test_ranks_share_gpus_only_where_these_are_fewer(
    count: int, world: int, gpus: list[int], hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for name in ("NCCL_HOSTID", "NCCL_NET"):
        monkeypatch.setenv(name, "")
    names = set()
    for rank, gpu in enumerate(gpus):
        assert rank_process.gpu_of(rank, world) == gpu
        names.add(os.environ["NCCL_HOSTID"])
    assert len(names - {""}) == hosts


def total_on_its_gpu(mesh: Any, case: CaseSpec) -> float:
    x = torch.full((3,), float(mesh.rank("tp")), device=mesh.device_mesh.device_type)
    dist.all_reduce(x, group=mesh["tp"])
    return x[0].item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: needs CUDA")
def test_nccl_runs_more_ranks_than_there_are_gpus() -> None:
    world = torch.cuda.device_count() + 1
    assert pool.run(total_on_its_gpu, case(world), "nccl").results == (world * (world - 1) / 2,) * world


def test_nccl_without_a_gpu_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(NotRun) as caught:
        pool.run(total, case(2), backend="nccl")
    assert str(caught.value) == "nccl needs a GPU, none is here"


@pytest.mark.parametrize(("engines", "starts"), [(("lockstep",), 0), (("lockstep", "gloo"), 1)])
def test_a_server_is_started_ahead_where_gloo_may_give_a_second_opinion(
    engines: tuple[str, ...], starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[bool]()
    monkeypatch.setattr(pool, "start_ahead", lambda: started.append(True))
    monkeypatch.setattr(verification, "_with_explanation", lambda scheme, report, *_: report)
    scheme = declared(lambda mesh, x: x * 3, mesh={"tp": (2,)}, engines=engines)
    assert not scheme.verify(examples=2).ok
    assert len(started) == starts


def test_every_operator_of_c10d_is_recorded_or_rejected() -> None:
    operators = {"c10d": {*IN_PLACE, *SILENT}, "_c10d_functional": {*FUNCTIONAL, *SILENT, *MISSING}}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace in operators:
            assert operator.partition(".")[0] in operators[namespace], name
