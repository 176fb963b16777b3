"""A plugin of pytest that writes which lines of a folder the tests have run, in any thread: `-p` names it."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_FOLDER, _lines = os.environ.get("LINES_OF", ""), dict[str, set[int]]()


def _record(frame: FrameType, event: str, argument: Any) -> Any:
    file = frame.f_code.co_filename
    if not file.startswith(_FOLDER):
        return None
    _lines.setdefault(file, set()).add(frame.f_lineno)
    return _record


def pytest_configure() -> None:
    threading.settrace(_record)
    sys.settrace(_record)


def pytest_unconfigure() -> None:
    sys.settrace(None)
    root = Path(_FOLDER).parent
    by_file = {Path(file).relative_to(root).as_posix(): sorted(lines) for file, lines in sorted(_lines.items())}
    Path(os.environ["LINES_TO"]).write_text(json.dumps(by_file))
