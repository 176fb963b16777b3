"""What layouts reject, each call with words of its message, and the size that they recommend in its place."""

import re
from functools import partial

import jax.numpy as jnp
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from parity_tests.layouts import test_columns, test_inverse, test_packed, test_reorder, test_token_index
from parity_tests.rejections import codes, declared
from shardproof import check_cases, integers, scheme
from torch_impl.layouts import BUILTIN, indivisible, inverse, needs, packed
from torch_impl.layouts.columns import MambaSizes, conv_channels, projection_columns

SIZES = {
    partial(BUILTIN["striped"], 8.0, 2): "TypeError: striped: size=8.0 is a float; pass an int",
    partial(BUILTIN["contiguous"], 8, True): "TypeError: contiguous: world=True is a bool; pass an int",
    partial(BUILTIN["contiguous"], 9, 2): "ValueError: size=9 cannot be sharded by contiguous over world=2 (needs a",
    partial(BUILTIN["dual_chunk_swap"], 8, 3): "over world=3 (needs a multiple of 6); pad to 12",
    partial(BUILTIN["ragged"], -1, 3): "ValueError: size=-1 is not a size; sizes are 0 or more",
    partial(packed, "8", 2, [0, 8]): "TypeError: packed: size='8' is a str; pass an int",
    partial(packed, 4, 1, ["a"]): "TypeError: packed: cu_seqlens=['a'] are no offsets; pass a row of integers",
    partial(packed, 1, 1, torch.tensor([False, True])): "packed: cu_seqlens: dtype is bool; offsets are integers",
    partial(indivisible, "s", 8.0, "cp", 2, "striped"): "TypeError: s=8.0 is a float; pass an int",
    partial(indivisible, "s", 8, "cp", None, "striped"): "TypeError: cp=None is None; pass an int",
    partial(needs, 3, 2): "TypeError: layouts.needs: layout=3 is an int",
    partial(needs, "striped", "2"): "TypeError: layouts.needs: world='2' is a str",
}


def calls_of_columns(row):
    heads, groups, cp, text = row
    return [
        (partial(columns, MambaSizes(heads, 1, groups, 1), cp), text) for columns in (projection_columns, conv_channels)
    ]


CALLS = [
    *SIZES.items(),
    *((partial(inverse, [torch.tensor(each) for each in shards]), text) for shards, text in test_inverse.REJECTED),
    *((partial(inverse, positions), text) for positions, text in test_inverse.NO_POSITIONS),
    *((partial(packed, size, n, torch.tensor(cu)), text) for size, n, cu, _, text in test_packed.REJECTED),
    *(call for row in test_columns.REJECTED for call in calls_of_columns(row)),
    *((call, text) for call, _, text in test_reorder.REJECTED + test_token_index.REJECTED),
]
OF_A_GROUP = test_token_index.OF_A_GROUP


@scheme(**declared("cp", (2,), len(CALLS) + len(OF_A_GROUP)))
def rejected_by_layouts(mesh, ids) -> Int[Tensor, "k r/cp"]:
    rank = mesh.rank("cp")
    of_a_group = [(partial(call, mesh), text.format(rank, other=1 - rank)) for call, _, text in OF_A_GROUP]
    return codes(ids, [*CALLS, *of_a_group])


def padded_sizes(size, layout, ranks):
    """The next size that the layout can share; -1 for what is no size."""
    multiple = {"contiguous": ranks, "striped": ranks, "dual_chunk_swap": 2 * ranks}.get(layout, 1)
    return jnp.where(size < 0, -1, (size + multiple - 1) // multiple * multiple)


@scheme(
    reference=padded_sizes,
    mesh={"cp": (1, 2)},
    inputs={"size": "k/cp"},
    outputs="k/cp",
    dims={"k": (16,)},
    draw={"size": integers(-2, 40)},
    options={"layout": (*BUILTIN, "of_its_own"), "ranks": (1, 2, 3, 4)},
)
def recommended_sizes(mesh, size, layout, ranks) -> Int[Tensor, "k/cp"]:
    """As `indivisible` says it; a multiple of what the layout needs."""

    def recommended(number):
        message = indivisible("s", number, "cp", ranks, layout)
        if message is None:
            return number - number % needs(layout, ranks)
        return int(re.search(r"; pad to (\d+)$", message)[1]) if "pad to" in message else -1

    return size.new_tensor([recommended(number) for number in size.tolist()])


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("each", [rejected_by_layouts, recommended_sizes], ids=lambda each: each.name)
def test_parity(each, engine):
    check_cases(each, 20 if engine == "lockstep" and each is recommended_sizes else 3, engine=engine)
