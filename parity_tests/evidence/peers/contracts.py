"""Calls of other projects that do not do what their scheme declares, as the project or the backend says itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RIGHT = "equal"


@dataclass(frozen=True)
class Contract:
    """A call that does not do what its scheme declares, as its project says itself: in its manual or by an error."""

    project: str
    what: str
    schemes: tuple[str, ...]
    verdict: str = "raised"
    verdicts: Mapping[str, str] = field(default_factory=dict)


CONTRACTS = (
    Contract(
        "verl",
        '`agg_loss` in the mode "seq-mean-token-sum-norm" divides by the width of the rank\'s own mask unless '
        "`loss_scale_factor` is given, as its manual says",
        ("verl/losses::agg_loss_over_the_width_of_a_rank",),
        "mismatch",
    ),
    Contract(
        "verl",
        "the backward of `vocab_parallel_entropy_with_chunking` raises for two chunks or more, since each writes into "
        "the logits of all; for logits of two dims, which its manual names, the forward raises",
        ("verl/vocabulary::entropy_in_chunks*",),
    ),
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
        "torch",
        "`gather` of `torch.distributed.nn.functional` in a group of some ranks raises that a list is missing",
        ("torch/collectives::nn_gather_in_two_groups",),
    ),
    Contract(
        "colossalai",
        "`reduce_forward` hands a tensor that is not contiguous to all_reduce: NCCL raises",
        ("colossalai/operations::reduce_forward_of_transposed",),
        "protocol",
        {"gloo": RIGHT},
    ),
    Contract(
        "deepspeed",
        "`vocab_parallel_cross_entropy` hands tensors with the strides of its target to all_reduce: NCCL raises for a "
        "target that is a transposed view",
        ("deepspeed/layers::cross_entropy_gathered_*",),
        "protocol",
        {"gloo": RIGHT},
    ),
    Contract(
        "transformers",
        "a tensor plan on more ranks than the model has heads of keys and values raises, at the shapes of attention",
        ("transformers/plans::llama_with_fewer_kv_heads_than_ranks",),
    ),
    Contract(
        "fla-core",
        "`conv_cp_send_recv_fwd` and `_bwd` gather rows into a stacked tensor, and gloo raises: it takes the ranks' "
        "rows one below the other",
        ("fla/contexts::rows_of_the_rank_*",),
        RIGHT,
        {"gloo": "raised"},
    ),
)
