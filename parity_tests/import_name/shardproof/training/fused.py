"""The parameters that hold two matrices, one above the other."""


def has_halves(name: str) -> bool:
    """Whether the parameter is a stack of experts' gate and up projections, gate's rows first."""
    return name.endswith(".gate_up_proj")
