"""Findings in other projects: the defects, and which scheme shows which."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

from parity_tests.evidence.peers.contracts import CONTRACTS, RIGHT, Contract

# Folders of schemes, with the project of each as the package index names it.
PROJECTS = {
    "torch": "torch",
    "transformers": "transformers",
    "megatron_core": "megatron-core",
    "deepspeed": "deepspeed",
    "colossalai": "colossalai",
    "fairscale": "fairscale",
    "yunchang": "yunchang",
    "nemo_automodel": "nemo-automodel",
    "verl": "verl",
    "diffusers": "diffusers",
    "torchtitan": "torchtitan",
    "fla": "fla-core",
}


@dataclass(frozen=True)
class Finding:
    """A defect: the symptom that a user sees, its place, and the remedy until it is mended.

    `lines` are the wrong lines of the version that it was seen on, as `folder/file.py:number`. `script` is the plain
    script that shows it, `ranks` the number of its processes; `kind` is the kind of an injected bug that makes the same
    mistake; `schemes` are globs of `folder/file::name`; `verdict` is the report's, `verdicts`
    has the verdicts of engines that differ; `says` is the sentence that its maintainers would accept.
    """

    title: str
    project: str
    since: str
    what: str
    meanwhile: str
    script: str
    schemes: tuple[str, ...]
    lines: tuple[str, ...] = ()
    kind: str = "reduction"
    verdict: str = "mismatch"
    verdicts: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 2
    issue: str = ""
    says: str = ""  # what its maintainers could write themselves

    @property
    def folder(self) -> str:
        return self.schemes[0].partition("/")[0]


FINDINGS = (
    Finding(
        "The gradient of a mean loss of a DTensor is too large by the number of ranks",
        "torch",
        "seen on 2.13.0",
        "`F.mse_loss`, `smooth_l1_loss`, `huber_loss`, `soft_margin_loss` and `binary_cross_entropy` with "
        '`reduction="mean"`, the default, of a DTensor that is sharded by rows: the value is right and the gradient '
        "is larger by the number of ranks. Where the shards are uneven the value is wrong too: it is the mean of the "
        "ranks' means, and NaN if a rank has no row, as with five rows on four ranks. With fewer rows than ranks the "
        "loss is right: every rank computes all of it. `binary_cross_entropy_with_logits` has a right gradient, and "
        "the same wrong value for uneven shards. `l1_loss`, `kl_div`, `poisson_nll_loss` and `gaussian_nll_loss` are "
        'right, and so are all ten with `reduction="sum"`.',
        'Use `reduction="sum"` and divide by the number of elements.',
        "torch_mse_loss",
        (
            *(
                f"torch/losses::{name}_mean_*"
                for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
            ),
            "torch/losses::binary_cross_entropy_with_logits_mean_uneven",
        ),
        lines=(
            "torch/distributed/tensor/_decompositions.py:173",
            "torch/distributed/tensor/_decompositions.py:281",
        ),
        issue="none is known to us of the gradient; the uneven mean of `DTensor.mean` was "
        "[#162692](https://github.com/pytorch/pytorch/issues/162692), which is mended",
        kind="scale",
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
        lines=("torch/distributed/tensor/_ops/_math_ops.py:461",),
        kind="border",
    ),
    Finding(
        "The largest element along a sharded dim raises on a rank that has none of it, and the others fail with it",
        "torch",
        "seen on 2.13.0",
        "`amax` of a DTensor along a dim that has fewer elements than there are ranks: a rank with an empty shard "
        "raises `IndexError`, while the others wait for it in a collective. `sum` of the same DTensor is right.",
        "Redistribute to `Replicate()` before it, or keep such a dim unsharded.",
        "torch_amax_of_empty_shard",
        ("torch/ops::largest_uneven",),
        lines=("torch/distributed/tensor/_ops/_math_ops.py:270",),
        verdict="raised",
    ),
    Finding(
        "On gloo a scatter of tensors that are not contiguous sends other numbers: a wrong gradient of gather",
        "torch",
        "seen on 2.13.0",
        "`dist.scatter` on gloo reads each tensor of its list as if its numbers lay side by side; so do `broadcast`, "
        "`reduce` and `all_reduce`, where there are gaps or the ranks' strides differ. The second issue says that "
        "NCCL rejects such tensors, which was not tried here for the list of a scatter. The backward of `gather` and "
        "of `all_gather` of `torch.distributed.nn.functional`, which on this version are deprecated, scatters slices "
        "of the gradient as they are: if the gathered tensor is used transposed, each rank gets other elements of "
        "the gradient, without an error.",
        "In place of the two functions take `all_gather_single_autograd` of "
        "`torch.distributed._functional_collectives`, which is right. Elsewhere call `.contiguous()` on the input of "
        "a collective.",
        "torch_scatter_of_transposed",
        ("torch/collectives::nn_gather_used_transposed", "torch/collectives::nn_all_gather_used_transposed"),
        lines=(
            "torch/distributed/nn/functional.py:352",
            "torch/distributed/nn/functional.py:420",
        ),
        verdicts={"lockstep": "protocol"},
        issue="[#24836](https://github.com/pytorch/pytorch/issues/24836), "
        "[#192920](https://github.com/pytorch/pytorch/issues/192920)",
        kind="order",
    ),
    Finding(
        "In a group of some ranks the gradient of broadcast is lost, and gather and scatter raise",
        "torch",
        "seen on 2.13.0",
        "`broadcast`, `gather` and `scatter` of `torch.distributed.nn.functional` take the rank of source or "
        "destination in the world, as `dist.broadcast` does, and compare it with the rank in the group. In a group "
        "whose ranks have other numbers in the world the backward of `broadcast` sets the gradient of the source to "
        "zero; `gather` and `scatter` raise that a list is missing. On this version torch warns that the functions are "
        "deprecated.",
        "Use these three with the default group alone, or `all_reduce` of a term that is zero on the other ranks. The "
        "issue is mended on torch's main branch for `broadcast`.",
        "torch_broadcast_in_a_group",
        ("torch/collectives::nn_reduce_then_broadcast_in_two_groups",),
        lines=(
            "torch/distributed/nn/functional.py:300",
            "torch/distributed/nn/functional.py:311",
            "torch/distributed/nn/functional.py:331",
            "torch/distributed/nn/functional.py:351",
        ),
        ranks=4,
        issue="[#130515](https://github.com/pytorch/pytorch/issues/130515)",
        kind="group",
    ),
    Finding(
        "Gradients of Qwen3's q_norm and k_norm under its tensor plan are wrong once they are accumulated",
        "transformers",
        "seen on 5.23.0",
        "The style `replicated_with_grad_allreduce`, which Qwen3's own tensor plan has for `q_norm` and `k_norm` "
        "(the plans of Gemma 3, Qwen3-Next, EXAONE 4, dots1 and others name it too), sums `.grad` over the ranks "
        "after each backward. But `.grad` already has the sum of the micro-batches before: with m micro-batches on "
        "tp ranks the first counts tp^(m-1) times. With one backward for each step it is right.",
        "One backward for each optimizer step; or with n ranks divide the gradients of these two norms by n before "
        "each further backward.",
        "transformers_qk_norm",
        ("transformers/plans::qwen3_accumulated",),
        lines=("transformers/distributed/tensor_parallel.py:377",),
        kind="scale",
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
        lines=(
            "megatron/core/tensor_parallel/cross_entropy.py:164",
            "megatron/core/tensor_parallel/cross_entropy.py:181",
        ),
        issue="[#737](https://github.com/NVIDIA/Megatron-LM/issues/737), where a maintainer says that Megatron itself "
        "does not call it so, [#7452](https://github.com/NVIDIA/Megatron-LM/issues/7452), "
        "[#7464](https://github.com/NVIDIA/Megatron-LM/issues/7464)",
        kind="statistic",
    ),
    Finding(
        "The sum of copy_to_ and reduce_from_tensor_model_parallel_region is lost where a tensor is not contiguous",
        "megatron-core",
        "seen on 0.16.1",
        "Both sum `x.contiguous()` over the ranks and return `x`. Where x is contiguous this is the same memory. "
        "Where it is a transposed or expanded view the sum is made in a copy that is dropped, and each rank keeps "
        "its own term. In the backward of `copy_to_tensor_model_parallel_region` x is the gradient, which is a view "
        "if the output is transposed later, or is multiplied by a transposed matrix.",
        "Call `.contiguous()` on the input of `reduce_from_`. The output of `copy_to_` needs a hook that makes its "
        "gradient contiguous, `copied.register_hook(lambda g: g.contiguous())`. The issue is mended on Megatron's "
        "main branch; it says that Megatron itself never calls them so.",
        "megatron_contiguous",
        ("megatron_core/mappings::copy_used_transposed", "megatron_core/mappings::reduce_of_transposed"),
        lines=("megatron/core/tensor_parallel/mappings.py:31",),
        issue="[#5337](https://github.com/NVIDIA/Megatron-LM/issues/5337)",
    ),
    Finding(
        "A trained bias beside a frozen weight gets no gradient in ColumnParallelLinear",
        "megatron-core",
        "seen on 0.16.1",
        "Where its weight requires no gradient, `ColumnParallelLinear` calls another function "
        "(`LinearWithFrozenWeight`), whose backward returns the gradient of the input alone. So a trained bias that "
        "the layer adds, which is the default, has no gradient: `.grad` stays None without an error. One rank is "
        "enough, as the smallest case shows.",
        "Let the layer return its bias (`skip_bias_add=True`) and add it outside.",
        "megatron_frozen_weight",
        ("megatron_core/layers::column_parallel_linear_of_a_frozen_weight",),
        lines=("megatron/core/tensor_parallel/layers.py:357",),
    ),
    Finding(
        "The fused cross entropy rounds the gradient of float32 logits to bfloat16",
        "megatron-core",
        "seen on 0.16.1",
        "The backward of `fused_vocab_parallel_cross_entropy` ends with `grad_input.to(torch.bfloat16)`, whatever "
        "the dtype of the logits. For float32 logits the loss has float32's precision and the gradient bfloat16's: a "
        "relative error of up to 2^-9 in each element. `vocab_parallel_cross_entropy` is right in both dtypes. One "
        "rank is enough.",
        "Leave `cross_entropy_loss_fusion` off where logits are float32.",
        "megatron_fused_cross_entropy",
        ("megatron_core/layers::fused_vocab_parallel_cross_entropy",),
        lines=("megatron/core/fusions/fused_cross_entropy.py:82",),
        kind="precision",
    ),
    Finding(
        "The mean cross entropy of sharded logits does not count tokens whose loss is zero",
        "colossalai",
        "seen on 0.5.0",
        '`cross_entropy_1d(..., mode="mean")` divides by the number of tokens with a loss other than 0.0; it should '
        "count the labels that are not ignored. Tokens that the model is sure of are not counted, so that the mean "
        "and its gradients are too large; if the model is sure of all tokens, the result is 0/0. The loss of a token "
        "is exactly zero in float32 once its logit is far enough above the others: by about 17 with 8 classes, 21 "
        "with 100, 27 with 32,000.",
        'Use `mode="sum"` and divide by the number of labels.',
        "colossalai_mean",
        ("colossalai/operations::cross_entropy_1d_mean_of_sure_tokens",),
        lines=("colossalai/shardformer/layer/loss.py:106",),
        kind="statistic",
    ),
    Finding(
        "Sums of AutoTP are lost where a tensor is not contiguous",
        "deepspeed",
        "seen on 0.19.8",
        "`RowParallel.forward` and `ColumnParallel.backward` sum `x.contiguous()` over the ranks and return `x`. "
        "Where x is contiguous this is the same memory. Where it is a transposed or expanded view the sum is made in "
        "a copy that is dropped, and each rank keeps its own term. A layer alone can cause this: the gradient of a "
        "matrix product has the strides of its input, so that `LinearLayer`, which copies its input by "
        "`ColumnParallel`, loses the sum where the input is a transposed view.",
        "Call `.contiguous()` on the inputs of `RowParallel` and `LinearLayer`. The output of `ColumnParallel` needs "
        "a hook that makes its gradient contiguous, `copied.register_hook(lambda g: g.contiguous())`.",
        "deepspeed_contiguous",
        ("deepspeed/layers::*_of_transposed",),
        lines=(
            "deepspeed/module_inject/layers.py:225",
            "deepspeed/module_inject/layers.py:280",
            "deepspeed/module_inject/layers.py:313",
        ),
    ),
    Finding(
        "FSDP2 divides a gradient twice on a mesh of one rank",
        "torch",
        "seen on 2.13.0",
        "`set_gradient_divide_factor(f)` with `set_force_sum_reduction_for_comms(True)` of a module that is sharded "
        "over a mesh of one rank: the gradient is divided by f twice. A mesh of two ranks or more divides once. The "
        "same happens without forced sums if gradients are reduced in float16. Expert parallelism meets it as soon "
        "as an expert has one data-parallel rank.",
        "Where the mesh has one rank set the square root of the factor, or leave such a module out of `fully_shard`.",
        "torch_divide_factor",
        ("torch/divide_factor::divided_as_sums_on_a_mesh_of_one",),
        lines=(
            "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:628",
            "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:629",
        ),
        issue="none is known to us; [#155903](https://github.com/pytorch/pytorch/issues/155903) was about the factor "
        "on meshes of two dims, and [#155915](https://github.com/pytorch/pytorch/pull/155915) brought the forced sums",
        kind="scale",
        says="With one rank nothing is sent, so the gradient should be divided once, in whichever of the two places.",
    ),
    Finding(
        "Ring attention sends the gradients of keys and values the wrong way round a ring of three ranks or more",
        "diffusers",
        "seen on 0.42.1",
        "In the backward of `TemplatedRingAttention` the keys of rank r + i are used at step i, while the gradients of "
        "keys and values come from rank r - 1 at each step: on two ranks these are the same rank. On three or more, "
        "terms are added to other ranks' keys. The output and the gradient of the queries are right.",
        "Train with a ring of two, or with `ulysses_degree`.",
        "diffusers_ring",
        ("diffusers/attention::ring_attention_of_three_or_more",),
        lines=("diffusers/models/attention_dispatch.py:2481",),
        ranks=3,
        issue="none is known to us of three ranks; [#14265](https://github.com/huggingface/diffusers/issues/14265) was "
        "about the keys that the backward used, which is mended",
        kind="order",
        says="The buffer with the gradients has to travel against the order in which keys are visited.",
    ),
    Finding(
        "Gradients in bfloat16 are not clipped",
        "nemo-automodel",
        "seen on 0.7.0",
        "`clip_grad_by_total_norm_` converts each gradient to float32 and scales the result in place. For float32 "
        "the conversion returns the gradient itself; for bfloat16 it returns a copy, which is dropped: nothing is "
        "clipped, without an error.",
        "Call it with `dtype=torch.bfloat16`, the gradients' own, or keep gradients in float32.",
        "automodel_clip",
        ("nemo_automodel/losses::clip_bfloat16_gradients",),
        lines=("nemo_automodel/components/distributed/grad_utils.py:46",),
        ranks=1,
        kind="scale",
        says="The function scales a copy where dtype differs from the gradient's; it should scale p.grad.",
    ),
    Finding(
        "A batch that does not divide into chunks loses its last rows",
        "nemo-automodel",
        "seen on 0.7.0",
        "`split_batch_into_thd_chunks(batch, num_chunks)` takes `rows // num_chunks` rows for each chunk; the rows "
        "that are left over are lost. Its manual says that the number must divide the batch, and nothing checks it. "
        "Tensors that it does not know, such as `pixel_values`, are kept with one chunk and dropped with more.",
        "Check that the number of rows is a multiple of the number of chunks.",
        "automodel_chunks",
        ("nemo_automodel/batches::chunks_of_an_odd_batch",),
        lines=("nemo_automodel/components/distributed/thd_utils.py:373",),
        verdict="raised",
        ranks=1,
        kind="border",
        says="A ValueError that names both numbers would do.",
    ),
    Finding(
        "A gather of experts sums into the gradient of another tensor",
        "nemo-automodel",
        "seen on 0.7.0",
        "The backward of `_AllGatherConcatVarlenFn` sums the gradient that comes in over the ranks, in place. "
        "Autograd may pass the same tensor to other operations: in `gathered + bias` the gradient of the bias "
        "becomes the ranks' sum too.",
        "Put a multiplication by one behind the gather, so that its gradient is a tensor of its own.",
        "automodel_gather",
        ("nemo_automodel/losses::gather_of_experts_beside_a_term",),
        lines=("nemo_automodel/components/moe/experts.py:243",),
        kind="buffer",
        says="`grad_output.contiguous()` is no copy of a contiguous tensor; `.clone()` is.",
    ),
    Finding(
        "A loss that is masked out is NaN in three of five modes of agg_loss",
        "verl",
        "seen on 0.9.1",
        "The modes that begin with `seq-mean` multiply the losses by the mask before they sum each sequence, and 0 * "
        "NaN is NaN. `token-mean` and `token-sum` select, and are right.",
        "Zero the losses where the mask is 0 before the call: `loss_mat.masked_fill(loss_mask == 0, 0)`.",
        "verl_agg_loss",
        ("verl/losses::agg_loss_seq_mean_*_of_nan_where_masked",),
        lines=(
            "verl/trainer/ppo/core_algos.py:1182",
            "verl/trainer/ppo/core_algos.py:1196",
        ),
        ranks=1,
        issue="[#6349](https://github.com/verl-project/verl/pull/6349), which mends it and is open",
        kind="call",
        says="The sequence modes should select with `torch.where`, as `masked_sum` does.",
    ),
    Finding(
        "slice_input_tensor takes its rank from another group than the one it is given",
        "verl",
        "seen on 0.9.1",
        "`slice_input_tensor(x, dim, group=group)` takes the number of ranks from `group`, and the rank from the group "
        "that `set_ulysses_sequence_parallel_group` has set: where none is set every rank gets the first slice.",
        "Set the group, and give none.",
        "verl_slice",
        ("verl/ulysses::slice_input_of_a_given_group",),
        lines=("verl/utils/ulysses.py:124",),
        kind="group",
        says="The rank should be asked of `group`: `get_ulysses_sequence_parallel_rank(group)`.",
    ),
    Finding(
        "The backward of vocab_parallel_entropy writes into the logits",
        "verl",
        "seen on 0.9.1",
        "The backward subtracts a number from the logits in place and adds it again, so that they come out rounded: in "
        "float32 they differ in the last digits, in bfloat16 in the first. Whoever else reads them afterwards reads "
        "other logits; autograd raises where another function has saved them.",
        "Give it a copy: `vocab_parallel_entropy(logits.clone())`.",
        "verl_entropy",
        ("verl/vocabulary::entropy_of_its_input",),
        lines=(
            "verl/utils/megatron/tensor_parallel.py:133",
            "verl/utils/megatron/tensor_parallel.py:137",
        ),
        verdict="hygiene",
        issue="[#2484](https://github.com/verl-project/verl/pull/2484) was about logits that another function had "
        "written into, and is open",
        kind="buffer",
        says="The subtraction can go into the product's buffer, which is the function's own.",
    ),
    Finding(
        "The borders of packed sequences stay those of the step before",
        "fla-core",
        "seen on 0.6.0",
        "`build_cp_context` remembers its results by the identity of its arguments, as the decorator `tensor_cache` "
        "says and the manual of the function does not. A training loop that writes each step's `cu_seqlens` into one "
        "buffer gets the borders of the first step in every step.",
        "Pass a new tensor for each step, `cu_seqlens.clone()`, or set `FLA_DISABLE_TENSOR_CACHE=1`.",
        "fla_cache",
        ("fla/contexts::borders_of_a_buffer_that_is_filled_again",),
        lines=("fla/utils/decorators.py:72",),
        kind="buffer",
        says="The tensor's `_version` beside its identity would tell a buffer that was written to.",
    ),
)


def expected_verdict(scheme: str, engine: str) -> str:
    """The verdict on `folder/file::name` on an engine."""
    entry = expected(scheme)
    return RIGHT if entry is None else entry.verdicts.get(engine, entry.verdict)


def expected(scheme: str) -> Finding | Contract | None:
    """The finding or contract that `folder/file::name` shows; None where it is expected to be right."""
    return next(
        (each for each in (*FINDINGS, *CONTRACTS) if any(fnmatch.fnmatch(scheme, glob) for glob in each.schemes)), None
    )
