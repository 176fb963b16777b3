"""Injected bugs of tensor-parallel plans and their styles."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    # Parts of the styles
    InjectedBug(
        name="the gradient of a norm of heads not summed over tp",
        kind="reduction",
        at="parallelizer:ReplicatedOnShards.local_parameter",
        old="return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])",
        new="return parameter.to_local()",
        expect="value: ",
    ),
    InjectedBug(
        name="the gradient of a norm of heads summed when it is accumulated",
        kind="reduction",
        at="parallelizer:ReplicatedOnShards.local_parameter",
        old="return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])",
        new="local = parameter.to_local()\n"
        "        if not hasattr(parameter, 'was_hooked'):\n"
        "            parameter.was_hooked = True\n"
        "            parameter.register_post_accumulate_grad_hook(\n"
        "                lambda p: setattr(p, 'grad', DTensor.from_local(\n"
        "                    p.grad.to_local(), p.device_mesh, [Partial()], run_check=False\n"
        "                ).redistribute(placements=[Replicate()]))\n"
        "            )\n"
        "        return local",
        expect="value: ",
    ),
    InjectedBug(
        name="the gradient of a replicated tensor summed over tp",
        kind="scale",
        at="parallelizer:STYLES",
        old='"replicate": Replicated,',
        new='"replicate": ReplicatedOnShards,',
        expect="value: off by the constant factor",
    ),
    InjectedBug(
        name="an identity expert that is not divided",
        kind="scale",
        at="parallelizer:DividedInput.before_forward",
        old="x / mesh.size()",
        new="x / 1",
        expect="value: off by the constant factor",
    ),
    InjectedBug(
        name="outputs of ranks not summed",
        kind="reduction",
        at="parallelizer:sum_over_ranks",
        old="DTensor.from_local(x, mesh, [Partial()], run_check=False)",
        new="DTensor.from_local(x, mesh, [Replicate()], run_check=False)",
        expect="value: ",
    ),
    InjectedBug(
        name="gradients of a shared input not summed",
        kind="reduction",
        at="parallelizer:sum_gradient",
        old="to_local(grad_placements=[Partial()])",
        new="to_local()",
        expect="value: ",
    ),
    InjectedBug(
        name="a forward that leaves its local parameters behind",
        kind="buffer",
        at="parallelizer:_show_parameters",
        old="        vars(owner).pop(leaf, None)",
        new="        pass",
        expect="value: ",
        survives="the next forward puts its own in their place; that `module.weight` is then a rank's part has a test",
    ),
    # What styles shard
    InjectedBug(
        name="packed halves sharded as one",
        kind="order",
        at="parallelizer:shard_of_halves",
        old="return strided_shard(dim, HALVES)",
        new="return strided_shard(dim, 1)",
        expect="value: ",
    ),
    InjectedBug(
        name="a bias added on every rank",
        kind="scale",
        at="parallelizer:PackedRowwise.local_parameter",
        old='return None if name == "bias" else parameter.to_local()',
        new="return parameter.to_local()",
        expect="value: ",
    ),
    InjectedBug(
        name="a bias forgotten after the sum",
        kind="statistic",
        at="parallelizer:PackedRowwise.after_forward",
        old="return full + bias.to_local() if isinstance(bias, DTensor) else full",
        new="return full",
        expect="raised: ",
    ),
    InjectedBug(
        name="a packed layer whose input has a gradient of one rank",
        kind="reduction",
        at="parallelizer:PackedColwise.before_forward",
        old="(sum_gradient(x, mesh), *rest), kwargs",
        new="(x, *rest), kwargs",
        expect="value: ",
    ),
    InjectedBug(
        name="router weights whose gradients are not summed",
        kind="reduction",
        at="parallelizer:Experts.before_forward",
        old="return tuple(map(shared, args)), {name",
        new="return (shared(args[0]), *args[1:]), {name",
        expect="value: ",
    ),
    InjectedBug(
        name="experts whose outputs are not summed",
        kind="reduction",
        at="parallelizer:Experts.after_forward",
        old="return sum_over_ranks(output, mesh)",
        new="return output",
        expect="value: ",
    ),
    InjectedBug(
        name="gate and up of an expert sharded as one",
        kind="order",
        at="parallelizer:STACK_SHARDS",
        old='"packed_colwise": (shard_of_halves, -2),',
        new='"packed_colwise": (Shard, -2),',
        expect="value: ",
    ),
    InjectedBug(
        name="an expert's down projection sharded along its output",
        kind="order",
        at="parallelizer:STACK_SHARDS",
        old='"rowwise": (Shard, -1),',
        new='"rowwise": (Shard, -2),',
        expect="raised: ",
    ),
    InjectedBug(
        name="a part of a width taken for one of equal parts",
        kind="border",
        at="parallelizer:_with_full_width",
        old="torch.Size((*x.shape[:-1], module.in_features))",
        new="torch.Size((*x.shape[:-1], x.shape[-1] * mesh.size()))",
        expect="raised: ",
    ),
    InjectedBug(
        name="a full input taken for a shard",
        kind="order",
        at="parallelizer:STYLES",
        old='"rowwise_rep": _rowwise_of_full_input,',
        new='"rowwise_rep": Rowwise,',
        expect="raised: ",
    ),
    InjectedBug(
        name="gathered columns left on their ranks",
        kind="reduction",
        at="parallelizer:_colwise_gathered",
        old="return ColwiseParallel(output_layouts=Replicate())",
        new="return ColwiseParallel()",
        expect="raised: ",
    ),
    # Plans
    InjectedBug(
        name="a tie lost under the plan",
        kind="tied",
        at="parallelizer:_tie",
        old="        owner.register_parameter(leaf, shared)",
        new="        pass",
        expect="value: ",
    ),
    InjectedBug(
        name="a key that matches nothing passed over",
        kind="border",
        at="parallelizer:styles_by_module",
        old="if not names and not _was_removed(key, model):",
        new="if _was_removed(key, model):",
        expect="value: ",
    ),
    InjectedBug(
        name="two keys for one module, the later taken",
        kind="order",
        at="parallelizer:styles_by_module",
        old="            if name in styles:\n",
        new="            if name not in styles and False:\n",
        expect="value: ",
    ),
    InjectedBug(
        name="heads that do not divide passed over",
        kind="border",
        at="parallelizer:_head_problems",
        old="if isinstance(count, int) and count % tp:",
        new="if isinstance(count, int) and count % tp and tp > count * 8:",
        expect="value: ",
    ),
    InjectedBug(
        name="KV heads taken for heads",
        kind="border",
        at="parallelizer:HEADS",
        old='"k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"',
        new='"k_proj": "num_attention_heads", "v_proj": "num_attention_heads"',
        expect="value: ",
    ),
    InjectedBug(
        name="a tie of two placements passed over",
        kind="tied",
        at="parallelizer:_parameter_problems",
        old='            yield f"{both}, but they share one parameter; give both the same placement"',
        new="            continue",
        expect="value: ",
    ),
    InjectedBug(
        name="packed halves under FSDP passed over",
        kind="border",
        at="parallelizer:_parameter_problems",
        old="if packed and fsdp_size > 1:",
        new="if packed and fsdp_size > 1024:",
        expect="value: ",
    ),
    InjectedBug(
        name="to_cpu that returns a shard",
        kind="group",
        at="parallelizer:to_cpu",
        old="return _with_full_halves(v).full_tensor().cpu()",
        new="return v.to_local().cpu()",
        expect="raised: ",
    ),
    InjectedBug(
        name="to_cpu that returns an addend",
        kind="reduction",
        at="parallelizer:to_cpu",
        old="return _with_full_halves(v).full_tensor().cpu()",
        new="from torch.distributed.tensor import Replicate\n"
        "            return v.redistribute(\n"
        "                placements=[p if p.is_partial() else Replicate() for p in v.placements]\n"
        "            ).to_local().cpu()",
        expect="value: ",
    ),
)
