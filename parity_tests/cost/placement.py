"""Where the ranks of a mesh stand: the last axis varies fastest, and a host takes the next ranks until it is full."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class Placement:
    """The group of an axis that spans most hosts; of several, one with fewest ranks on some host."""

    ranks: int
    hosts: int
    fewest: int  # ranks of the group on the host that has the fewest of those that it spans


def hosts_of(mesh: Mapping[str, int], ranks_per_host: int) -> int:
    """How many hosts a mesh fills, the last one perhaps in part."""
    return -(-math.prod(mesh.values()) // ranks_per_host)


def placement(mesh: Mapping[str, int], axis: str, ranks_per_host: int) -> Placement:
    """How the groups of `axis` lie on hosts. Memory and time grow with the ranks, and not with pairs of them."""
    axes, size = list(mesh), mesh[axis]
    hosts = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values())) // ranks_per_host
    groups = np.moveaxis(hosts, axes.index(axis), -1).reshape(-1, size)
    # 1. Every pair of a group and a host that it has ranks on, with their number.
    count = int(hosts.max()) + 1
    keys, ranks = np.unique(np.arange(len(groups))[:, None] * count + groups, return_counts=True)
    # 2. For each group the hosts that it spans, and the fewest ranks on one of them.
    firsts = np.searchsorted(keys, np.arange(len(groups)) * count)
    spans = np.diff([*firsts, len(keys)])
    fewest = np.minimum.reduceat(ranks, firsts)
    # 3. The group whose messages take the longest way.
    worst = int(np.lexsort((fewest, -spans))[0])
    return Placement(size, int(spans[worst]), int(fewest[worst]))
