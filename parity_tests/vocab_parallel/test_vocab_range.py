"""Which ids a rank owns: counted off from the widths, or by DTensor's rule."""

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.vocab_parallel.vocab_range import all_gather_range, ceil_range


@pytest.mark.parametrize("widths", [(3, 1, 4), (0, 5, 0), (0, 0, 0)])
def test_ranges_follow_one_another(widths):
    def body(mesh, case):
        return all_gather_range(widths[mesh.rank("tp")], mesh["tp"], torch.device("cpu"))

    ranks = run(body, CaseSpec(scheme="vocab_parallel", mesh={"tp": 3}))
    ends = [sum(widths[: rank + 1]) for rank in range(3)]
    assert ranks.results == tuple(zip([0, *ends[:2]], ends, strict=True))
    assert [(row.op, row.bytes_in) for row in ranks.ledger.rows] == [("all_gather", 8)] * 3


@pytest.mark.parametrize("size", [1, 5, 7, 16])
def test_the_ceil_rule_matches_dtensor(size):
    def body(mesh, case):
        full = torch.arange(size)
        local = distribute_tensor(full, mesh.device_mesh, [Shard(0)], src_data_rank=None).to_local()
        start, end = ceil_range(size, mesh.size("tp"), mesh.rank("tp"))
        return local.tolist() == list(range(start, end))

    assert run(body, CaseSpec(scheme="vocab_parallel", mesh={"tp": 4})).results == (True,) * 4
