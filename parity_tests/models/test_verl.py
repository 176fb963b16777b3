"""Parity of a step's loss in each of verl's modes, with counts that the caller sums over ranks; and rejections."""

import pytest
import torch
from jaxtyping import Bool
from torch import Tensor

from jax_ref.models import aggregated
from parity_tests.rejections import rejected
from shardproof import check_cases, mask, scheme, values
from torch_impl.collectives import all_reduce
from torch_impl.models.adapters.verl import agg_loss

MODES = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_of_token_sums",
    "seq-mean-token-sum-norm": "sequence_mean_of_token_sums",
    "seq-mean-token-mean": "sequence_mean_of_token_means",
}
LONGEST = 7


def loss_of_step(losses, mask, mode):
    return aggregated(losses, mask, MODES[mode], LONGEST if mode.endswith("-norm") else 1)


@scheme(
    reference=loss_of_step,
    mesh={"dp": (1, 2, 3, 4)},
    inputs={"losses": "b/dp:ragged s", "mask": "b/dp:ragged s"},
    outputs="dp=P",
    draw={"losses": values("normal", "large"), "mask": mask("s")},
    options={"mode": tuple(MODES)},
    rank_options={"microbatches": (1, 2)},
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    reduction=("b", "s"),
)
def rank_loss(mesh, losses, mask: Bool[Tensor, "b s"], mode, microbatches):
    """The rank's loss over dp: FSDP would average the ranks' losses, here they are summed. Masked tokens are NaN."""
    tokens, sequences = (all_reduce(count, mesh["dp"]) for count in (mask.sum(), mask.any(1).sum()))
    factor = LONGEST if mode.endswith("-norm") else None
    losses = losses.masked_fill(~mask, torch.nan)
    parts = zip(losses.tensor_split(microbatches), mask.tensor_split(microbatches), strict=True)
    shares = [agg_loss(each, own.long(), mode, mesh.size("dp"), tokens, sequences, factor) for each, own in parts]
    return torch.stack(shares).sum() / mesh.size("dp")


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_parity(engine):
    check_cases(rank_loss, 20 if engine == "lockstep" else 3, engine=engine)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 35 / 8),
        ("token-sum", 35.0),
        ("seq-mean-token-sum", 35 / 4),
        ("seq-mean-token-sum-norm", 35 / 32),
        ("seq-mean-token-mean", (1.5 + 4.5 + 8 + 12) / 4),
    ],
)
def test_one_rank_counts_by_itself(mode, expected):
    """By hand: the sequences have 4, 2, 1, 1 and 0 tokens, so that all quotients are exact."""
    counts = torch.arange(4) < torch.tensor([4, 2, 1, 1, 0])[:, None]
    factor = 8 if mode.endswith("-norm") else None
    assert agg_loss(torch.arange(20.0).view(5, 4), counts, mode, loss_scale_factor=factor).item() == expected


X = torch.ones(2, 3)
NAME = "models.agg_loss: "
REJECTED = [
    (
        "mask of another shape",
        lambda m: agg_loss(X, X[:1], "token-mean"),
        NAME + "loss_mask is [1, 3] but loss_mat has b=2: b differs, 1 and 2",
    ),
    (
        "unknown mode",
        lambda m: agg_loss(X, X, "mean"),
        NAME + f"loss_agg_mode='mean' is not one of {', '.join(MODES)}",
    ),
    (
        "tokens of all ranks",
        lambda m: agg_loss(X, X, "token-mean", 2),
        NAME + "dp_size=2 needs batch_num_tokens; pass the count of all ranks",
    ),
    (
        "sequences of all ranks",
        lambda m: agg_loss(X, X, "seq-mean-token-mean", 2, 6),
        NAME + "dp_size=2 needs global_batch_size; pass the count of all ranks",
    ),
    (
        "longest response",
        lambda m: agg_loss(X, X, "seq-mean-token-sum-norm"),
        NAME + "loss_agg_mode='seq-mean-token-sum-norm' needs loss_scale_factor; pass the longest response",
    ),
    ("no tokens", lambda m: agg_loss(X, X, "token-mean", 1, 0), NAME + "batch_num_tokens=0 must be at least 1"),
    (
        "fraction",
        lambda m: agg_loss(X, X, "token-mean", 1, 1.5),
        NAME + "batch_num_tokens=1.5 is a float; pass a count",
        TypeError,
    ),
    (
        "tensor of a fraction",
        lambda m: agg_loss(X, X, "token-mean", 1, torch.tensor(1.5)),
        NAME + "batch_num_tokens is not a tensor of one integer; pass a count",
    ),
]
test_rejection = rejected({"dp": 1}, REJECTED)
