"""Stacks of experts that cannot be cut; those that can stand among the styles."""

import pytest
import torch
from torch import nn

from torch_impl.parallelizer.moe_styles import Experts


@pytest.mark.parametrize(
    ("shape", "entries", "said"),
    [
        ((3, 4, 2), {"up": "colwise", "down": "rowwise"}, "entry 'down' has no parameter in Stack"),
        ((3, 4, 2), {"up": "gather"}, "entry 'gather' of 'up' is not one of colwise, rowwise, packed_colwise"),
        ((3, 4), {"up": "colwise"}, r"'up' is \[3, 4\]; only stacks \[experts, out, in\] can be cut"),
        ((3, 5, 2), {"up": "packed_colwise"}, r"'up' is \[3, 5, 2\]; packed_colwise needs two equal halves"),
    ],
)
def test_stacks_that_cannot_be_cut(shape, entries, said):
    module = type("Stack", (nn.Module,), {})()
    module.up = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=f"moe_tp_experts: {said}"):
        Experts(entries).placements(module)
