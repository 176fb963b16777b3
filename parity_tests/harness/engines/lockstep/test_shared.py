"""Objects that two ranks of lockstep share although processes would not: a process group, a storage."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from parity_tests.specimens.engine_agreement import all_gather
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.failure import Raised, Shared
from shardproof.engines.lockstep.exchange import THREADS

CASE = CaseSpec("shared", {"dp": 2, "tp": 2})


def through_the_first(call):
    """A job in which all ranks make a call through the first rank's group."""
    kept = {}

    def job(mesh, case):
        call(kept.setdefault("group", mesh["tp"]))

    return job


CALLS = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(2), group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(2), group_src=0, group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "send": lambda group: group.send([torch.ones(2)], 1, 0).wait(),
}


@pytest.mark.parametrize("op", CALLS)
def test_a_call_through_another_ranks_group_is_recognised_at_once(op):
    start = time.monotonic()
    with pytest.raises(Shared) as caught:
        run(through_the_first(CALLS[op]), CASE)
    assert time.monotonic() - start < 5
    sentence = str(caught.value).splitlines()[0]
    assert sentence.startswith(f"shared: rank 1 calls {op} at test_shared.py:")
    assert sentence.endswith(f"on the process group tp of rank 0; {THREADS}")
    assert (caught.value.rank, caught.value.op) == (1, op)


@pytest.mark.parametrize(
    "call", [dist.get_rank, lambda group: functional.all_reduce(torch.ones(2), "sum", group).sum()]
)
def test_a_group_that_torch_does_not_know_on_another_rank(call):
    with pytest.raises(Raised) as caught:
        run(through_the_first(call), CASE)
    assert f"if it is the process group of another rank: {THREADS}" in str(caught.value)


def test_a_group_of_an_earlier_run():
    job = through_the_first(CALLS["all_reduce"])
    for _ in range(2):
        with pytest.raises(Shared):
            run(job, CASE)


BUFFER = torch.zeros(4)


@pytest.fixture(autouse=True)
def empty_buffer():
    """An output is filled with NaN until its wait."""
    BUFFER.zero_()


def reduced(mesh, case):
    dist.all_reduce(BUFFER, group=mesh["tp"])


def gathered(mesh, case):
    all_gather(BUFFER, torch.ones(2), group=mesh["tp"])


def handed_on(mesh, case):
    if mesh.rank("tp") == 0:
        dist.send(BUFFER, group_dst=1, group=mesh["tp"])
    else:
        dist.recv(BUFFER, group_src=0, group=mesh["tp"])


@pytest.mark.parametrize("job", [reduced, gathered, handed_on])
def test_two_ranks_that_hand_in_one_storage_to_write_it(job):
    with pytest.raises(Shared) as caught:
        run(job, CaseSpec("shared", {"tp": 2}))
    sentence = str(caught.value).splitlines()[0]
    assert sentence.startswith("shared: rank 1 hands in a storage that rank 0 has handed in, ")
    assert sentence.endswith(THREADS) and sentence.count("(group tp, #0) at test_shared.py:") == 2


def read_alone(mesh, case):
    out = torch.empty(8)
    all_gather(out, BUFFER, group=mesh["tp"])
    return out.sum().item()


def one_after_the_other(mesh, case):
    for rank in range(mesh.size("tp")):
        if rank == mesh.rank("tp"):
            work = dist.isend(BUFFER, group_dst=1 - rank, group=mesh["tp"])
            work.wait()
        else:
            dist.recv(torch.empty(4), group_src=rank, group=mesh["tp"])
        dist.barrier(group=mesh["tp"])
    return True


@pytest.mark.parametrize("job", [read_alone, one_after_the_other])
def test_a_storage_that_is_only_read_is_no_mistake(job):
    assert len(set(run(job, CaseSpec("shared", {"tp": 2})).results)) == 1
