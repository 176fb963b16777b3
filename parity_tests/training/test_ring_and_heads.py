"""The mesh of usp attention, and a training step on it."""

import pytest
import torch.distributed as dist

from shardproof import CaseSpec
from shardproof.engines.engines import run
from shardproof.tracing.comparison import first
from shardproof.training.ring_and_heads import ring_and_heads
from shardproof.training.run import SIZES, Run
from shardproof.training.traced import trace, trace_reference

SMALL = {"streams": 2, "length": 48, "sizes": {**SIZES, "layers": ("attention",)}, "attention": "usp"}
# Ranks of cp that exchange heads stand side by side; the ring goes from one such group to the next.
SHAPES = {1: [[0]], 2: [[0, 1]], 3: [[0, 1, 2]], 4: [[0, 1], [2, 3]], 6: [[0, 1], [2, 3], [4, 5]]}


@pytest.fixture(scope="module")
def reference_trace():
    return trace_reference(Run(mesh={}, **SMALL))


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("cp", SHAPES)
def test_the_ranks_of_cp_are_a_ring_of_groups(cp):
    def body(mesh, case):
        rings = ring_and_heads(mesh)
        ranks = dist.get_process_group_ranks(mesh["cp"])
        return rings.mesh.tolist() == [[ranks[i] for i in row] for row in SHAPES[cp]]

    assert all(run(body, CaseSpec(scheme="ring", mesh={"dp": 2, "cp": cp, "tp": 1})).results)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"cp": 2, "tp": 2}, {"cp": 3}, {"dp": 2, "cp": 2}, {"cp": 4}])
def test_every_tensor_is_equal(reference_trace, mesh):
    compared = trace(Run.on(mesh, **SMALL), reference_trace, "lockstep")
    assert first(compared) is None and len(compared) > 40


@pytest.mark.slow
def test_processes_give_the_same(reference_trace):
    assert first(trace(Run.on({"cp": 4}, **SMALL), reference_trace, "gloo")) is None
