"""What a run ends in: an exit status, and for a user's mistake one sentence on standard error.

Exit status: 0 all equal; 1 a mismatch; 2 usage or declaration; 3 a rank failed; 4 nothing ran; 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

EQUAL, MISMATCH, USAGE, FAILED, NOTHING, INTERRUPTED = 0, 1, 2, 3, 4, 130


def guarded(call: Callable[[], Any]) -> int:
    """The status that a call returns; 2 for a user's mistake and 4 for what is absent here, each said in a sentence."""
    from parity_tests.harness.discover import UnusableTarget
    from parity_tests.harness.engines.failure import NotRun
    from parity_tests.harness.oracle import ReferenceFailure

    try:
        return call() or EQUAL
    except NotRun as reason:
        _complain(f"not run: {reason}")
        return NOTHING
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (UnusableTarget, ReferenceFailure, ValueError, TypeError, ImportError) as error:
        _complain(str(error))
    except (KeyboardInterrupt, SystemExit) as stop:  # typer makes an exit of the first
        if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
            raise
        _complain("interrupted; what was not printed was not judged")
        return INTERRUPTED
    return USAGE


def _complain(sentence: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"shardproof: {sentence}", style="red", markup=False, highlight=False)
