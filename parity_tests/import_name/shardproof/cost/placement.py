"""The hosts of a mesh's ranks: the last axis varies fastest, and each host takes the next ranks until it is full."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class Placement:
    """The group of an axis that spans most hosts; among equal groups, the one with the fewest ranks on a host."""

    ranks: int
    hosts: int
    fewest: int  # the fewest ranks that the group has on any of its hosts


def hosts_of(mesh: Mapping[str, int], ranks_per_host: int) -> int:
    """The number of hosts that a mesh needs; the last may be partly used."""
    return -(-math.prod(mesh.values()) // ranks_per_host)


def placement(mesh: Mapping[str, int], axis: str, ranks_per_host: int) -> Placement:
    """How the groups of `axis` lie on hosts. Memory and time grow with the number of ranks, not of pairs."""
    axes, size = list(mesh), mesh[axis]
    hosts = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values())) // ranks_per_host
    groups = np.moveaxis(hosts, axes.index(axis), -1).reshape(-1, size)
    # 1. Every pair of a group and one of its hosts, with the number of ranks there.
    count = int(hosts.max()) + 1
    keys, ranks = np.unique(np.arange(len(groups))[:, None] * count + groups, return_counts=True)
    # 2. For each group the number of its hosts, and the fewest ranks on one of them.
    firsts = np.searchsorted(keys, np.arange(len(groups)) * count)
    spans = np.diff([*firsts, len(keys)])
    fewest = np.minimum.reduceat(ranks, firsts)
    # 3. The group with the longest way for its messages.
    worst = int(np.lexsort((fewest, -spans))[0])
    return Placement(size, int(spans[worst]), int(fewest[worst]))
