"""Keeps ranks of lockstep from crashing torch 2.11, where it is built for CUDA and the machine has no GPU.

Every FakeTensorMode (DTensor's propagation and torch.compile enter one) replaces torch's CUDA guard by a fake one
there, once in a process. torch 2.11 stores a pointer to an object of the thread that entered first: after that thread
has ended, as a rank's does, the next FakeTensorMode of any thread is a segmentation fault. Seen on 2.11.0+cu130, not
on 2.14.1+cu130; torch fixed it in pull request 178950.
"""

from __future__ import annotations

import functools
import threading

import torch


@functools.cache
def keep() -> None:
    """Let a thread that never ends own the fake guard; call it before the first rank. Once in a process."""
    # device_count asks NVML. The call below would start the CUDA driver, after which no process may be forked.
    if not torch.cuda._is_compiled() or torch.cuda.device_count():
        return
    is_set = threading.Event()

    def own() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        is_set.set()
        threading.Event().wait()

    threading.Thread(target=own, name="lockstep-device-guard", daemon=True).start()
    is_set.wait()
