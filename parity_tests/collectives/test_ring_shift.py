"""Properties of ring_shift beyond the adjoint identity of test_adjoint."""

import numpy as np
import torch

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.collectives import ring_shift, start_ring_shift


def test_as_many_steps_as_ranks_come_home():
    def body(mesh, case):
        x = torch.arange(6.0).reshape(2, 3) + 10 * mesh.rank("x")
        y = x
        for _ in range(case.world):
            y = ring_shift(y, mesh["x"])
        return torch.equal(x, y)

    assert all(run(body, CaseSpec(scheme="collectives", mesh={"x": 4})).results)


def test_it_shifts_inside_a_subgroup():
    def body(mesh, case):
        return ring_shift(torch.tensor([float(torch.distributed.get_rank())]), mesh["cp"]).item()

    assert run(body, CaseSpec(scheme="collectives", mesh={"cp": 2, "tp": 2})).results == (2.0, 3.0, 0.0, 1.0)


def test_several_tensors_travel_in_one_batch():
    def body(mesh, case):
        rank = mesh.rank("x")
        arriving, works = start_ring_shift(
            [torch.full((2,), float(rank)), torch.full((3, 1), rank, dtype=torch.int64)], mesh["x"], -1
        )
        for work in works:
            work.wait()
        return [x.numpy() for x in arriving]

    ranks = run(body, CaseSpec(scheme="collectives", mesh={"x": 3}))
    for rank, (floats, integers) in enumerate(ranks.results):
        np.testing.assert_array_equal(floats, [(rank + 1) % 3] * 2)
        np.testing.assert_array_equal(integers, [[(rank + 1) % 3]] * 3)
    assert [row.op for row in ranks.ledger.of(0)] == ["send", "send", "recv", "recv"]
