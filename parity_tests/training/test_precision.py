"""A run in bfloat16: within its budgets where nothing is wrong, beyond them where something is."""

import pytest
import torch

from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.located import __main__ as located
from shardproof.tracing.comparison import first
from shardproof.training import session
from shardproof.training.follow import ReferenceSteps
from shardproof.training.judged import PROMISED
from shardproof.training.precision import STORED_DTYPE, policy
from shardproof.training.run import DTYPES, SIZES, Run
from shardproof.training.traced import trace, trace_reference

SMALL = {"streams": 2, "length": 48, "sizes": {**SIZES, "layers": ("attention", "mamba")}, "dtype": "bfloat16"}
MESHES = [
    ({"dp": 2, "cp": 2}, {"mamba": "state", "attention": "usp"}),
    ({"cp": 2, "tp": 2}, {"mamba": "hidden", "attention": "ulysses"}),
]


@pytest.fixture(scope="module")
def reference_trace():
    return trace_reference(Run(mesh={}, **SMALL))


@pytest.mark.slow
def test_no_mesh_changes_a_number():
    mesh, how = MESHES[0]
    steps = session.followed(Run.on(mesh, steps=2, **SMALL, **how), ReferenceSteps(), "lockstep")
    assert [step.wrong for step in steps] == [[], []]
    assert steps[0].rows["loss"].error > PROMISED  # an error that no float64 run has


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "how"), MESHES)
def test_every_tensor_is_within_its_budget(reference_trace, mesh, how):
    assert first(trace(Run.on(mesh, **SMALL, **how), reference_trace, "lockstep")) is None


# Bugs, and the layers in which they are.
CAUGHT = {
    "attention over padding": ("attention",),
    "several ranks' inconsistent constants": ("attention", "mamba"),
    "a loss over the last microbatch's count": ("attention", "mamba"),
}


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("name", CAUGHT)
def test_a_bug_is_located_in_its_module(name):
    (bug,) = [bug for bug in CATALOGUE if bug.name == name]
    small = {**SMALL, "sizes": {**SIZES, "layers": CAUGHT[name]}}
    tried = [Run.on(mesh, **small, **how) for mesh, how in MESHES]
    assert located.located(bug, trace_reference(Run(mesh={}, **small)), tried).is_right


def test_sums_and_weights_are_float32():
    assert set(STORED_DTYPE) == set(DTYPES)
    dtypes = policy("bfloat16")
    assert (dtypes.param_dtype, dtypes.reduce_dtype, STORED_DTYPE["bfloat16"]) == (
        torch.bfloat16,
        torch.float32,
        "float32",
    )
    assert {policy(dtype).param_dtype for dtype in ("float32", "float64")} == {None}
