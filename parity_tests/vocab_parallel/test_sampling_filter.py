"""Parity of vocab_parallel.sampling_filter: which tokens stay, token by token."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Bool
from torch import Tensor

from jax_ref.vocab_parallel import sampling_mask
from parity_tests.vocab_parallel.decided_rows import decided_rows
from shardproof import CaseSpec, scheme
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl.vocab_parallel.filter_bounds import keep_first, limits_of
from torch_impl.vocab_parallel.fused_logprob import LogprobOptions
from torch_impl.vocab_parallel.sampling import sampling_filter
from torch_impl.vocab_parallel.statistics import ON_ANOTHER_RANK
from torch_impl.vocab_parallel.topk_by_radix import topk_by_radix


def filtered_columns(group, logits, top_k, top_p, temperature):
    """Which of this rank's columns are kept; the limits are on."""
    options = LogprobOptions(group, temperature=temperature)
    elsewhere = logits.new_full((logits.shape[:-1].numel(), 1), ON_ANOTHER_RANK, dtype=torch.int32)
    selection = sampling_filter(logits, elsewhere, options, limits_of(top_k, top_p))
    rows = logits.reshape(len(elsewhere), logits.shape[-1])
    kept = keep_first(rows, selection.threshold, selection.last_tie)
    return (kept > -math.inf).view(logits.shape)


def reference(logits, top_k, top_p, temperature):
    """Masked logits are no loss: whether they count as kept is not compared."""
    return sampling_mask(logits, top_k, top_p, temperature) & (logits > -jnp.inf)


DECLARED = dict(
    reference=reference,
    inputs={"logits": "b s v/tp:ragged"},
    outputs="b s v/tp:ragged",
    nograd=("logits",),
    draw={"logits": decided_rows()},
    dtypes=("float32", "bfloat16", "float64", "float16"),
)


@scheme(
    mesh={"tp": (1, 2, 3, 4)},
    dims={"b": (1, 2), "s": (1, 3), "v": (2, 7, 12, 24)},
    options={"top_k": (2, 5, 30), "top_p": (1.0, 0.5, 0.9), "temperature": (1.0, 0.7)},
    **DECLARED,
)
@pytest.mark.cases
def filtered_by_lists(mesh, logits, top_k, top_p, temperature) -> Bool[Tensor, "b s v"]:
    return filtered_columns(mesh["tp"], logits, top_k, top_p, temperature)


@scheme(
    mesh={"tp": (1, 2, 3, 4)},
    dims={"b": (1, 2), "s": (1, 3), "v": (2, 7, 12, 24)},
    options={"top_k": (None,), "top_p": (0.5, 0.9, 0.0), "temperature": (1.0, 2.0)},
    **DECLARED,
)
@pytest.mark.cases
def filtered_by_mass(mesh, logits, top_k, top_p, temperature) -> Bool[Tensor, "b s v"]:
    return filtered_columns(mesh["tp"], logits, top_k, top_p, temperature)


@scheme(
    mesh={"tp": (1, 2, 3, 4)},
    dims={"b": (1, 2), "s": (1, 3), "v": (2, 7, 12, 1100)},
    options={"top_k": (None, 1025), "top_p": (0.5, 0.9, 0.0), "temperature": (1.0, 2.0)},
    # Often ties, so that a row's last kept logit is 0.0 for some tokens and -0.0 for others.
    **{
        **DECLARED,
        "draw": {"logits": decided_rows("normal", "ties", "peaked", "ties", "neg_inf_mask", "ties", "huge")},
    },
)
@pytest.mark.cases
def filtered_by_listed_columns(mesh, logits, top_k, top_p, temperature) -> Bool[Tensor, "b s v"]:
    """Ranks of more columns than top-k leaves, and of fewer."""
    return filtered_columns(mesh["tp"], logits, top_k, top_p, temperature)


@scheme(
    mesh={"tp": (1, 2, 4)},
    dims={"b": (1,), "s": (2,), "v": (1030, 2100)},
    options={"top_k": (1025, 2000, 2100), "top_p": (1.0, 0.5, 0.9), "temperature": (1.0, 0.7)},
    **{**DECLARED, "draw": {"logits": decided_rows("normal", "ties", "large", "ties", "neg_inf_mask", "tiny")}},
)
@pytest.mark.cases(10)
def filtered_by_count(mesh, logits, top_k, top_p, temperature) -> Bool[Tensor, "b s v"]:
    return filtered_columns(mesh["tp"], logits, top_k, top_p, temperature)


def mask_with_and_without_nan(logits, top_k, top_p, temperature):
    """A NaN in the first column is no candidate, as if it were masked, and is not kept."""
    masked = reference(logits.at[..., 0].set(-jnp.inf), top_k, top_p, temperature)
    return reference(logits, top_k, top_p, temperature), masked.at[..., 0].set(False)


@scheme(
    mesh={"tp": (1, 2, 3)},
    dims={"b": (1, 2), "s": (1, 3, 40), "v": (7, 12, 40, 100)},
    options={"top_k": (1, 2, 5), "top_p": (1.0,), "temperature": (1.0,)},
    **{**DECLARED, "reference": mask_with_and_without_nan, "outputs": ("b s v/tp:ragged",) * 2},
)
@pytest.mark.cases
def filtered_by_radix(mesh, logits, top_k, top_p, temperature) -> tuple[Bool[Tensor, "b s v"], Bool[Tensor, "b s v"]]:
    """A short top-k by the route of a long one, so that a rank has many columns for each; beside rows with NaN."""
    rows = torch.cat([logits, logits])
    is_first = mesh.global_ids("v") == 0
    rows[len(logits) :, :, is_first] = math.nan
    options, limits = LogprobOptions(mesh["tp"], temperature=temperature), limits_of(top_k, top_p)
    elsewhere = rows.new_full((rows.shape[:-1].numel(), 1), ON_ANOTHER_RANK, dtype=torch.int32)
    threshold = topk_by_radix(rows, elsewhere, options, limits)[0].threshold
    is_kept = (rows >= threshold.view(*rows.shape[:-1], 1)) & (rows > -math.inf)
    kept, beside_nan = is_kept.split(len(logits))
    return kept, beside_nan & ~is_first


