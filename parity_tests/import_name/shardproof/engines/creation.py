"""The creation of a process group: all ranks must make the same call, which torch does not check.

Every rank must make every group, with the same members and in the same order, even if it is not a member; with
`use_local_synchronization` only the members do. The groups of a mesh are made in the same way. Torch names groups by
their number, so after a difference two ranks wait for different groups under one name, or wait for ever.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.declare.case import CaseSpec
from shardproof.engines.failure import CollectiveMismatch
from shardproof.engines.ledger import Ledger, LedgerRow, call_site, phase
from shardproof.engines.protocol import disagreement

NEW_GROUP = "new_group"
MAKER = "_new_group_with_tag"  # in c10d; it makes the groups of new_group and of a mesh
ALL_RANKS, MEMBERS = "all ranks", "its members"
_parameters = inspect.signature(getattr(c10d, MAKER))

Issue = Callable[[LedgerRow], AbstractContextManager[Any]]


def reported(make: Callable[..., Any], issue: Callable[[], tuple[Counter[str], Issue] | None]) -> Callable[..., Any]:
    """c10d's `_new_group_with_tag`, made to report its row of the ledger before it makes the group.

    `issue()` gives the rank's counter of creations and a block around the creation; None outside a run.
    """

    @wraps(make)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        issued = issue() if dist.is_initialized() else None
        row = None if issued is None else _row(issued[0], _parameters.bind(*args, **kwargs).arguments)
        if issued is None or row is None:
            return make(*args, **kwargs)
        with issued[1](row):
            return make(*args, **kwargs)

    return new_group


def _row(count: Counter[str], arguments: dict[str, Any]) -> LedgerRow | None:
    """The row of this creation; None if the calling rank takes no part in it."""
    rank, everyone = dist.get_rank(), range(dist.get_world_size())
    ranks = arguments.get("ranks")
    is_sorted = arguments.get("sort_ranks", True)
    members = tuple(everyone) if ranks is None else tuple(sorted(ranks) if is_sorted else ranks)
    is_local = bool(arguments.get("use_local_synchronization"))
    if is_local and rank not in members:
        return None
    name = MEMBERS if is_local else ALL_RANKS
    count[f"{name} {members if is_local else ''}"] += 1
    return LedgerRow(
        rank=rank,
        seq=count[f"{name} {members if is_local else ''}"] - 1,
        op=NEW_GROUP,
        group=tuple(sorted(members)) if is_local else tuple(everyone),
        group_name=name,
        dtypes=(),
        shapes=(),
        bytes_in=0,
        bytes_out=0,
        phase=phase(),
        source=call_site(),
        members=members,
    )


def without_creations(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """The rows of communication."""
    return [row for row in rows if row.members is None]


def difference(case: CaseSpec | None, ledger: Ledger) -> CollectiveMismatch | None:
    """The failure if the ranks have all returned but have not made the same groups."""
    found = disagreement(Ledger([row for row in ledger.rows if row.members is not None]))
    return None if found is None else found.failure(case, ledger)
