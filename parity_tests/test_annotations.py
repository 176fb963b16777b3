"""The shapes and dtypes in production's annotations are true while schemes run."""

import subprocess
import sys

import pytest
from beartype import beartype
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor, ones

from shardproof.places import ROOT


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_schemes_keep_to_the_annotations():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "parity_tests.annotated_run"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert run.stdout.rstrip().endswith("examples keep to the annotations")


def test_an_annotation_that_is_wrong_is_seen():
    @jaxtyped(typechecker=beartype)
    def rows(x: Float[Tensor, "n d"]) -> Float[Tensor, "d n"]:
        return x

    with pytest.raises(TypeCheckError, match="return value"):
        rows(ones(2, 3))
