"""torch's own users of collectives: DTensor, FSDP2, DDP and pipeline schedules, on lockstep and on gloo.

Weights and data are small integers and learning rates powers of two, so every sum is exact and equality is bitwise.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from parity_tests.specimens.engine_agreement import Pairs, agree, verify
from shardproof.declare.case import CaseSpec

MICROBATCHES = 4


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def network(depth: int = 2, seed: int = 0) -> nn.Sequential:
    net = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.ReLU())])
    for index, parameter in enumerate(net.parameters()):
        parameter.data.copy_(integers(*parameter.shape, seed=seed + index))
    return net


def trained(batches: list[Tensor]) -> list[Tensor]:
    """The parameters after one step on the mean of the batches' losses, on one device."""
    net = network()
    (sum(net(batch).sum() for batch in batches) / len(batches)).backward()
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    return list(net.parameters())


def step(net: nn.Module, batch: Tensor) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net(batch).sum().backward()
    optimizer.step()


def dtensors(mesh: Any, case: CaseSpec) -> Pairs:
    tp, rank, size = mesh.device_mesh, mesh.rank("tp"), mesh.size("tp")
    a, b = integers(5, 6, seed=1), integers(6, 7, seed=2)
    partial = distribute_tensor(a, tp, [Shard(1)]) @ distribute_tensor(b, tp, [Shard(0)])
    yield partial.redistribute(tp, [Replicate()]).to_local(), a @ b
    rows = partial.redistribute(tp, [Shard(0)])
    yield rows.to_local(), torch.tensor_split(a @ b, [-(-5 // size) * r for r in range(1, size)])[rank]
    yield rows.redistribute(tp, [Shard(1)]).full_tensor(), a @ b
    x = distribute_tensor(a, tp, [Replicate()]).requires_grad_()
    (x @ distribute_tensor(b, tp, [Shard(1)])).redistribute(tp, [Replicate()]).to_local().sum().backward()
    yield x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad, torch.ones(5, 7) @ b.T


def fully_sharded(mesh: Any, case: CaseSpec) -> Pairs:
    rank, size = mesh.rank("tp"), mesh.size("tp")
    batches = [integers(3, 4, seed=10 + r) for r in range(size)]
    net = network()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh.device_mesh)
    step(net, batches[rank])
    yield [p.full_tensor() for p in net.parameters()], trained(batches)


def data_parallel(mesh: Any, case: CaseSpec) -> Pairs:
    rank, size = mesh.rank("tp"), mesh.size("tp")
    batches = [integers(3, 4, seed=10 + r) for r in range(size)]
    net = DistributedDataParallel(network(), process_group=mesh["tp"])
    step(net, batches[rank])
    yield list(net.parameters()), trained(batches)


def two_axes(mesh: Any, case: CaseSpec) -> Pairs:
    """Sharded over one axis, replicated over the other."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = [integers(3, 4, seed=10 + r) for r in range(size)]
    net = fully_shard(network(), mesh=mesh.device_mesh)
    step(net, batches[rank])
    yield [p.full_tensor() for p in net.parameters()], trained(batches)


def pipeline(schedule: type, per_rank: int, opens: bool = True) -> Any:
    def body(mesh: Any, case: CaseSpec) -> Pairs:
        rank, size = mesh.rank("tp"), mesh.size("tp")
        count = size * per_rank
        mine = [rank + size * i for i in range(per_rank)]
        if schedule is ScheduleZBVZeroBubble:
            mine = [rank, count - 1 - rank]
        parts = {i: network(1, seed=100 * i) for i in mine}
        stages = [PipelineStage(parts[i], i, count, torch.device("cpu"), group=mesh["tp"]) for i in mine]
        if not opens:
            for stage in stages:
                stage._get_init_p2p_neighbors_ops = lambda: []
        runner = schedule(
            stages[0] if per_rank == 1 else stages,
            n_microbatches=MICROBATCHES,
            loss_fn=lambda y, target: (y * target).sum(),
            scale_grads=False,
        )
        x, target = integers(2 * MICROBATCHES, 4, seed=7), integers(2 * MICROBATCHES, 4, seed=8).abs() + 1
        runner.step(*([x] if 0 in mine else []), **({"target": target} if count - 1 in mine else {}))
        model = nn.Sequential(*[network(1, seed=100 * i) for i in range(count)])
        (model(x) * target).sum().backward()
        for i in mine:
            yield [p.grad for p in parts[i].parameters()], [p.grad for p in model[i].parameters()]

    body.__name__ = schedule.__name__
    return body


WRAPPERS = (dtensors, fully_sharded, data_parallel)
SCHEDULES = (
    (ScheduleGPipe, 1),
    (Schedule1F1B, 1),
    (ScheduleInterleaved1F1B, 2),
    (ScheduleInterleavedZeroBubble, 2),
    (ScheduleZBVZeroBubble, 2),
)
PIPELINES = tuple(pipeline(*each) for each in SCHEDULES)
# The first messages of torch 2.11's pipelines go to the rank itself too, which gloo rejects.
ON_BOTH_ENGINES = tuple(pipeline(*each, opens=not torch.__version__.startswith("2.11.")) for each in SCHEDULES)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("body", (*WRAPPERS, *ON_BOTH_ENGINES), ids=lambda body: body.__name__)
def test_lockstep_and_gloo_agree(body, world):
    agree(body, {"tp": world})


@pytest.mark.parametrize("mesh", ({"dp": 2, "cp": 2}, {"dp": 1, "cp": 2}))
def test_two_axes(mesh):
    agree(two_axes, mesh)


@pytest.mark.parametrize("body", (*WRAPPERS, *PIPELINES), ids=lambda body: body.__name__)
def test_world_of_one_takes_the_same_path(body):
    verify(body, "lockstep", {"tp": 1})


@pytest.mark.fast_values(7)
@pytest.mark.parametrize("schedule", (1, 2, 3))
@pytest.mark.parametrize("body", (*WRAPPERS, *PIPELINES), ids=lambda body: body.__name__)
def test_values_do_not_depend_on_the_interleaving(body, schedule):
    verify(body, "lockstep", {"tp": 4}, schedule=schedule)


def test_the_pipelines_gradients_are_not_all_zero():
    model = nn.Sequential(*[network(1, seed=100 * i) for i in range(8)])
    model(integers(2 * MICROBATCHES, 4, seed=7)).sum().backward()
    assert all(bool(p.grad.any()) for p in model.parameters())
