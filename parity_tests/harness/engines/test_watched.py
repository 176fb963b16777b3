"""`watch` records running code: torch's CommDebugMode counts the same, and bytes equal a closed form."""

import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.ledger_table import by_module
from shardproof.engines.watched import watch

ENGINES = ("lockstep", "gloo")
WORLD, TOKENS, D, HIDDEN, FLOAT = 2, 3, 4, 8, 4
FAMILIES = {"all_gather": ("allgather", "all_gather"), "reduce_scatter": ("reduce_scatter",)}
FAMILIES |= {"all_reduce": ("allreduce", "all_reduce"), "broadcast": ("broadcast",)}


def on_two(job, engine="gloo"):
    return run(job, CaseSpec("watched", {"tp": WORLD}), engine)


def ledger_counts(counts):
    """CommDebugMode's counts, under the ledger's names."""
    total = Counter()
    for op, count in counts.items():
        (family,) = (name for name, parts in FAMILIES.items() if any(part in str(op) for part in parts))
        total[family] += count
    return total


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x):
        return self.second(self.first(x))


def step(model, is_input_grad=True):
    model(torch.ones(TOKENS, D, requires_grad=is_input_grad)).sum().backward()


def tensor_parallel(mesh):
    plan = {f"{part}.up": ColwiseParallel() for part in ("first", "second")}
    plan |= {f"{part}.down": RowwiseParallel() for part in ("first", "second")}
    return parallelize_module(Net(), mesh.device_mesh, plan)


def fsdp(mesh):
    model = Net()
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh.device_mesh)
    return model


def watched_step(build):
    """A job that returns the rows of the second step; the first step may send more."""

    def job(mesh, case):
        model = build(mesh)
        step(model)
        with watch(mesh) as ledger:
            step(model)
        return ledger.rows

    return job


def counted_step(build):
    """A job in which CommDebugMode counts the same step. Its hooks hold for a process, so lockstep cannot run it."""

    def job(mesh, case):
        model = build(mesh)
        step(model)
        with CommDebugMode() as counts:
            step(model)
        return dict(ledger_counts(counts.get_comm_counts()))

    return job


# Plain collectives


