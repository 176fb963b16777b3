"""The lockstep process group: results appear at the wait, it has every method of torch, and rejects in sentences."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from parity_tests.specimens.engine_agreement import all_gather, named
from shardproof.declare.case import CaseSpec
from shardproof.engines import failure
from shardproof.engines.lockstep import lockstep
from shardproof.engines.lockstep.group import INHERITED, MISSING, LockstepGroup, reject_missing

CASE = CaseSpec("lockstep", {"tp": 2})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int8))
def test_an_early_read_sees_poison(dtype):
    def body(mesh: Any, case: CaseSpec) -> tuple[bool, bool]:
        x = torch.ones(3, dtype=dtype)
        work = dist.all_reduce(x, group=mesh["tp"], async_op=True)
        early = x.isnan() if dtype.is_floating_point else x == torch.iinfo(dtype).min
        work.wait()
        return bool(early.all()), x.float().tolist() == [2.0] * 3

    assert lockstep.run(body, CASE).results == ((True, True),) * 2


@pytest.mark.parametrize("async_op", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.int32))
def test_a_reduce_leaves_the_tensors_of_other_ranks_undefined(dtype, async_op):
    def body(mesh: Any, case: CaseSpec) -> torch.Tensor:
        x = torch.ones(3, dtype=dtype)
        work = dist.reduce(x, group=mesh["tp"], group_dst=1, async_op=async_op)
        if work is not None:
            work.wait()
        return x

    other, root = lockstep.run(body, CASE).results
    assert root.tolist() == [2] * 3
    assert bool((other.isnan() if dtype.is_floating_point else other == torch.iinfo(dtype).min).all())


def test_a_second_wait_does_nothing():
    def body(mesh: Any, case: CaseSpec) -> float:
        x = torch.ones(1)
        work = dist.all_reduce(x, group=mesh["tp"], async_op=True)
        work.wait()
        x += 1
        work.wait()
        return x.item()

    assert lockstep.run(body, CASE).results == (3.0, 3.0)


def test_gathering_in_place_is_no_modification():
    def body(mesh: Any, case: CaseSpec) -> list[float]:
        output = torch.zeros(2)
        mine = output[mesh.rank("tp") :][:1].fill_(mesh.rank("tp") + 1)
        all_gather(output, mine, group=mesh["tp"], async_op=True).wait()
        return output.tolist()

    assert lockstep.run(body, CASE).results == ([1.0, 2.0],) * 2


def test_one_element_with_any_stride_can_be_sent():
    """One element is contiguous, whatever its stride; its neighbour in memory is another number."""

    def body(mesh: Any, case: CaseSpec) -> list[float]:
        x = torch.full((4,), float(mesh.rank("tp")))[::2][:1]
        received = torch.empty(2)
        assert x.stride() == (2,)
        all_gather(received, x, group=mesh["tp"], async_op=True).wait()
        return received.tolist()

    assert lockstep.run(body, CASE).results == ([0.0, 1.0], [0.0, 1.0])


def test_nan_in_an_input_is_no_modification():
    def body(mesh: Any, case: CaseSpec) -> bool:
        output, mine = torch.zeros(4), torch.tensor([float("nan"), -0.0])
        all_gather(output, mine, group=mesh["tp"], async_op=True).wait()
        return bool(output[::2].isnan().all())

    assert lockstep.run(body, CASE).results == (True, True)


def test_a_poll_lets_the_others_run():
    def body(mesh: Any, case: CaseSpec) -> float:
        x = torch.ones(1)
        work = dist.all_reduce(x, group=mesh["tp"], async_op=True)
        while not work.is_completed():
            pass
        work.wait()
        return x.item()

    assert lockstep.run(body, CASE).results == (2.0, 2.0)


def test_every_rank_gets_the_same_bits():
    def body(mesh: Any, case: CaseSpec) -> list[float]:
        x = torch.rand(100, dtype=torch.float32) - 0.5
        dist.all_reduce(x, group=mesh["tp"])
        return x.tolist()

    first, *rest = lockstep.run(body, CaseSpec("lockstep", {"tp": 8}, schedule=3)).results
    assert rest == [first] * 7


def test_every_method_torch_declares_is_implemented_or_rejected():
    declared = {name for name, value in vars(dist.ProcessGroup).items() if callable(getattr(dist.ProcessGroup, name))}
    declared = {name for name in declared if not name.startswith("__")}
    unknown = {
        name for name in vars(LockstepGroup) if "_rejection" in getattr(vars(LockstepGroup)[name], "__qualname__", "")
    }
    assert declared - INHERITED <= set(vars(LockstepGroup)) - (unknown - set(MISSING))


@pytest.mark.parametrize("name", MISSING)
def test_a_rejection_is_a_sentence(name):
    with pytest.raises(failure.Raised) as caught:
        lockstep.run(lambda mesh, case: getattr(mesh["tp"], name)(), CASE)
    assert str(caught.value.__cause__) == f"lockstep cannot run this: ProcessGroup.{name} {MISSING[name]}"


def test_a_method_that_lockstep_lacks_is_a_limit_of_the_engine(monkeypatch):
    monkeypatch.delattr(LockstepGroup, "broadcast")  # undone by setting it again
    reject_missing()
    with pytest.raises(failure.Raised) as caught:
        lockstep.run(lambda mesh, case: dist.broadcast(torch.ones(2), 0, group=mesh["tp"]), CASE)
    assert str(caught.value.__cause__) == (
        "lockstep cannot run this: ProcessGroup.broadcast is not carried out by this engine; verify with --engine gloo"
    )


def test_messages_in_a_batch_are_exchanged_and_the_backend_has_no_option():
    def body(mesh: Any, case: CaseSpec) -> tuple[float, bool, str]:
        group, rank = mesh["tp"], mesh.rank("tp")
        received = torch.empty(1)
        sent = torch.full((1,), float(rank))
        peer = dist.get_global_rank(group, 1 - rank)
        batch = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        backend = group._get_backend(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="device type cuda"):
            group._get_backend(torch.device("cuda"))
        return received.item(), backend.supports_coalescing or backend.supports_tensor_alloc("cpu"), backend.name()

    assert lockstep.run(body, CASE).results == ((1.0, False, "threaded"), (0.0, False, "threaded"))


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="not run: torch before 2.14 has no gather_single")
def test_a_gather_into_one_tensor():
    def body(mesh: Any, case: CaseSpec) -> list[float] | None:
        output = torch.zeros(4) if mesh.rank("tp") == 1 else None
        dist.gather_single(torch.full((2,), float(mesh.rank("tp"))), output, group=mesh["tp"], group_dst=1)
        return None if output is None else output.tolist()

    assert lockstep.run(body, CASE).results == (None, [0.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("new", "old"),
    (
        ("all_gather_single", "_allgather_base"),
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        ("reduce_scatter_single", "_reduce_scatter_base"),
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        ("all_to_all_single", "alltoall_base"),
    ),
)
def test_both_families_of_names_are_one_implementation(new, old):
    assert vars(LockstepGroup)[new] is vars(LockstepGroup)[old]


MISTAKES = {
    "all_gather: the output is float32[3], a rank's part is float32[2] (needs 2 times its elements, in its dtype)": (
        lambda group: all_gather(torch.empty(3), torch.ones(2), group=group)
    ),
    "all_gather: a list of 1 tensors for 2 ranks (needs one for each)": (
        lambda group: group.allgather([[torch.ones(2)]], [torch.ones(2)])
    ),
    "all_gather: float32[3] in this rank's place of the list, float32[2] beside it": (
        lambda group: group.allgather([[torch.ones(3), torch.ones(3)]], [torch.ones(2)])
    ),
    "reduce_scatter: float64[2] in the list, float32[2] beside it (dtypes must be alike)": (
        lambda group: group.reduce_scatter([torch.ones(2)], [[torch.ones(2), torch.ones(2, dtype=torch.float64)]])
    ),
    "all_to_all: the input has 3 rows for 2 ranks (needs a multiple); give splits": (
        lambda group: group.all_to_all_single(torch.ones(2), torch.ones(3), [], [])
    ),
    "all_to_all: the input has 3 rows for 2 ranks, its splits are [1, 1]": (
        lambda group: group.all_to_all_single(torch.ones(2), torch.ones(3), [], [1, 1])
    ),
    "lockstep: AVG of torch.bool has no meaning; use SUM, which is logical or": (
        lambda group: dist.all_reduce(torch.ones(2) > 0, dist.ReduceOp.AVG, group=group)
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_call_that_cannot_be_right_is_rejected(message):
    with pytest.raises(failure.Raised) as caught:
        lockstep.run(lambda mesh, case: MISTAKES[message](mesh["tp"]), CASE)
    assert str(caught.value.__cause__) == message


@pytest.mark.parametrize(("factor", "name"), [(0.25, "PREMUL_SUM(0.25)"), (1 / 3, f"PREMUL_SUM({1 / 3!r})")])
def test_nccls_sum_that_multiplies_each_addend_first(factor, name):
    """FSDP2 divides gradients by this operation if a divide factor is set."""
    scatter = named(dist, "reduce_scatter_single", "reduce_scatter_tensor")

    def body(mesh: Any, case: CaseSpec) -> list[float]:
        op = torch._C._distributed_c10d._make_nccl_premul_sum(factor)
        x, part = torch.arange(2.0) + mesh.rank("tp"), torch.empty(1)
        scatter(part, x.clone(), op=op, group=mesh["tp"])
        dist.all_reduce(x, op, group=mesh["tp"])
        return [*x.tolist(), *part.tolist()]

    ranks = lockstep.run(body, CASE)
    first, second = ranks.results
    assert first[:2] == second[:2] == (torch.arange(2.0) * factor + (torch.arange(2.0) + 1) * factor).tolist()
    assert [first[2], second[2]] == first[:2]
    assert {row.reduce_op for row in ranks.ledger.rows} == {name}


@pytest.mark.parametrize("schedule", range(1, 9))
def test_a_mismatch_is_seen_in_whatever_order_ranks_arrive(schedule):
    def body(mesh: Any, case: CaseSpec) -> None:
        dist.all_reduce(torch.ones(2 if mesh.rank("tp") == 0 else 3), group=mesh["tp"])

    with pytest.raises(failure.CollectiveMismatch, match=r"shapes differ, \[\d\] and \[\d\]"):
        lockstep.run(body, CaseSpec("lockstep", {"tp": 4}, schedule=schedule))


def test_a_functional_result_may_be_handed_on():
    def body(mesh: Any, case: CaseSpec) -> list[float]:
        x = functional.all_reduce(torch.ones(2), "sum", mesh["tp"])
        dist.all_reduce(x, group=mesh["tp"])
        out = torch.empty(4)
        all_gather(out, functional.all_reduce(torch.ones(2), "sum", mesh["tp"]), group=mesh["tp"])
        return [*x.tolist(), *out.tolist()]

    assert lockstep.run(body, CASE).results == ([4.0, 4.0, 2.0, 2.0, 2.0, 2.0],) * 2


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.parametrize("wrap", ("ddp", "fsdp", "functional"))
def test_a_failure_unwinds_through_the_backward_of_torch(wrap):
    def body(mesh: Any, case: CaseSpec) -> None:
        net = plain_net()
        if wrap == "ddp":
            net = DistributedDataParallel(net, process_group=mesh["tp"])
        if wrap == "fsdp":
            net = fully_shard(net, mesh=mesh.device_mesh)
        out = net(torch.ones(2, 4))
        if wrap == "functional":
            scatter = named(functional, "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")
            out = scatter(out, "sum", 0, mesh["tp"])
        if mesh.rank("tp") == 1:
            dist.barrier(group=mesh["tp"])
        out.square().sum().backward()  # a contiguous gradient: torch 2.11 gathers no other

    with pytest.raises(failure.CollectiveMismatch, match=r"different operations meet.*\[bwd\]"):
        lockstep.run(body, CASE)
    assert lockstep.run(lambda mesh, case: mesh.rank("tp"), CASE).results == (0, 1)
