"""What a trace is made of: the tensors that enter and leave each module, there and back, in the order of execution.

An event is (module, `in` or `out`): the first floating tensor that a call takes, or what it returns. Forward it has a
value; backward, where events come in the reverse order, the gradient that flows through this call alone.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

IN, OUT = "in", "out"
LOSS, NORM = "loss", "norm of the gradient"  # numbers of the full model: the last of forward, the last of all


class Event(NamedTuple):
    """One end of one module's call number `call`."""

    module: str
    end: str
    call: int = 0

    def home(self, phase: str, called: Container[str]) -> str:
        """The module in which a first difference here was made, of those that are called; "" is the model itself.

        What enters a module is its parent's doing, what leaves it its own; of gradients, the other way round.
        """
        is_of_module = (self.end == OUT) == (phase == "forward")
        home = self.module if is_of_module else self.module.rpartition(".")[0]
        while home and home not in called:
            home = home.rpartition(".")[0]
        return home
