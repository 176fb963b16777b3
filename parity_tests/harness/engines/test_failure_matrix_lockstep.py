"""The failure matrix on lockstep: every row answered within 50 ms, each side by name, and the next example healthy."""

import inspect
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from parity_tests.evidence.failures import kinds
from parity_tests.specimens import odd_rank
from parity_tests.specimens.engine_agreement import all_gather
from shardproof.declare.case import CaseSpec
from shardproof.engines import failure
from shardproof.engines.lockstep import lockstep

VERDICT_S = 0.05
FILE = "test_failure_matrix_lockstep.py"
SIDE = re.compile(
    r"rank (\d+) (?:in|waits in|returned and never waited for|was stopped before its next collective; its last was) "
    rf"(\w+) .*?\(group ([\w,]+), #(\d+)\) at (?:{FILE}|kinds.py|odd_rank.py):(\d+)"
)


def raises_in_backward(mesh: Any, case: CaseSpec) -> None:
    if mesh.rank("tp") == 1:
        raise KeyError("no such gradient")
    Summed.apply(torch.ones(3, requires_grad=True), mesh["tp"], 3).sum().backward()


def uneven_scatter(mesh: Any, case: CaseSpec) -> None:
    parts = [torch.ones(4) for _ in range(mesh.size("tp"))]
    out = torch.ones(3 if mesh.rank("tp") == 1 else 4)
    dist.scatter(out, parts if mesh.rank("tp") == 0 else None, group_src=0, group=mesh["tp"])


def other_splits(mesh: Any, case: CaseSpec) -> None:
    world = mesh.size("tp")
    takes = [1] * (world - 1) + [2 if mesh.rank("tp") == 0 else 1]
    dist.all_to_all_single(torch.empty(sum(takes), 2), torch.ones(world, 2), takes, group=mesh["tp"])


def other_size_in_backward(mesh: Any, case: CaseSpec) -> None:
    x = torch.ones(3, requires_grad=True)
    Summed.apply(x, mesh["tp"], 2 if mesh.rank("tp") == 1 else 3).sum().backward()


def other_size_functional(mesh: Any, case: CaseSpec) -> None:
    functional.all_reduce(torch.ones(2 if mesh.rank("tp") == 1 else 3), "sum", mesh["tp"]).sum()


def other_tag(mesh: Any, case: CaseSpec) -> None:
    if mesh.rank("tp") == 0:
        dist.send(torch.ones(4), group_dst=1, group=mesh["tp"], tag=5)
    if mesh.rank("tp") == 1:
        dist.recv(torch.ones(4), group_src=0, group=mesh["tp"], tag=6)


def skips_the_first_of_two(mesh: Any, case: CaseSpec) -> None:
    if mesh.rank("tp") != 1:
        dist.all_reduce(torch.ones(3), group=mesh["tp"])
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def forgets_to_wait(mesh: Any, case: CaseSpec) -> None:
    dist.all_reduce(torch.ones(3), group=mesh["tp"], async_op=mesh.rank("tp") == 1)


def forgets_a_functional(mesh: Any, case: CaseSpec) -> None:
    x = functional.all_reduce(torch.ones(3), "sum", mesh["tp"])
    if mesh.rank("tp") != 1:
        x.sum()


def receives_what_nobody_sends(mesh: Any, case: CaseSpec) -> None:
    if mesh.rank("tp") == 1:
        dist.irecv(torch.ones(3), group=mesh["tp"], group_src=0)


def changes_an_input(mesh: Any, case: CaseSpec) -> None:
    x = torch.ones(3)
    work = all_gather(torch.empty(3 * mesh.size("tp")), x, group=mesh["tp"], async_op=True)
    x[2] += mesh.rank("tp") == 1
    work.wait()


def writes_to_an_output(mesh: Any, case: CaseSpec) -> None:
    x = torch.ones(3)
    work = dist.all_reduce(x, group=mesh["tp"], async_op=True)
    if mesh.rank("tp") == 1:
        x[1] = 0
    work.wait()


