"""The parity test of a file fails for a wrong scheme, on each engine that it names."""

import pytest

from parity_tests.parity import parity
from shardproof import scheme, values
from shardproof.report.report import VerdictError


@scheme(
    reference=lambda x: 2 * x,
    mesh={"tp": (1, 2)},
    inputs={"x": "b v/tp"},
    outputs="b v/tp",
    draw={"x": values("normal")},
    dtypes=("float32",),
)
def tripled(mesh, x):
    return 3 * x


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_a_wrong_scheme_fails_on_each_engine(engine):
    with pytest.raises(VerdictError, match="MISMATCH"):
        parity([tripled], lockstep=2, gloo=2)(tripled, engine)
    with pytest.raises(VerdictError, match="MISMATCH"):
        parity([tripled], **{engine: 2})(tripled)
