"""Parity of vocab_parallel.statistics: normaliser and negative entropy from the ranks' column statistics."""

import jax
import pytest

from jax_ref.vocab_parallel import negative_entropy
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from shardproof import Cost, scheme
from torch_impl.vocab_parallel import statistics as st


def normaliser_and_entropy(logits):
    row_max = logits.max(-1)
    return row_max, jax.nn.logsumexp(logits, -1) - row_max, negative_entropy(logits)


@scheme(
    reference=normaliser_and_entropy,
    mesh={"tp": (1, 2, 3, 4)},
    inputs={"logits": "t v/tp:ragged"},
    outputs=("t tp=I", "t tp=I", "t tp=I"),
    nograd=("logits",),
    dtypes=("float32", "float64", "bfloat16"),
    reduction=("v",),
    sums="float32",
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 3 * c.t))),
)
@pytest.mark.cases
def merged_statistics(mesh, logits):
    local = st.local_statistics(logits, None, 1.0, True)
    row_max_r, row_sum_m1_r, shifted_mean_r = st.gather_statistics(local, mesh["tp"]).unbind(1)
    normaliser = st.global_normaliser(row_max_r, row_sum_m1_r, 1.0)
    shifted_mean = st.global_shifted_mean(row_max_r, row_sum_m1_r, shifted_mean_r, normaliser, 1.0)
    return *normaliser, shifted_mean - normaliser.log_row_sum
