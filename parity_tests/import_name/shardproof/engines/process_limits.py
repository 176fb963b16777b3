"""A rank's limits of memory, files and time, which are of its process.

In a process of its own they end with the run that has set them. On lockstep the process is the command's: there a rank
raises limits and lowers none. Without memory, a thread of the command would never report its start, for which
`Thread.start` waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from shardproof.endings.exits import RANK_THREAD

LIMITS = tuple({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


def install() -> None:
    """From now on, no rank of lockstep lowers a limit of this process."""
    for name, place in (("setrlimit", 0), ("prlimit", 1)):
        call = getattr(resource, name, None)
        if call is not None and not hasattr(call, "__wrapped__"):
            setattr(resource, name, _only_raising(call, place))


def _only_raising(call: Callable[..., Any], place: int) -> Callable[..., Any]:
    @wraps(call)
    def limiting(*arguments: Any) -> Any:
        is_own = place == 0 or arguments[0] in (0, os.getpid())
        if is_own and len(arguments) == place + 2 and threading.current_thread().name.startswith(RANK_THREAD):
            limit, asked = arguments[place:]
            pairs = zip(resource.getrlimit(limit), asked, strict=True)
            arguments = (*arguments[:-1], tuple(max(pair, key=_height) for pair in pairs))
        return call(*arguments)

    return limiting


def _height(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """After this block, limits of the process are as before, or as high as the system lets them be."""
    before = {limit: resource.getrlimit(limit) for limit in LIMITS}
    try:
        yield
    finally:
        for limit, (soft, hard) in before.items():
            _restore(limit, soft, hard)


def _restore(limit: int, soft: int, hard: int) -> None:
    now = resource.getrlimit(limit)
    if now == (soft, hard):
        return
    try:
        resource.setrlimit(limit, (soft, hard))
    except (OSError, ValueError):  # only root may raise a hard limit
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (now[1], now[1]))
