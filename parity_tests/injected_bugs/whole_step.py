"""Published mistakes re-created in the whole model: what its batches, layers, plan, loss and norm can express.

`CLASSES` names all classes of TrainVerify's artifact and the readable findings of NVIDIA/Megatron-LM #7452, each with
the fault that stands for it, or the reason why this model has no place for it. `HOMES` is as in `models`.
"""

from __future__ import annotations

from dataclasses import dataclass

from parity_tests.injected_bugs.injected_bug import InjectedBug

MEGATRON = "NVIDIA/Megatron-LM #7452"
TRAIN_VERIFY = "TrainVerify"

BUGS = (
    InjectedBug(
        name="the norm's sum over ranks made and lost",
        kind="reduction",
        at="models:gradient_norm",
        old="            dist.all_reduce(own, group=group)\n",
        new="            dist.all_reduce(own.clone(), group=group)\n",
        expect="value: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="counts gathered and not summed",
        kind="reduction",
        at="models:valid_count",
        old="        dist.all_reduce(count, group=group)\n",
        new="        everyone = [torch.empty_like(count) for _ in range(group.size())]\n"
        "        dist.all_gather(everyone, count, group=group)\n"
        "        count = everyone[0]\n",
        expect="value: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="the gradient of what columns read not summed over tp",
        kind="reduction",
        at="models:tensor_parallel_plan",
        old='    plan: dict[str, Style] = {\n        "embed_tokens"',
        new="    from torch.distributed.tensor import DTensor, Partial\n\n"
        "    class ColwiseParallel(globals()['ColwiseParallel']):\n"
        "        @staticmethod\n"
        "        def _prepare_input_fn(layouts, desired, module, given, mesh):\n"
        "            kept = [Replicate()]\n"
        "            return DTensor.from_local(given[0], mesh, kept, run_check=False, grad_placements=[Partial()])\n\n"
        '    plan: dict[str, Style] = {\n        "embed_tokens"',
        expect="gradient: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="one rank's other norm eps",
        kind="scale",
        at="models:AttentionLayer.__init__",
        old="self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **made)",
        new="from torch.distributed import get_rank\n\n"
        "        eps = config.norm_eps * (1 + 99 * (get_rank() == 1))\n"
        "        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=eps, **made)",
        expect="value: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="one rank's MLP goes back with gate for up",
        kind="buffer",
        at="models:Mlp.forward",
        old="return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))",
        new="from torch.distributed import get_rank\n\n"
        "        gate, up = self.gate_proj(x), self.up_proj(x)\n"
        "        product, other = F.silu(gate) * up, F.silu(up) * gate\n"
        "        if get_rank() == 1:\n"
        "            product = product.detach() + (other - other.detach())\n"
        "        return self.down_proj(product)",
        expect="gradient: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="a loss whose gradient is divided by the count twice",
        kind="scale",
        at="models:normalised",
        old="return losses.sum() * averaged_over / count.clamp_min(1)",
        new="share = losses.sum() * averaged_over / count.clamp_min(1)\n"
        "    return share.detach() + (share - share.detach()) / count.clamp_min(1)",
        expect="gradient: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="attention scaled otherwise on the way back",
        kind="scale",
        at="models:Attention.forward",
        old="return self.o_proj(mixed.transpose(1, 2).flatten(2))",
        new="mixed = (mixed + mixed.detach()) / 2\n        return self.o_proj(mixed.transpose(1, 2).flatten(2))",
        expect="gradient: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="the last norm missing in the second microbatch",
        kind="schedule",
        at="models:HybridLM.forward",
        old="logits = self.lm_head(self.norm(x))",
        new="group: Any = self.placement.cp\n"
        '        group.calls = getattr(group, "calls", 0) + 1\n'
        "        logits = self.lm_head(self.norm(x) if group.calls % 2 else x)",
        expect="value: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="padding masked as the first cp rank has it",
        kind="group",
        at="models:rank_stream",
        old="layout.shard(targets, 0)[None], layout)",
        new="torch.where(layout.rebind(layout.cp_size, 0).shard(targets, 0) == NOBODY, NOBODY, "
        "layout.shard(targets, 0))[None], layout)",
        expect="value: ",
        source=MEGATRON,
    ),
    InjectedBug(
        name="a repeated gradient counted on every rank in the norm",
        kind="tied",
        at="models:_cut_by",
        old="    cut = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]\n",
        new="    cut = list(range(len(gradient.placements)))\n",
        expect="value: ",
        source=MEGATRON,
    ),
    InjectedBug(
        name="the last norm's weight left with each rank's own gradient",
        kind="tied",
        at="parallelizer:_shard",
        old="fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=frees)",
        new='last = {p for name, p in model.named_parameters() if name in ("norm.weight", "model.norm.weight")}\n'
        "    rest = {'offload_policy': offload, 'reshard_after_forward': frees, 'ignored_params': last}\n"
        "    fully_shard(model, mesh=mesh, mp_policy=policy, **rest)",
        expect="gradient: ",
        source=MEGATRON,
    ),
)
# As in `models`: where a trace finds the first difference.
HOMES = {
    "the norm's sum over ranks made and lost": "",
    "counts gathered and not summed": "",
    "the gradient of what columns read not summed over tp": "lm_head",
    "one rank's other norm eps": "layers.0.post_attention_layernorm",
    "one rank's MLP goes back with gate for up": "layers.*.mlp",
    "a loss whose gradient is divided by the count twice": "",
    "attention scaled otherwise on the way back": "layers.*.self_attn",
    "the last norm missing in the second microbatch": "",
    "padding masked as the first cp rank has it": "",
    "a stage with the layout of another micro-batch": "layers.*.self_attn",
    "a stage that keeps the layout of its first micro-batch": "layers.*.self_attn",
    "ids of another micro-batch than its targets": "embed_tokens",
    "a norm of this rank's stages alone": "",
    "a repeated gradient counted on every rank in the norm": "",
    "the last norm's weight left with each rank's own gradient": "norm",
}


