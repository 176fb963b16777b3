"""Which parameters of a run have two matrices one above the other."""


def has_halves(name: str) -> bool:
    """Whether it is a stack of experts with the rows of gate, then those of up."""
    return name.endswith(".gate_up_proj")
