"""Messages between the ranks of a torchrun job, over the rendezvous store: they arrive where groups are broken.

A message is written once under a name, in pieces, for the store takes a few MB at a time.
"""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PIECE = 4 << 20
ATTEMPT_S = 60.0


def place() -> tuple[int, int]:
    """(rank, world) as torchrun has set them. Errors: ValueError where it has not."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError as missing:
        raise ValueError(
            f"engines.launch: {missing.args[0]} is not set, so this is no torchrun job; start it with "
            "torchrun --nproc-per-node N -m shardproof in place of shardproof"
        ) from None


def connect() -> tuple[dist.Store, Channel]:
    """The store for process groups, and a channel on a connection of its own."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://")))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=ATTEMPT_S))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store, Channel(dist.PrefixStore(f"shardproof/{attempt}", own))


class Channel:
    """Named messages. A name is used once; who reads for all removes it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def put(self, name: str, message: Any) -> None:
        data = pickle.dumps(message)
        pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)]
        for i, piece in enumerate(pieces[1:], 1):
            self._store.set(f"{name}/{i}", piece)  # pyright: ignore[reportArgumentType]  (stubs know text only)
        head = len(pieces).to_bytes(4, "big") + pieces[0]
        self._store.set(name, head)  # pyright: ignore[reportArgumentType]

    def has(self, name: str) -> bool:
        return self._store.check([name])

    def add(self, name: str, amount: int = 1) -> int:
        return self._store.add(name, amount)

    def count(self, name: str) -> int:
        return self.add(name, 0)

    def get(self, name: str, *, remove: bool = False) -> Any:
        """Wait for a message, however long, and read it."""
        while True:
            try:
                self._store.wait([name], timedelta(seconds=ATTEMPT_S))
                break
            except dist.DistStoreError:
                continue
        head = self._store.get(name)
        names = [f"{name}/{i}" for i in range(1, int.from_bytes(head[:4], "big"))]
        data = head[4:] + b"".join(self._store.get(piece) for piece in names)
        if remove:
            for key in (name, *names):
                self._store.delete_key(key)
        return pickle.loads(data)
