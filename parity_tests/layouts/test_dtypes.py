"""Parity of a layout's shards in dtypes that torch does not index itself."""

import torch
from jaxtyping import Int
from torch import Tensor

from parity_tests.layouts.test_token_layout import PACKED, first
from shardproof import Cost, check_cases, integers, offsets, scheme
from torch_impl.layouts import TokenLayout


@scheme(
    reference=first,
    inputs={"x": "t", "padded": "n"},
    outputs="t/cp:packed",
    rank_options={"kind": ("uint16", "uint32", "uint64", "int8", "int64")},
    cost=lambda c: Cost(),
    mesh=PACKED["mesh"],
    dims={name: PACKED["dims"][name] for name in ("n", "t")},
    draw={"padded": offsets("t", padded=True), "x": integers(0, 99)},
)
def sharded_ids(mesh, x, padded, kind) -> Int[Tensor, " l"]:
    """A row of ids keeps its dtype; torch selects rows of more dtypes than single numbers."""
    layout = TokenLayout.packed(padded, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
    shard = layout.shard(x.to(getattr(torch, kind)), 0)
    assert shard.dtype == getattr(torch, kind)
    return shard.to(x.dtype)


def test_parity():
    check_cases(sharded_ids, 10)
