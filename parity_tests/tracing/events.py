"""What a trace is made of: the tensors that enter and leave each module, there and back, in the order of execution.

An event is (module, `in` or `out`): the first floating tensor that a call takes, or what it returns. Forward it has a
value; backward, where events come in the reverse order, the gradient that flows through this call alone.
"""

from __future__ import annotations

from typing import NamedTuple

IN, OUT = "in", "out"


class Event(NamedTuple):
    """One end of one module's call number `call`."""

    module: str
    end: str
    call: int = 0

    @property
    def home(self) -> str:
        """The module in which a first difference here was made: what enters a module is its parent's doing."""
        return self.module if self.end == OUT else self.module.rpartition(".")[0]

    @property
    def home_of_gradient(self) -> str:
        """The same for the gradient: what comes back out of a module's entrance is that module's doing."""
        return self.module if self.end == IN else self.module.rpartition(".")[0]