@pytest.mark.parametrize(("top_k", "width"), [(1024, "list"), (1025, "rounds")])
def test_both_routes_meet_at_the_longest_list(top_k, width):
    scheme = filtered_by_lists if width == "list" else filtered_by_count
    case = scheme.case(tp=4, b=1, s=2, v=2100, top_k=1025, top_p=0.9, temperature=1.0, dtype="float32", seed=4)
    report = verify_case(scheme, case.replace(options={**case.options, "top_k": top_k}))
    report.raise_if_failed()
    assert {row.op for row in report.ledger.rows} == {"list": {"all_gather"}, "rounds": {"all_gather", "all_reduce"}}[
        width
    ]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["normal", "ties", "neg_inf_mask", "zeros"])
@pytest.mark.parametrize(("top_k", "top_p"), [(1025, 1.0), (1025, 0.5)])
def test_a_vocabulary_much_longer(kind, tp, top_k, top_p):
    case = filtered_by_count.case(
        tp=tp, b=1, s=2, v=8300, top_k=1025, top_p=top_p, temperature=1.0, dtype="float32", seed=9
    )
    case = case.replace(options={**case.options, "top_k": top_k})
    verify_case(filtered_by_count, case.replace(values={"logits": {"kind": kind}})).raise_if_failed()


@pytest.mark.parametrize("tp", [1, 2])
def test_top_p_of_a_vocabulary_much_longer(tp):
    case = filtered_by_count.case(
        tp=tp, b=1, s=2, v=8300, top_k=1025, top_p=0.5, temperature=1.0, dtype="float32", seed=9
    )
    case = case.replace(options={**case.options, "top_k": None}, values={"logits": {"kind": "large"}})
    verify_case(filtered_by_count, case).raise_if_failed()


def filtered_over(widths, logits, top_k, top_p):
    """Kept tokens of full rows [n, v], split into shards of the given widths."""

    def body(mesh, case):
        rank = mesh.rank("tp")
        shard = logits[:, sum(widths[:rank]) : sum(widths[: rank + 1])]
        return filtered_columns(mesh["tp"], shard, top_k, top_p, 1.0).numpy()

    ranks = run(body, CaseSpec(scheme="sampling_filter", mesh={"tp": len(widths)}))
    return np.concatenate(ranks.results, axis=-1)


CUTS = [[8], [4, 4], [3, 0, 4, 1], [0, 0, 8, 0]]


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("widths", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_of_equal_logits_top_k_keeps_all_and_top_p_the_lowest_ids(widths, dtype):
    for value in (0.0, 7.0, -3.5e4):
        equal = torch.full((2, 8), value, dtype=dtype)
        assert filtered_over(widths, equal, 2, 1.0).all()
        for top_k in (None, 2):
            half = filtered_over(widths, equal, top_k, 0.5)
            np.testing.assert_array_equal(half, [[True] * 4 + [False] * 4] * 2)
            first = filtered_over(widths, equal, top_k, 0.0)
            np.testing.assert_array_equal(first, [[True] + [False] * 7] * 2)


@pytest.mark.parametrize("widths", CUTS)
@pytest.mark.parametrize("top_k", [None, 6])
def test_a_tie_at_the_end_is_split_by_id_across_ranks(widths, top_k):
    # Masses before the zeros, in id order: 4/8, 5/8, 6/8, 7/8 of the eight halves that this row is made of.
    row = torch.tensor([[0.0, 0.0, 2.0, 0.0, -torch.inf, 0.0, -torch.inf, -torch.inf]], dtype=torch.float64)
    row[0, 2] = torch.tensor(4.0, dtype=torch.float64).log()
    got = filtered_over(widths, row, top_k, 0.7)
    np.testing.assert_array_equal(got, [[True, True, True, False, False, False, False, False]])


@pytest.mark.parametrize("top_k", [None, 2])
def test_the_two_zeros_are_one_logit(top_k):
    zeros = torch.tensor([[0.0, -0.0, -0.0, 0.0, -torch.inf, -torch.inf, -torch.inf, -0.0]])
    for widths in CUTS:
        got = filtered_over(widths, zeros, top_k, 0.5)  # five equal ones: 0, 1/5 and 2/5 are below a half
        np.testing.assert_array_equal(got, [[True, True, True, False, False, False, False, False]])
    if top_k:
        np.testing.assert_array_equal(filtered_over([4, 4], zeros, 1, 1.0), zeros.numpy() == 0)


@pytest.mark.parametrize("top_k", [None, 8])
def test_nearly_all_of_a_certain_row(top_k):
    # R = 7 exp(-24) is far below one rounding of 1, and top_p reaches into it.
    row = torch.full((1, 8), -24.0)
    row[0, 5] = 0.0
    rest = 7 * np.exp(-24.0)
    got = filtered_over([3, 0, 4, 1], row, top_k, 1.0 - rest * 4.5 / 7)
    np.testing.assert_array_equal(got, [[True, True, True, False, False, True, False, False]])
