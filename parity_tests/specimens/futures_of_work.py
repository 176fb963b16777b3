"""Functions that take the future of an all-reduce: some wait for it, others only hold it."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def started(x: torch.Tensor, group: Any) -> dist.Work:
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    return work


def future_of(mesh: Any) -> Any:
    return started(torch.ones(3), mesh["tp"]).get_future()


def only_takes_it(mesh: Any, case: Any) -> None:
    future_of(mesh)


def only_continues_it(mesh: Any, case: Any) -> None:
    future_of(mesh).then(lambda future: future.value())


def only_collects_it(mesh: Any, case: Any) -> None:
    torch.futures.collect_all([future_of(mesh)])


def waits(mesh: Any, case: Any) -> None:
    future_of(mesh).wait()


def waits_for_what_follows(mesh: Any, case: Any) -> None:
    future_of(mesh).then(lambda future: future.value()).wait()


def waits_for_all(mesh: Any, case: Any) -> None:
    torch.futures.wait_all([future_of(mesh)])


def waits_for_the_work_too(mesh: Any, case: Any) -> None:
    work = started(torch.ones(3), mesh["tp"])
    work.get_future()
    work.wait()


def asks_until_it_is_done(mesh: Any, case: Any) -> None:
    future = future_of(mesh)
    while not future.done():
        pass


def is_called_back(mesh: Any, case: Any) -> None:
    future_of(mesh).add_done_callback(lambda future: None)


def returns_the_future(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return started(bucket.buffer(), group).get_future().then(lambda done: done.value()[0])


def returns_another_future(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    started(bucket.buffer(), group).get_future()
    other: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    other.set_result(bucket.buffer())
    return other


def _backward(mesh: Any, hook: Callable | None) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=mesh["tp"])
    if hook is not None:
        model.register_comm_hook(mesh["tp"], hook)
    model(torch.ones(1, 2)).sum().backward()


def waits_in_ddp(mesh: Any, case: Any) -> None:
    _backward(mesh, None)


def waits_in_a_hook(mesh: Any, case: Any) -> None:
    _backward(mesh, returns_the_future)


def forgets_it_in_a_hook(mesh: Any, case: Any) -> None:
    _backward(mesh, returns_another_future)


def sums_in_a_callback(mesh: Any, case: Any) -> None:
    """Rank 0 waits for rank 1, so that its callback runs in a thread of the backend."""
    time.sleep(0.3 * mesh.rank("tp"))
    future_of(mesh).then(lambda done: future_of(mesh).wait()).wait()


NEVER_WAIT = (only_takes_it, only_continues_it, only_collects_it, forgets_it_in_a_hook)
WAIT = (
    waits,
    waits_for_what_follows,
    waits_for_all,
    waits_for_the_work_too,
    asks_until_it_is_done,
    is_called_back,
    waits_in_ddp,
    waits_in_a_hook,
    sums_in_a_callback,
)
