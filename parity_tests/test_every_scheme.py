"""Every built-in scheme where its own tests need not look: inside a sub-group, and on processes that really send."""

import pytest

from parity_tests.harness.declare.discover import built_in
from parity_tests.harness.verdict import judge

SCHEMES = {scheme.key: scheme for scheme in built_in()}


@pytest.mark.parametrize("key", SCHEMES)
def test_a_scheme_knows_no_world_but_its_mesh(key):
    report = SCHEMES[key].verify(examples=3, inside_subgroup=True)
    is_tie = report.verdict == "undecided" and report.undecided_examples == 1  # one of three is too many for a pass
    assert report.ok or is_tie, str(report)
    assert report.case.mesh["spare"] == 2


@pytest.mark.parametrize("key", SCHEMES)
def test_a_scheme_on_gloo(key):
    report = SCHEMES[key].verify(engine="gloo", examples=4)
    assert report.ok, str(report)


# A module that a scheme builds in its call has inference tensors for parameters, which DTensor and FSDP do not take;
# one that runs its own backward needs gradients.
OF_MODULES = ("parity_tests.parallelizer.", "parity_tests.pipelining.", "parity_tests.models.")


def is_of_a_module(key):
    return key.startswith(OF_MODULES) or SCHEMES[key].module is not None


@pytest.mark.parametrize("key", [key for key in SCHEMES if not is_of_a_module(key)])
def test_a_scheme_in_inference_mode(key):
    """It is not drawn by default, since other projects' functions need not allow it; ours do."""
    report = judge(SCHEMES[key], SCHEMES[key].case(seed=0).replace(calls={"inference_mode": True}))
    assert report.ok, str(report)


def test_a_scheme_declared_by_a_wrapper_is_among_them():
    assert "colwise_linear" in {scheme.name for scheme in SCHEMES.values()}
