"""Collectives over one axis of two, where a rank's place in its group is not its place in the world."""

import pytest

from parity_tests.collectives import meanings
from shardproof import check_cases, scheme
from torch_impl import collectives as c

MESH = {"tp": (1, 2, 3), "dp": (1, 2)}  # tp is the outer axis: its groups are strided


@scheme(reference=meanings.identity, mesh=MESH, contract=c.all_gather, inputs={"x": "a/dp b/tp"}, outputs="a/dp b tp=I")
def gather_of_a_strided_group(mesh, x):
    return c.all_gather(x, mesh["tp"], out="I", dim=1)


@scheme(
    reference=meanings.identity,
    mesh=MESH,
    contract=c.reduce_scatter,
    inputs={"x": "a/dp b tp=P"},
    outputs="a/dp b/tp",
    sums="float32",
)
def scatter_to_a_strided_group(mesh, x):
    return c.reduce_scatter(x, mesh["tp"], dim=1)


@scheme(reference=meanings.identity, mesh=MESH, inputs={"x": "a/dp b/tp"}, outputs="a b/dp/tp")
def exchange_in_both_groups(mesh, x):
    gathered = c.all_gather(x, mesh["tp"], out="R", dim=1)
    by_dp = c.all_to_all(gathered, mesh["dp"], split_dim=1, concat_dim=0)
    width = by_dp.shape[1] // mesh.size("tp")
    return by_dp.narrow(1, mesh.rank("tp") * width, width)


@pytest.mark.parametrize(
    "declared",
    [gather_of_a_strided_group, scatter_to_a_strided_group, exchange_in_both_groups],
    ids=lambda declared: declared.name,
)
def test_parity(declared):
    check_cases(declared)