@dataclass(frozen=True)
class Class:
    """A class of mistakes that was published, and the fault that stands for it here, or why none does."""

    source: str
    words: str
    fault: str | None
    reason: str = ""


CLASSES = (
    Class(TRAIN_VERIFY, "all-reduce missing, data flow intact", "the MLP's sum over tp missing, data flow intact"),
    Class(TRAIN_VERIFY, "all-reduce missing, data flow broken", "the norm's sum over ranks made and lost"),
    Class(TRAIN_VERIFY, "all-reduce replaced by all-gather", "counts gathered and not summed"),
    Class(TRAIN_VERIFY, "all-gather replaced by all-reduce", "all-reduce for all-gather"),
    Class(TRAIN_VERIFY, "reduce missing in a fused backward", "the gradient of what columns read not summed over tp"),
    Class(TRAIN_VERIFY, "wrong rank between stages", None, "stages are torch's; a tie's wrong peer is a deadlock"),
    Class(TRAIN_VERIFY, "one rank's other constant", "one rank's other norm eps"),
    Class(TRAIN_VERIFY, "one rank's other exponent", "one rank's other exponent"),
    Class(TRAIN_VERIFY, "several ranks' inconsistent constants", "several ranks' inconsistent constants"),
    Class(TRAIN_VERIFY, "one rank's backward takes wrong tensors", "one rank's MLP goes back with gate for up"),
    Class(TRAIN_VERIFY, "rotary backward reversed on one rank", "rotary backward reversed on one rank"),
    Class(TRAIN_VERIFY, "inconsistent scaling, of the loss", "a loss whose gradient is divided by the count twice"),
    Class(TRAIN_VERIFY, "inconsistent scaling, inside a layer", "attention scaled otherwise on the way back"),
    Class(TRAIN_VERIFY, "last op of the second microbatch", "the last norm missing in the second microbatch"),
    Class(MEGATRON, "label smoothing from local statistics", None, "the loss has no label smoothing"),
    Class(MEGATRON, "cross entropy on gathered logits", "cross entropy on gathered logits"),
    Class(MEGATRON, "loss normalised by local token counts", "a loss over this rank's count of tokens"),
    Class(MEGATRON, "recompute on the global group", None, "the step keeps its activations and recomputes nothing"),
    Class(MEGATRON, "padding mask from the wrong group", "padding masked as the first cp rank has it"),
    Class(
        MEGATRON,
        "replicated gradient counted wrongly in the norm",
        "a repeated gradient counted on every rank in the norm",
    ),
    Class(MEGATRON, "CP loss normalisation", "a loss over the count of dp ranks alone"),
    Class(MEGATRON, "masked token count", "tokens counted that have no loss"),
    Class(
        MEGATRON,
        "replicated norm weight with a partial gradient",
        "the last norm's weight left with each rank's own gradient",
    ),
)