class Summed(torch.autograd.Function):
    """All-reduces a slice of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, count: int) -> torch.Tensor:
        ctx.group, ctx.count = group, count
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        grad = grad.clone()
        dist.all_reduce(grad[: ctx.count], group=ctx.group)
        return grad, None, None


@dataclass(frozen=True)
class Mistake:
    """A body, the words, ops and ranks that the failure must name, and each rank's line."""

    body: Callable
    cause: type[failure.RankFailure]
    says: str
    ops: tuple[str, ...] = ("all_reduce",)
    ranks: tuple[int, ...] = (0, 1)


MISTAKES = (
    Mistake(kinds.raises, failure.Raised, "rank 1 raised KeyError: 'no such weight'", ranks=(0,)),
    Mistake(raises_in_backward, failure.Raised, "rank 1 raised KeyError: 'no such gradient'", ranks=(0,)),
    Mistake(kinds.other_shape, failure.CollectiveMismatch, "shapes differ, [3] and [2]"),
    Mistake(odd_rank.other_dims, failure.CollectiveMismatch, "shapes differ, [2, 3] and [3, 2]"),
    Mistake(kinds.other_dtype, failure.CollectiveMismatch, "dtypes differ, float32 and int32"),
    Mistake(kinds.other_reduce_op, failure.CollectiveMismatch, "reduce ops differ, SUM and MAX"),
    Mistake(
        kinds.other_operation, failure.CollectiveMismatch, "different operations meet", ("all_reduce", "broadcast")
    ),
    Mistake(odd_rank.other_call, failure.CollectiveMismatch, "different operations meet", ("all_reduce", "all_gather")),
    Mistake(kinds.other_root, failure.CollectiveMismatch, "roots differ, 0 and 1", ("broadcast",)),
    Mistake(odd_rank.other_rows, failure.CollectiveMismatch, "shapes differ, [4] and [3]", ("all_gather",)),
    Mistake(uneven_scatter, failure.CollectiveMismatch, "outputs differ, float32[4] and float32[3]", ("scatter",)),
    Mistake(
        other_splits,
        failure.CollectiveMismatch,
        "splits disagree, rank {last} sends float32[1, 2] to rank 0, which expects float32[2, 2]",
        ("all_to_all",),
        (0,),
    ),
    Mistake(other_size_in_backward, failure.CollectiveMismatch, "shapes differ, [3] and [2]"),
    Mistake(other_size_functional, failure.CollectiveMismatch, "shapes differ, [3] and [2]"),
    Mistake(odd_rank.short_receive, failure.CollectiveMismatch, "shapes differ, [4] and [2]", ("send", "recv")),
    Mistake(other_tag, failure.CollectiveMismatch, "tags differ, 5 and 6", ("send", "recv")),
    Mistake(kinds.all_send_first, failure.Deadlock, "rank 0 waits in send float32[4] peer=1", ("send",)),
    Mistake(kinds.collective_missing, failure.Deadlock, "rank 1 returned without this all_reduce", ranks=(0,)),
    Mistake(skips_the_first_of_two, failure.Deadlock, "on rank 1: one of them may have left out a call", ranks=(0,)),
    Mistake(receives_what_nobody_sends, failure.Unwaited, "rank 1 returned and never waited for recv", ("recv",), (1,)),
    Mistake(changes_an_input, failure.Modified, ": input 0 was changed at (2,) before its", ("all_gather",), (1,)),
    Mistake(writes_to_an_output, failure.Modified, ": output 0 was written at (1,) before its wait", ranks=(1,)),
)


def case(world: int) -> CaseSpec:
    return CaseSpec("failure_matrix", {"tp": world})


@pytest.mark.parametrize("body", [forgets_to_wait, forgets_a_functional])
def test_work_that_is_never_waited_for_is_marked(body: Callable) -> None:
    """Its numbers are compared all the same; `side_checks.protocol` makes a finding of the row."""
    rows = lockstep.run(body, case(2)).ledger.rows
    assert [(row.rank, row.op) for row in rows if row.unwaited] == [(1, "all_reduce")]


