"""`show(x)` draws for each element a rank that has it in its local tensor."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from parity_tests.specimens.page_reader import read
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.report.owner_map import MAX_COLUMNS, MAX_ROWS
from shardproof.report.show import show

MESH = {"dp": 2, "tp": 3}


def on_ranks(placements, shape):
    """Each rank's picture of a tensor with distinct numbers, and its local numbers."""

    def picture(mesh, case):
        x = distribute_tensor(torch.arange(int(np.prod(shape))).reshape(shape), mesh.device_mesh, placements)
        drawn = show(x)
        return str(drawn), drawn.ranks, drawn._repr_html_(), x.to_local().numpy()

    return run(picture, CaseSpec("show", MESH)).results


@pytest.mark.parametrize(
    "placements, shape",
    [
        ((Shard(0), Replicate()), (5, 4)),
        ((Shard(1), Shard(0)), (4, 5)),
        ((Shard(0), Shard(0)), (7, 2)),
        ((Replicate(), Shard(0)), (2,)),
        ((Shard(2), Shard(1)), (2, 3, 4)),
    ],
)
def test_the_owner_of_each_element_is_a_rank_that_has_it(placements, shape):
    results = on_ranks(placements, shape)
    expected = np.full(int(np.prod(shape)), -1)
    for rank in reversed(range(6)):
        expected[results[rank][3].ravel()] = rank
    for _, ranks, *_ in results:
        assert ranks.tolist() == expected.reshape(-1, shape[-1]).tolist()


def test_the_text_has_a_line_for_each_axis():
    text = on_ranks((Shard(0), Replicate()), (4, 2))[0][0]
    assert text.splitlines() == ["int64[4, 2] over dp=2, tp=3", "  dp: S(0)  0011", "  tp: R     the same on each rank"]


def test_the_page_has_a_strip_for_each_axis_that_shards():
    tree = read(on_ranks((Shard(0), Shard(1)), (4, 3))[0][2])
    assert [len(drawing.all("rect")) for drawing in tree.all("svg")] == [2, 3, 12]


def test_terms_of_a_sum_are_named():
    def picture(mesh, case):
        return str(show(DTensor.from_local(torch.ones(2), mesh.device_mesh, [Partial(), Partial()])))

    lines = run(picture, CaseSpec("show", MESH)).results[0].splitlines()
    assert [line.partition("  each")[2] for line in lines[1:]] == [" rank has a term (sum)"] * 2


def test_a_large_weight_is_sampled():
    def picture(mesh, case):
        local = torch.empty(500, 1000, device="meta")
        return show(DTensor.from_local(local, mesh.device_mesh, [Shard(0), Replicate()], run_check=False))

    drawn = run(picture, CaseSpec("show", MESH)).results[0]
    assert drawn.is_sampled and drawn.ranks.size <= MAX_ROWS * MAX_COLUMNS and set(drawn.ranks.ravel()) == {0, 3}


def test_only_dtensors_can_be_shown():
    with pytest.raises(TypeError) as caught:
        show(torch.ones(2))
    assert str(caught.value) == "show: tensor is a Tensor, which has no record of other ranks; pass a DTensor"
