"""Parity of vocab_parallel.statistics: normaliser and negative entropy from what the ranks say of their columns."""

import pytest
import torch
from hypothesis import given

from jax_ref.vocab_parallel import negative_entropy, normaliser
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from shardproof import Cost, check, every_case, scheme
from torch_impl.vocab_parallel import statistics as st


def normaliser_and_entropy(logits):
    return *normaliser(logits), negative_entropy(logits)


@scheme(
    reference=normaliser_and_entropy,
    mesh={"tp": (1, 2, 3, 4)},
    inputs={"logits": "t v/tp:ragged"},
    outputs=("t tp=I", "t tp=I", "t tp=I"),
    nograd=("logits",),
    dtypes=("float32", "float64", "bfloat16"),
    reduction=("v",),
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 3 * c.t))),
)
def merged_statistics(mesh, logits):
    local = st.local_statistics(logits, None, 1.0, True)
    row_max_r, row_sum_m1_r, shifted_mean_r = st.gather_statistics(local, mesh["tp"]).unbind(1)
    normaliser = st.global_normaliser(row_max_r, row_sum_m1_r, 1.0)
    shifted_mean = st.global_shifted_mean(row_max_r, row_sum_m1_r, shifted_mean_r, normaliser, 1.0)
    return *normaliser, shifted_mean - normaliser.log_row_sum


@given(every_case(merged_statistics))
def test_parity(case):
    check(case)


@pytest.mark.parametrize(
    "width",
    [1, 63, *(st.MIN_TILED_COLUMNS + more for more in (-1, 0, 1, st.TILE_COLUMNS - 1))],
)
def test_the_largest_of_a_row_of_any_width(width):
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
    x[1] = -torch.inf
    x[2, width // 2] = torch.nan
    x[3, width - 1] = 9.0
    x[4, 0] = 9.0
    entry, at_largest = st.max_and_column(x)
    assert at_largest.shape == (5, 1)
    assert at_largest[2:].flatten().tolist() == [width // 2, width - 1, 0]
    assert torch.equal(x.gather(-1, at_largest)[:2], x[:2].amax(-1, keepdim=True))
    assert torch.equal(entry.nan_to_num(), x.gather(-1, at_largest).nan_to_num())
