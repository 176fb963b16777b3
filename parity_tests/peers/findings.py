"""What was found in other projects: the defects, the documented contracts, and which scheme shows which."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

# Folders of schemes, with the project of each as the package index names it.
PROJECTS = {
    "torch": "torch",
    "transformers": "transformers",
    "megatron_core": "megatron-core",
    "deepspeed": "deepspeed",
    "colossalai": "colossalai",
    "fairscale": "fairscale",
    "yunchang": "yunchang",
}


@dataclass(frozen=True)
class Finding:
    """A defect: what a user sees, where, and what to do until it is mended.

    `script` is the plain script that shows it, `ranks` the processes that it runs on; `schemes` are globs of
    `folder/file::name`; `verdict` is the report's.
    """

    title: str
    project: str
    since: str
    what: str
    meanwhile: str
    script: str
    schemes: tuple[str, ...]
    verdict: str = "mismatch"
    ranks: int = 2
    issue: str = ""

    @property
    def folder(self) -> str:
        return self.schemes[0].partition("/")[0]


@dataclass(frozen=True)
class Contract:
    """A call that does not do what its scheme declares, and whose project says so: in its manual or by an error."""

    project: str
    what: str
    schemes: tuple[str, ...]
    verdict: str = "raised"


FINDINGS = (
    Finding(
        "The gradient of a mean loss of a DTensor is too large by the number of ranks",
        "torch",
        "seen on 2.13.0",
        "`F.mse_loss`, `smooth_l1_loss`, `huber_loss`, `soft_margin_loss` and `binary_cross_entropy` with "
        '`reduction="mean"`, the default, of a DTensor that is sharded by rows: the value is right and the gradient is '
        "larger by the number of ranks. Where the shards are uneven the value is wrong too, being the mean of the "
        "ranks' means. `l1_loss`, `binary_cross_entropy_with_logits`, `kl_div`, `poisson_nll_loss` and "
        '`gaussian_nll_loss` are right, and so are all ten with `reduction="sum"`.',
        'Use `reduction="sum"` and divide by the number of elements.',
        "torch_mse_loss",
        tuple(
            f"torch/losses::{name}_mean_*"
            for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
        ),
    ),
    Finding(
        "A scan of a DTensor along its sharded dim restarts at each shard if the dim is named from the end",
        "torch",
        "seen on 2.13.0",
        "`cumsum`, `cumprod` and `logcumsumexp` with `dim=-1` of a DTensor that is sharded along its last dim return "
        "the scan of each shard by itself. The same call with the dim counted from the front is right.",
        "Count the dim from the front: `x.cumsum(x.ndim - 1)`.",
        "torch_scan",
        ("torch/scans::*_from_the_end_*",),
    ),
    Finding(
        "The largest element along a sharded dim raises on a rank that has none of it, and the others fail with it",
        "torch",
        "seen on 2.13.0",
        "`amax` of a DTensor along a dim that has fewer elements than there are ranks: a rank with an empty shard "
        "raises `IndexError`, the others are in a collective that it never enters. `sum` of the same DTensor "
        "is right.",
        "Redistribute to `Replicate()` before it, or keep such a dim unsharded.",
        "torch_amax_of_empty_shard",
        ("torch/ops::largest_uneven",),
        verdict="raised",
    ),
    Finding(
        "Gradients of Qwen3's q_norm and k_norm under its tensor plan are wrong once they are accumulated",
        "transformers",
        "seen on 5.23.0",
        "The style `replicated_with_grad_allreduce`, which Qwen3's own tensor plan has for `q_norm` and `k_norm`, sums "
        "`.grad` over the ranks after each backward, and `.grad` already has the sum of the micro-batches before: with "
        "m of them on tp ranks the first counts tp^(m-1) times. With one backward for each step it is right.",
        "One backward for each optimizer step; or with n ranks divide the gradients of these two norms by n before "
        "each further backward.",
        "transformers_qk_norm",
        ("transformers/plans::qwen3_accumulated",),
    ),
    Finding(
        "Label smoothing of vocabulary-parallel cross entropy takes each rank's own classes for all",
        "megatron-core",
        "seen on 0.16.1",
        "`vocab_parallel_cross_entropy(logits, target, label_smoothing)` on two tensor-parallel ranks or more: the "
        "mean log-probability and the number of classes that smoothing needs are those of the rank's shard, so that "
        "the loss differs from rank to rank, and so does the gradient. Without smoothing it is right.",
        "Leave `label_smoothing` at 0, or gather the logits for it.",
        "megatron_label_smoothing",
        ("megatron_core/layers::vocab_parallel_cross_entropy_smoothed",),
        issue="[#737](https://github.com/NVIDIA/Megatron-LM/issues/737), "
        "[#7464](https://github.com/NVIDIA/Megatron-LM/issues/7464)",
    ),
    Finding(
        "The mean cross entropy of sharded logits does not count tokens whose loss is zero",
        "colossalai",
        "seen on 0.5.0",
        '`cross_entropy_1d(..., mode="mean")` divides by the number of tokens whose loss is not 0.0, in place of those '
        "whose label is not ignored: a token that the model is sure of is left out, the mean of the others and their "
        "gradients are too large, and where all are sure it is 0/0. The loss of a token is exactly zero in "
        "float32 once its logit is about 17 above the others.",
        'Use `mode="sum"` and divide by the number of labels.',
        "colossalai_mean",
        ("colossalai/operations::cross_entropy_1d_mean_of_sure_tokens",),
    ),
    Finding(
        "Sums of AutoTP are lost where a tensor is not contiguous",
        "deepspeed",
        "seen on 0.19.8",
        "`RowParallel.forward` and `ColumnParallel.backward` sum `x.contiguous()` over the ranks and return `x`. Where "
        "x is contiguous this is the same memory. Where it is a transposed or expanded view the sum is made in a copy "
        "that is dropped: each rank goes on with its own term.",
        "Call `.contiguous()` on what goes into the two; the layers that DeepSpeed itself builds from them hand in the "
        "product of a linear layer, which is contiguous.",
        "deepspeed_contiguous",
        ("deepspeed/layers::*_of_transposed",),
    ),
)

CONTRACTS = (
    Contract(
        "torch", "`F.rms_norm` of a DTensor along its sharded dim raises and names the op", ("torch/ops::rms_norm_*",)
    ),
    Contract(
        "torch",
        "the backward of `_all_gather_base` raises on gloo, which it does not support",
        ("torch/collectives::nn_all_gather_base",),
    ),
    Contract(
        "torch",
        'the backward of `reduce_scatter_tensor_autograd` raises for `"avg"`: it takes sums',
        ("torch/collectives::functional_reduce_scatter_of_a_mean",),
    ),
    Contract(
        "transformers",
        "a tensor plan on more ranks than the model has heads of keys and values raises, at the shapes of attention",
        ("transformers/plans::llama_with_fewer_kv_heads_than_ranks",),
    ),
)


def expected(scheme: str) -> Finding | Contract | None:
    """What `folder/file::name` shows; None where it is expected to be right."""
    return next(
        (each for each in (*FINDINGS, *CONTRACTS) if any(fnmatch.fnmatch(scheme, glob) for glob in each.schemes)), None
    )
