"""One process group world for each rank's thread, in a process that has only one.

c10d keeps the default group and the maps of groups in one module-level object. During a run a proxy replaces it: each
rank's thread sees its own object, any other thread the process's.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from torch._C import _distributed_c10d as c_api
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engines import creation, threads

if TYPE_CHECKING:  # this file needs only torch: `watch` works without the other packages
    from shardproof.engines.ledger import LedgerRow
    from shardproof.engines.lockstep.exchange import Exchange

# On a backend with this name DeviceMesh is distinct for each thread, which keeps DTensor's caches apart.
BACKEND = "threaded"
_GLOBALS = ("_world", "_backend", "_default_pg_init_method", "_new_process_group_helper", creation.MAKER)
_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
_here = threading.local()
_identities = count(1)


class RankWorld:
    """The groups of one rank, under c10d's names for them, and the exchange that they send into."""

    pg_config_info = c10d._World.pg_config_info

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank, self.identity = exchange, rank, next(_identities)
        self.default_pg: dist.ProcessGroup | None = None
        self.group_count = 0
        self.pg_map: dict[dist.ProcessGroup, Any] = {}
        self.pg_names: dict[dist.ProcessGroup, Any] = {}
        self.pg_group_ranks: dict[dist.ProcessGroup, Any] = {}
        self.pg_backend_config: dict[dist.ProcessGroup, Any] = {}
        self.pg_to_tag: dict[dist.ProcessGroup, Any] = {}
        self.tags_to_pg: dict[str, list[dist.ProcessGroup]] = {}
        self.pg_coalesce_state: dict[dist.ProcessGroup, Any] = {}
        self.comms: list[Any] = []
        self.creations: Counter[str] = Counter()  # of groups in this run
        self.left: WeakSet[dist.ProcessGroup] = WeakSet()  # of earlier runs; a function may keep them
        self.listeners: list[Callable[[LedgerRow], None]] = []  # called with each row of this rank

    def mark(self) -> None:
        """Remember the groups that exist now."""
        self._marked = {name: dict(getattr(self, name)) for name in _TABLES}
        self._marked_tags = {tag: list(groups) for tag, groups in self.tags_to_pg.items()}
        self._marked_rest = self.default_pg, self.group_count
        self.creations.clear()

    def restore(self, mesh: DeviceMesh | None = None) -> None:
        """Restore the groups and names of `mark`, so that the next example finds the same.

        Axes that an example flattened on the shared mesh stay, because the mesh and DTensor's caches still name them.
        """
        self.pg_coalesce_state.clear()
        self.creations.clear()
        if mesh is not None and self.default_pg is self._marked_rest[0]:
            self._keep(flattened(mesh))
        permanent = self._marked["pg_names"]
        if self.pg_names == permanent and self._marked_rest == (self.default_pg, self.group_count):
            return
        for group, name in self.pg_names.items():
            if group not in permanent:
                self.left.add(group)
                c_api._unregister_process_group(name)
        for group, name in permanent.items():
            if group not in self.pg_names:
                c_api._register_process_group(name, group)
        for name in _TABLES:
            getattr(self, name).clear()
            getattr(self, name).update(self._marked[name])
        self.tags_to_pg.clear()
        self.tags_to_pg.update({tag: list(groups) for tag, groups in self._marked_tags.items()})
        self.default_pg, self.group_count = self._marked_rest

    def _keep(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Mark these as well; their names are not given to new groups."""
        new = [group for group in groups if group not in self._marked["pg_names"]]
        if not new:
            return
        for name in _TABLES:
            table = getattr(self, name)
            self._marked[name].update({group: table[group] for group in new if group in table})
        for tag, tagged in self.tags_to_pg.items():
            self._marked_tags.setdefault(tag, []).extend(group for group in tagged if group in new)
        self._marked_rest = self.default_pg, self.group_count


class _Switchboard:
    """Reads and writes the calling thread's world."""

    def __init__(self, process_world: Any) -> None:
        object.__setattr__(self, "_process_world", process_world)

    def _mine(self) -> Any:
        return current() or object.__getattribute__(self, "_process_world")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mine(), name, value)


class _Identities:
    """Replaces `threading` in DeviceMesh, which compares thread ids.

    Python reuses the ids of threads that have ended.
    """

    def get_ident(self) -> int:
        world = current()
        return threading.get_ident() if world is None else world.identity

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


def flattened(mesh: DeviceMesh) -> set[dist.ProcessGroup]:
    """Groups of the flattened axes of a root mesh."""
    return {flat.get_group() for flat in getattr(mesh, "_flatten_mapping", {}).values()}


def enter(world: RankWorld) -> None:
    """Make the calling thread this rank."""
    _here.world = world


def here() -> RankWorld:
    """The calling rank's world."""
    return _here.world


def current() -> RankWorld | None:
    """The calling thread's world, or None outside lockstep."""
    return getattr(_here, "world", None)


def is_installed() -> bool:
    """Whether a run is active."""
    return isinstance(c10d._world, _Switchboard)


def _on_lockstep(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap c10d's group constructor; on a rank's thread it ignores the named backend.

    A gloo group waits in its constructor for its peers, and their threads wait for their turn.
    """

    @functools.wraps(new_group)
    def on_lockstep(size: int, rank: int, ranks: Any, backend: Any, *rest: Any, **options: Any) -> Any:
        if current() is not None:
            backend = dist.Backend(BACKEND)
            options["backend_options"] = None  # options of the named backend
        return new_group(size, rank, ranks, backend, *rest, **options)

    return on_lockstep


def _creations() -> tuple[Counter[str], creation.Issue] | None:
    world = current()
    return None if world is None else (world.creations, world.exchange.creation)


def _owner() -> threads.Owner | None:
    world = current()
    return None if world is None else (nullcontext, functools.partial(world.exchange.in_a_thread, world.rank))


@contextmanager
def installed(make_group: Callable[..., dist.ProcessGroup]) -> Iterator[None]:
    """Worlds by thread, and `make_group` as the backend; restores everything on leaving."""
    originals = {name: getattr(c10d, name) for name in _GLOBALS}
    plugin = dist.Backend._plugins.get(BACKEND.upper())
    hook, stream = sys.excepthook, torch.default_generator.get_state()
    dist.Backend.register_backend(BACKEND, make_group, extended_api=True, devices=["cpu"])
    c10d._world = _Switchboard(originals["_world"])
    c10d._new_process_group_helper = _on_lockstep(originals["_new_process_group_helper"])
    setattr(c10d, creation.MAKER, creation.reported(originals[creation.MAKER], _creations))
    torch.distributed.device_mesh.threading = _Identities()  # pyright: ignore
    c_api._set_thread_isolation_mode(True)  # pyright: ignore
    try:
        with threads.thread_owners(_owner):
            yield
    finally:
        c_api._set_thread_isolation_mode(False)  # pyright: ignore
        torch.distributed.device_mesh.threading = threading  # pyright: ignore
        for name, value in originals.items():
            setattr(c10d, name, value)
        if plugin is None:
            del dist.Backend._plugins[BACKEND.upper()]
        else:
            dist.Backend._plugins[BACKEND.upper()] = plugin
        sys.excepthook = hook
        torch.default_generator.set_state(stream)
