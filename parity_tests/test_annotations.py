"""What the annotations of production say of shapes and dtypes is true while schemes run."""

import subprocess
import sys

import pytest
from beartype import beartype
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor, ones

from shardproof.declare import discover


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 8], ids=["all", "one of eight"])
def test_schemes_keep_to_the_annotations(step):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "parity_tests.annotated_run", str(step)],
        cwd=discover.PACKAGE.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert run.stdout.rstrip().endswith("examples keep to the annotations")


def test_an_annotation_that_is_wrong_is_seen():
    @jaxtyped(typechecker=beartype)
    def rows(x: Float[Tensor, "n d"]) -> Float[Tensor, "d n"]:
        return x

    with pytest.raises(TypeCheckError, match="return value"):
        rows(ones(2, 3))
