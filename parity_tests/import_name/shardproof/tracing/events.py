"""The parts of a trace: tensors that enter and leave each module, forward and backward, in order of execution.

An event is (module, `in` or `out`): the first floating tensor among a call's arguments, or its result. Forward it has a
value; backward, where events come in reverse order, the gradient through this call alone.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

IN, OUT = "in", "out"
LOSS, NORM = "loss", "norm of the gradient"  # numbers of the full model: the loss ends forward, the norm ends the trace


class Event(NamedTuple):
    """One end of call number `call` of one module."""

    module: str
    end: str
    call: int = 0

    def home(self, phase: str, called: Container[str]) -> str:
        """The called module that is to blame if the first difference is here; "" is the model itself.

        A module's parent made its input, and the module made its output; for gradients it is the reverse.
        """
        is_of_module = (self.end == OUT) == (phase == "forward")
        home = self.module if is_of_module else self.module.rpartition(".")[0]
        while home and home not in called:
            home = home.rpartition(".")[0]
        return home
