"""Every built-in scheme where its own tests need not look: inside a sub-group, and on processes that really send."""

import pytest

from parity_tests.harness.declare.discover import built_in

SCHEMES = {scheme.key: scheme for scheme in built_in()}


@pytest.mark.parametrize("key", SCHEMES)
def test_a_scheme_knows_no_world_but_its_mesh(key):
    report = SCHEMES[key].verify(examples=3, inside_subgroup=True)
    assert report.ok, str(report)
    assert report.case.mesh["spare"] == 2


@pytest.mark.parametrize("key", SCHEMES)
def test_a_scheme_on_gloo(key):
    report = SCHEMES[key].verify(engine="gloo", examples=4)
    assert report.ok, str(report)


def test_a_scheme_declared_by_a_wrapper_is_among_them():
    assert "colwise_linear" in {scheme.name for scheme in SCHEMES.values()}