def failed(body: Callable, world: int, cause: type[failure.RankFailure]) -> tuple[failure.RankFailure, float]:
    """The failure and its seconds; three attempts, since the machine may be busy."""
    seconds = float("inf")
    for _ in range(3):
        lockstep.run(odd_rank.healthy, case(world))
        started = time.perf_counter()
        with pytest.raises(cause) as caught:
            lockstep.run(body, case(world))
        seconds = min(seconds, time.perf_counter() - started)
        assert lockstep.run(odd_rank.healthy, case(world)).results == (float(world),) * world
        if seconds <= VERDICT_S:
            break
    return caught.value, seconds


@pytest.mark.fast_values(26)
@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.body.__name__)
def test_row(mistake, world):
    error, seconds = failed(mistake.body, world, mistake.cause)
    text = str(error)
    assert mistake.says.format(last=world - 1) in text
    sides = {int(rank): (op, group, int(line)) for rank, op, group, _, line in SIDE.findall(text)}
    assert set(mistake.ranks) <= set(sides)
    lines, first = inspect.getsourcelines(Summed if "backward" in mistake.body.__name__ else mistake.body)
    for rank in mistake.ranks:
        op, group, line = sides[rank]
        assert op in mistake.ops
        assert group == "tp"
        assert first <= line < first + len(lines)
    assert len(error.others) == world - 1
    assert error.case == case(world)
    assert seconds <= VERDICT_S


def test_a_rank_own_exception_is_the_cause_and_its_frames_are_shown():
    error, _ = failed(kinds.raises, 2, failure.Raised)
    assert error.rank == 1
    assert repr(error.__cause__) == "KeyError('no such weight')"
    assert 'raise KeyError("no such weight")' in str(error)
    assert error.source == f"kinds.py:{inspect.getsourcelines(kinds.raises)[1] + 2}"


def test_a_rank_that_neither_waits_nor_has_returned_was_stopped():
    """Ranks take turns: in the order of ranks the last of four has had none when rank 1 raises, then one."""

    def raises_second(mesh: Any, case: CaseSpec) -> None:
        dist.all_reduce(torch.ones(3), group=mesh["tp"])
        kinds.raises(mesh, case)

    error, _ = failed(kinds.raises, 4, failure.Raised)
    assert error.others[-1] == "rank 3 was stopped before its first collective"
    error, _ = failed(raises_second, 4, failure.Raised)
    stopped = [
        line for line in error.others if "was stopped before its next collective; its last was all_reduce" in line
    ]
    assert stopped and all(line.startswith(("rank 0", "rank 2", "rank 3")) for line in stopped)
    explained = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "read-a-failure.md").read_text()
    assert "*was stopped before its next collective*" in explained


def test_the_default_group_inside_a_subgroup_is_called_so():
    mesh = {"dp": 2, "tp": 2}

    def body(mesh: Any, case: CaseSpec) -> None:
        if mesh.rank("dp") == 0:
            dist.all_reduce(torch.ones(3))

    with pytest.raises(failure.Deadlock) as caught:
        lockstep.run(body, CaseSpec("x", mesh))
    assert re.search(rf"rank 0 waits in all_reduce .* \(group world, #0\) at {FILE}:\d+", str(caught.value))
    assert "group world is the default group, all 4 ranks must come to it" in str(caught.value)
    assert lockstep.run(lambda mesh, case: mesh.rank("dp"), CaseSpec("x", mesh)).results == (0, 0, 1, 1)


@pytest.mark.parametrize("world", (2, 4))
def test_an_endless_loop_is_ended_with_its_stack(world):
    stop = threading.Event()

    def spins(mesh: Any, case: CaseSpec) -> None:
        dist.all_reduce(torch.ones(3), group=mesh["tp"])
        while mesh.rank("tp") == 1 and not stop.is_set():
            pass
        dist.all_reduce(torch.ones(5), group=mesh["tp"])

    with pytest.raises(failure.Stalled) as caught:
        lockstep.run(spins, case(world), quiet_s=0.2)
    text = str(caught.value)
    assert re.search(rf"last all_reduce float32\[3\] SUM \(group tp, #0\) at {FILE}:\d+", text)
    assert "while mesh.rank" in text
    assert caught.value.rank == 1
    assert lockstep.run(odd_rank.healthy, case(world)).results == (float(world),) * world
    stop.set()
