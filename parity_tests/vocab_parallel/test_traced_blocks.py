"""Functions of row blocks as a compiler traces them: their branches for one graph, run line by line."""

from unittest.mock import patch

import jax
import pytest
import torch

from jax_ref.vocab_parallel import logprob_and_negative_entropy
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.shard import owned_range
from shardproof import Cost, ids, scheme, values
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.fused_logprob import EntropyCotangent, id_cotangents, write_gradient


def traced(f, *arguments):
    """f, which sends nothing, so that no other rank runs meanwhile."""
    with patch.object(torch.compiler, "is_compiling", return_value=True):
        return f(*arguments)


def scores_and_gradient(logits, target, g_logprob, g_entropy, temperature):
    scores, pull = jax.vjp(lambda z: logprob_and_negative_entropy(z, target, temperature), logits)
    return *scores, pull((g_logprob, g_entropy))[0]


@scheme(
    reference=scores_and_gradient,
    mesh={"tp": (1, 2, 3)},
    inputs={"logits": "t v/tp:ragged", "target": "t", "g_logprob": "t tp=R", "g_entropy": "t tp=R"},
    outputs=("t tp=I", "t tp=I", "t v/tp:ragged"),
    draw={
        "target": ids("v", ignore=-100),
        "g_logprob": values("normal", "zeros", "ties"),
        "g_entropy": values("normal", "zeros", "ties"),
    },
    options={"temperature": (1.0, 0.7)},
    nograd=("logits", "g_logprob", "g_entropy"),
    dtypes=("float32",),
    reduction=("v",),
    roundings=4,  # log total, mean shifted logit, log-probability, gradient
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 4 * c.t))),
)
@pytest.mark.cases
def logprob_of_traced_blocks(mesh, logits, target, g_logprob, g_entropy, temperature):
    column = st.local_column(target.unsqueeze(-1), *owned_range(mesh))
    local = traced(st.local_statistics, logits, column, temperature, True)
    row_max_r, row_sum_m1_r, z_r, shifted_mean_r = st.gather_statistics(local, mesh["tp"]).unbind(1)
    normaliser, z_t = st.global_normaliser(row_max_r, row_sum_m1_r, temperature), st.global_target_logit(z_r)
    shifted_mean = st.global_shifted_mean(row_max_r, row_sum_m1_r, shifted_mean_r, normaliser, temperature)
    column = torch.where(z_t.unsqueeze(-1) == torch.inf, st.OUT_OF_VOCABULARY, column)
    at_target, entropy = id_cotangents(column, g_logprob.unsqueeze(-1)), EntropyCotangent(shifted_mean, g_entropy)
    gradient = torch.empty_like(logits)
    traced(write_gradient, gradient, logits, normaliser, at_target, entropy, temperature, True)
    return st.logprob_of(z_t, normaliser, temperature), shifted_mean - normaliser.log_row_sum, gradient
