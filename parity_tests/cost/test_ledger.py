"""For every scheme, `shardproof cost` on a small mesh equals the ledger of the ranks, to the byte."""

import inspect
from collections import Counter

import pytest

from parity_tests.cost.test_links import groups
from shardproof.cost import sheet
from shardproof.cost.candidates import Setting, candidates, lines_of
from shardproof.cost.evaluated import costs_of_ranks
from shardproof.declare.discover import built_in
from shardproof.draw.drawing import one_case
from shardproof.draw.size_choices import free_dims
from shardproof.engines.engines import run
from shardproof.engines.program import Program

SCHEMES = {scheme.key: scheme for scheme in built_in() if scheme.cost is not None}
SEEDS = (None, 1, 2)  # the standard case, and drawn ones
SHORT = {"forward": "fwd", "backward": "bwd"}


def candidate_of(scheme, seed):
    """The one candidate of a drawn mesh, with drawn sizes and options."""
    drawn = one_case(scheme, seed=seed or 0)
    sizes = {dim: drawn.dims[dim] for dim in free_dims(scheme)}
    setting = Setting(drawn.mesh, {**sizes, **drawn.options}, sheet.read("h100"), drawn.dtype, seed)
    (candidate,) = candidates(scheme, setting).candidates
    return candidate


def declared_by_rank(scheme, candidate):
    """The declared calls and bytes by rank, phase, op and group, like `issued_by_rank`."""
    calls, sizes = Counter(), Counter()
    case, costs = candidate.case, costs_of_ranks(scheme, candidate.case)
    for rank, cost in enumerate(costs * case.world if len(costs) == 1 else costs):
        for phase, op, axis, count, size in lines_of(cost, case.mesh):
            (group,) = (tuple(group) for group in groups(case.mesh, axis) if rank in group)
            calls[rank, SHORT[phase], op, group] += count
            sizes[rank, SHORT[phase], op, group] += size
    return {key: (calls[key], sizes[key]) for key in calls}


def busiest_rank(issued):
    """The most calls and the most bytes of a rank, by phase, op and the size of the group."""
    most = {}
    for (_, phase, op, group), (calls, size) in issued.items():
        before = most.get((phase, op, len(group)), (0, 0))
        most[phase, op, len(group)] = (max(before[0], calls), max(before[1], size))
    return most


def issued_by_rank(ledger):
    calls, sizes = Counter(), Counter()
    for row in ledger.rows:
        key = row.rank, row.phase, row.op, row.group
        calls[key] += 1
        sizes[key] += row.payload
    return {key: (calls[key], sizes[key]) for key in calls}


@pytest.mark.fast_values(9)
@pytest.mark.parametrize("key", SCHEMES)
def test_the_price_counts_the_issued_collectives(key):
    for seed in SEEDS:
        candidate = candidate_of(SCHEMES[key], seed)
        ranks = run(Program.of(SCHEMES[key]), candidate.case, "lockstep")
        issued = issued_by_rank(ranks.ledger)
        assert declared_by_rank(SCHEMES[key], candidate) == issued, candidate.case.json
        for line in candidate.lines:
            amounts = line.calls, line.size
            of_size = SHORT[line.phase], line.op, candidate.mesh[line.axis]
            assert len(set(candidate.mesh.values())) < len(candidate.mesh) or amounts == busiest_rank(issued)[of_size]


def test_there_are_schemes_of_two_axes_and_of_drawn_lengths():
    assert len([scheme for scheme in SCHEMES.values() if len(scheme.mesh) > 1]) > 10
    assert any("ragged" in str(arg.spec) for scheme in SCHEMES.values() for arg in scheme.inputs)


@pytest.mark.slow
def test_there_are_costs_of_each_rank_and_of_values():
    drawn = [(scheme, candidate_of(scheme, seed).case) for scheme in SCHEMES.values() for seed in SEEDS]
    unlike = {scheme.name for scheme, case in drawn if len(costs_of_ranks(scheme, case)) > 1}
    of_values = [scheme.name for scheme in SCHEMES.values() if len(inspect.signature(scheme.cost).parameters) > 1]
    assert {"routed_over_ep", "attention_over_two_axes"} <= unlike
    assert "packed_attention_by_keys" in of_values
