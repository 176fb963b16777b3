"""Whether a thread is inside torch.compile or Triton's compiler: its first call may take a minute and is not a stall.

Neither is Triton's autotuning, which compiles and times a kernel for each of its settings.
"""

from __future__ import annotations

import sys

from shardproof.engines.ledger import is_plumbing

LIMIT_S = 600.0  # a rank that compiles longer counts as stalled
COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/triton/compiler/", "/triton/runtime/build.py")
TUNER = ("/triton/runtime/autotuner.py", "_bench")  # its other functions are also on the stack of a plain launch


def is_compiling(thread: int | None) -> bool:
    """Whether the innermost frame outside libraries has called the compiler.

    A user's frame inside one of the compiler's is compiled code, which is running.
    """
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in COMPILERS) or (TUNER[0] in name and frame.f_code.co_name == TUNER[1]):
            return True
        if not is_plumbing(name) and "site-packages" not in name:
            return False
        frame = frame.f_back
    return False
