"""Larger cases of a failing one, from which notes are tested."""

import math

from shardproof import scheme, values
from shardproof.experiments import cases

NAMES = ("x", "y", "z", "w")


def test_many_small_dims_have_a_larger_case():
    """The product of twelve dims is large, and each tensor is small."""
    specs = {name: " ".join(f"{name}{dim}" for dim in "abc") + " tp=I" for name in NAMES}
    declaration = scheme(
        reference=lambda x, y, z, w: x.sum() + y.sum() + z.sum() + w.sum(), mesh={"tp": (1, 2)},
        inputs={**specs, "x": "xa/tp xb xc"}, outputs="tp=P", draw={name: values("normal") for name in NAMES},
        dims={f"{name}{dim}": (4,) for name in NAMES for dim in "abc"},
    )(lambda mesh, x, y, z, w: x.sum() + (y.sum() + z.sum() + w.sum()) / mesh.size("tp"))  # fmt: skip
    case = declaration.case(tp=2)
    larger = cases.larger(declaration, case, 1, values=True)
    assert larger is not None and math.prod(larger.dims.values()) > cases.MAX_ELEMENTS
    assert max(math.prod(arg.shape(larger)) for arg in declaration.inputs) <= cases.MAX_ELEMENTS