def collectives(mesh, case):
    group, rank = mesh["tp"], dist.get_rank()
    with watch(mesh) as ledger:
        dist.all_reduce(torch.ones(5), group=group)
        dist.all_gather([torch.empty(3) for _ in range(WORLD)], torch.ones(3), group=group)
        dist.all_gather_into_tensor(torch.empty(6), torch.ones(3), group=group)
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4), group=group)
        dist.all_to_all_single(torch.empty(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64), group=group)
        dist.broadcast(torch.ones(7), group=group, group_src=0)
        dist.barrier(group=group)
        if rank == 0:
            dist.send(torch.ones(9), 1)
        else:
            dist.recv(torch.ones(9), 0)
    dist.all_reduce(torch.ones(11), group=group)  # outside of the block
    return ledger.rows


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use `torch.distributed:FutureWarning")  # newer names
@pytest.mark.parametrize("engine", ENGINES)
def test_plain_collectives_have_their_bytes(engine):
    messages = (("send", 9 * FLOAT), ("recv", 9 * FLOAT))
    for rank, rows in enumerate(on_two(collectives, engine).results):
        assert [(row.op, row.payload) for row in rows] == [
            ("all_reduce", 5 * FLOAT),
            ("all_gather", 3 * FLOAT),
            ("all_gather", 3 * FLOAT),
            ("reduce_scatter", 4 * FLOAT),
            ("all_to_all", 8 * 8),
            ("broadcast", 7 * FLOAT),
            ("barrier", 0),
            messages[rank],
        ]
        assert {(row.rank, row.phase, row.module) for row in rows} == {(rank, "fwd", "")}
        assert {row.group_name for row in rows} == {"tp"}
        assert all(re.match(r"test_watched\.py:\d+$", row.source) for row in rows)


def test_without_a_mesh_the_default_group_is_world():
    def job(mesh, case):
        with watch() as ledger:
            dist.all_reduce(torch.ones(5))
        return [row.group_name for row in ledger.rows]

    assert on_two(job).results == (["world"],) * WORLD


# Tensor parallelism


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_tensor_parallelism_by_module_phase_and_bytes(engine):
    size = TOKENS * D * FLOAT
    counts = on_two(counted_step(tensor_parallel)).results
    for rank, rows in enumerate(on_two(watched_step(tensor_parallel), engine).results):
        assert Counter(row.op for row in rows) == counts[rank] == {"all_reduce": 4}
        forward, backward = ("fwd", "all_reduce", "tp"), ("bwd", "all_reduce", "tp")
        both = {forward: (1, size), backward: (1, size)}
        assert by_module(rows) == {
            "Net": {forward: (2, 2 * size), backward: (2, 2 * size)},
            "Net.first": both,
            "Net.first.down": {forward: (1, size)},
            "Net.first.up": {backward: (1, size)},
            "Net.second": both,
            "Net.second.down": {forward: (1, size)},
            "Net.second.up": {backward: (1, size)},
        }


def test_the_first_layer_sends_no_gradient_of_an_input_that_needs_none():
    def job(mesh, case):
        model = tensor_parallel(mesh)
        with watch(mesh) as ledger:
            step(model, is_input_grad=False)
        return [(row.phase, row.module) for row in ledger.rows]

    forward = [("fwd", "Net.first.down"), ("fwd", "Net.second.down")]
    assert on_two(job).results == ([*forward, ("bwd", "Net.second.up")],) * WORLD


class Shared(torch.autograd.Function):
    """The forward returns x, and the backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Outer(nn.Module):
    """Sums the gradient of its input. In the backward that happens after the backward of its part has ended."""

    def __init__(self, group):
        super().__init__()
        self.group, self.part = group, nn.Linear(D, D)

    def forward(self, x):
        return self.part(Shared.apply(x, self.group))


def test_a_sum_before_a_part_belongs_to_the_outer_module_in_backward():
    def job(mesh, case):
        with watch(mesh) as ledger:
            step(Outer(mesh["tp"]))
        return [(row.op, row.phase, row.module) for row in ledger.rows]

    assert on_two(job).results == ([("all_reduce", "bwd", "Outer")],) * WORLD


class Returning(nn.Module):
    """Returns its part's result."""

    def __init__(self, group):
        super().__init__()
        self.part = Outer(group)

    def forward(self, x):
        return self.part(x)


def test_the_inner_of_two_modules_with_one_output_is_named():
    def job(mesh, case):
        with watch(mesh) as ledger:
            step(Returning(mesh["tp"]))
        return [row.module for row in ledger.rows]

    assert on_two(job).results == (["Returning.part"],) * WORLD


# FSDP2


def test_fsdp2_by_module_phase_and_bytes():
    mlp = (2 * D * HIDDEN + D + HIDDEN) * FLOAT
    gather, again, reduce = ("fwd", "all_gather", "tp"), ("bwd", "all_gather", "tp"), ("bwd", "reduce_scatter", "tp")
    counts = on_two(counted_step(fsdp)).results
    for rank, rows in enumerate(on_two(watched_step(fsdp)).results):
        assert Counter(row.op for row in rows) == counts[rank] == {"all_gather": 4, "reduce_scatter": 2}
        part = {gather: (1, mlp // WORLD), again: (1, mlp // WORLD), reduce: (1, mlp)}
        assert by_module(rows) == {
            "FSDPNet": {key: (2 * calls, 2 * size) for key, (calls, size) in part.items()},
            "FSDPNet.first": part,
            "FSDPNet.second": part,
        }


# The block


def test_recomputed_modules_belong_to_their_own_backward():
    def job(mesh, case):
        model = tensor_parallel(mesh)
        with watch(mesh) as ledger:
            x = torch.ones(TOKENS, D, requires_grad=True)
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        return [(row.phase, row.module) for row in ledger.rows]

    (rows, _) = on_two(job).results
    assert rows.count(("fwd", "Net.first.down")) == rows.count(("bwd", "Net.first.down")) == 1
    assert rows.count(("bwd", "Net.first.up")) == 1


@pytest.mark.slow
def test_compiled_code_is_watched():
    def job(mesh, case):
        model = torch.compile(tensor_parallel(mesh), backend="eager")
        with watch(mesh) as ledger:
            step(model)
        return dict(Counter(row.op for row in ledger.rows))

    assert on_two(job).results == ({"all_reduce": 4},) * WORLD


@pytest.mark.parametrize("engine", ENGINES)
def test_a_block_within_a_block_has_the_same_rows(engine):
    def job(mesh, case):
        model = tensor_parallel(mesh)
        with watch(mesh) as outer, watch(mesh) as inner:
            step(model)
        return nn.Module.__call__.__name__, outer.rows == inner.rows, len(inner.rows)

    results = on_two(job, engine).results
    assert [result[1:] for result in results] == [(True, 4)] * WORLD
    assert nn.Module.__call__.__name__ == results[-1][0] == "_wrapped_call_impl"


def test_an_exception_ends_the_block():
    with pytest.raises(ZeroDivisionError), watch():
        _ = 1 // 0
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


def test_ranks_of_lockstep_have_the_rows_of_the_run():
    ranks = on_two(watched_step(tensor_parallel), "lockstep")
    for rank, rows in enumerate(ranks.results):
        assert rows == ranks.ledger.of(rank)[-4:]


def test_a_wrong_mesh_is_rejected():
    with pytest.raises(TypeError, match=r"^watch: mesh is a list; pass a DeviceMesh, or nothing$"), watch([2]):
        pass
