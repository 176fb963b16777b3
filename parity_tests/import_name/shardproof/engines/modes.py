"""Torch's modes that a file leaves on, or that a caller is in: they would change the numbers of a verdict.

Under a FakeTensorMode the inputs have no numbers, and another mode could make them all 0. A thread has modes of its
own, so that ranks of lockstep are outside these too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import overrides
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outside_modes() -> Iterator[None]:
    """A block outside all modes but the default device, which is one of torch's modes too."""
    before = [overrides._pop_mode() for _ in range(overrides._len_torch_function_stack())][::-1]
    for mode in before:
        if isinstance(mode, DeviceContext):
            overrides._push_mode(mode)
    try:
        with _disable_current_modes():
            yield
    finally:
        while overrides._len_torch_function_stack():
            overrides._pop_mode()
        for mode in before:
            overrides._push_mode(mode)
