"""Which source lines are the user's, and what they are called."""

from __future__ import annotations

import contextlib
import traceback
from functools import cache
from pathlib import Path

import torch

_PYTHON = str(Path(contextlib.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_HARNESS = str(Path(__file__).parents[1])


@cache
def is_plumbing(name: str) -> bool:
    """Whether a source file is torch's, Python's or the harness's own; the harness's tests are users of it."""
    if name.startswith((_TORCH, _HARNESS, "<frozen", "<string", "<__array")):
        return not base(name).startswith("test_")
    return (name.startswith(_PYTHON) and "site-packages" not in name) or base(name) == "typing_extensions.py"


def base(name: str) -> str:
    """A source file's name without its folder; `cell` for a notebook's."""
    return "cell" if "ipykernel" in name or name.startswith("<ipython") else name.rpartition("/")[2]


def raised_at(error: BaseException) -> str | None:
    """file:line of the innermost frame that is the user's, and no library's if there is such a frame."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    user = [(name, line) for name, line in frames if not is_plumbing(name)]
    own = [(name, line) for name, line in user if "site-packages" not in name] or user
    return f"{base(own[-1][0])}:{own[-1][1]}" if own else None


def at_users_line(error: BaseException) -> str:
    """` at file:line` of `raised_at`, to follow what was raised; nothing where no frame is the user's."""
    at = raised_at(error)
    return f" at {at}" if at else ""
