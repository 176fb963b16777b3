"""Whether a thread is inside torch.compile or Triton's compiler, which may take a minute at first and is no stall.

So may the choice of a kernel's settings, for each of which Triton compiles and times it.
"""

from __future__ import annotations

import sys

from parity_tests.harness.run.ledger import is_plumbing

LIMIT_S = 600.0  # for a compilation, after which the rank is stalled all the same
COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/triton/compiler/", "/triton/runtime/build.py")
TUNER = ("/triton/runtime/autotuner.py", "_bench")  # its other functions are on the way to each launch


def is_compiling(thread: int | None) -> bool:
    """Whether the innermost frame that is no library's has called the compiler.

    A frame of the user inside one of the compiler's is code that has been compiled, and runs.
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
