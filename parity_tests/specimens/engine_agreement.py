"""Bodies that state their own expectations: run one on an engine and check that every pair is equal.

A body yields (got, want) pairs on each rank. Values are small integers, so that every order of summation gives the
same bits; names are as in the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.ledger import RunResult

Pairs = Iterator[tuple[Any, Any]]
Body = Callable[[Any, CaseSpec], Pairs]


def named(module: Any, *names: str) -> Callable[..., Any]:
    """The function under the first of its names that this torch has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


all_gather = named(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter = named(dist, "reduce_scatter_single", "reduce_scatter_tensor")


def plain(value: Any) -> Any:
    """Tensors as dtype, shape and list, so that equality means bits and kinds."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def verify(body: Body, engine: str, mesh: dict[str, int], **more: Any) -> RunResult:
    """Run the body; on every rank all pairs must be equal, and there must be at least one."""

    def ranks(mesh: Any, case: CaseSpec) -> list:
        return [(plain(got), plain(want)) for got, want in body(mesh, case)]

    ranks_run = run(ranks, CaseSpec(body.__name__, mesh, **more), engine)
    for rank, pairs in enumerate(ranks_run.results):
        if not pairs:
            raise AssertionError(f"{body.__name__}: rank {rank} compared nothing")
        for got, want in pairs:
            if got != want:
                raise AssertionError(f"{body.__name__}: rank {rank} got {got}, wants {want}")
    return ranks_run


def agree(body: Body, mesh: dict[str, int]) -> None:
    """Lockstep and gloo: the same values, and the same rows in every rank's ledger."""
    ours, theirs = (verify(body, engine, mesh) for engine in ("lockstep", "gloo"))
    for rank in range(len(ours.results)):
        mine, other = ours.ledger.of(rank), theirs.ledger.of(rank)
        if mine != other:
            rows = "\n".join(f"{a}\n{b}" for a, b in zip(mine, other, strict=False) if a != b)
            raise AssertionError(f"{body.__name__}: rank {rank} has {len(mine)} and {len(other)} rows\n{rows}")


def initial_tensor(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 3)) -> Tensor:
    """A rank's initial tensor, different on each."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + rank).to(dtype)


def all_held(mesh: Any, **more: Any) -> list[Tensor]:
    return [initial_tensor(rank, **more) for rank in range(mesh.size("tp"))]
