"""Faults of tensor-parallel styles and plans, and of reading what they cut."""

from parity_tests.faults.fault import Fault

WHOLE = "torch_impl/parallelizer/whole_styles.py"
LOCAL = "torch_impl/parallelizer/local_forward.py"
PACKED = "torch_impl/parallelizer/packed_styles.py"
MOE = "torch_impl/parallelizer/moe_styles.py"
STYLES = "torch_impl/parallelizer/tp_styles.py"
ROWWISE = "torch_impl/parallelizer/rowwise.py"
PLAN = "torch_impl/parallelizer/tp_plan.py"
CHECK = "torch_impl/parallelizer/plan_check.py"
KEYS = "torch_impl/parallelizer/plan_keys.py"
TO_CPU = "torch_impl/parallelizer/to_cpu.py"

PARTS = (
    Fault(
        name="the gradient of a norm of heads not summed over tp",
        kind="reduction",
        file=WHOLE,
        old="return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])",
        new="return parameter.to_local()",
        expect="value: ",
    ),
    Fault(
        name="the gradient of a norm of heads summed when it is accumulated",
        kind="reduction",
        file=WHOLE,
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
    Fault(
        name="the gradient of what is whole and alike summed over tp",
        kind="scale",
        file=STYLES,
        old='"replicate": Whole,',
        new='"replicate": WholeSeenInParts,',
        expect="value: off by the constant factor",
    ),
    Fault(
        name="an identity expert that is not divided",
        kind="scale",
        file=WHOLE,
        old="x / mesh.size()",
        new="x / 1",
        expect="value: off by the constant factor",
    ),
    Fault(
        name="outputs of ranks not summed",
        kind="reduction",
        file=LOCAL,
        old="DTensor.from_local(x, mesh, [Partial()], run_check=False)",
        new="DTensor.from_local(x, mesh, [Replicate()], run_check=False)",
        expect="value: ",
    ),
    Fault(
        name="gradients of a shared input not summed",
        kind="reduction",
        file=LOCAL,
        old="to_local(grad_placements=[Partial()])",
        new="to_local()",
        expect="value: ",
    ),
    Fault(
        name="a forward that leaves its local parameters behind",
        kind="buffer",
        file=LOCAL,
        old="        vars(owner).pop(leaf, None)",
        new="        pass",
        expect="value: ",
        survives="the next forward puts its own in their place; that `module.weight` is then a rank's part has a test",
    ),
)

CUTS = (
    Fault(
        name="packed halves cut as one",
        kind="order",
        file=PACKED,
        old="return halved(dim, HALVES)",
        new="return halved(dim, 1)",
        expect="value: ",
    ),
    Fault(
        name="a bias added on every rank",
        kind="scale",
        file=PACKED,
        old='return None if name == "bias" else parameter.to_local()',
        new="return parameter.to_local()",
        expect="value: ",
    ),
    Fault(
        name="a bias forgotten after the sum",
        kind="statistic",
        file=PACKED,
        old="return whole + bias.to_local() if isinstance(bias, DTensor) else whole",
        new="return whole",
        expect="raised: ",
    ),
    Fault(
        name="a packed layer whose input has a gradient of one rank",
        kind="reduction",
        file=PACKED,
        old="(as_addends(x, mesh), *others), kwargs",
        new="(x, *others), kwargs",
        expect="value: ",
    ),
    Fault(
        name="router weights whose gradients are not summed",
        kind="reduction",
        file=MOE,
        old="return tuple(map(each, args)), {name",
        new="return (each(args[0]), *args[1:]), {name",
        expect="value: ",
    ),
    Fault(
        name="experts whose outputs are not summed",
        kind="reduction",
        file=MOE,
        old="return summed(output, mesh)",
        new="return output",
        expect="value: ",
    ),
    Fault(
        name="gate and up of an expert cut as one",
        kind="order",
        file=MOE,
        old='"packed_colwise": (halves, -2),',
        new='"packed_colwise": (equal_parts, -2),',
        expect="value: ",
    ),
    Fault(
        name="an expert's down projection cut along its output",
        kind="order",
        file=MOE,
        old='"rowwise": (equal_parts, -1),',
        new='"rowwise": (equal_parts, -2),',
        expect="raised: ",
    ),
    Fault(
        name="a part of a width taken for one of equal parts",
        kind="border",
        file=ROWWISE,
        old="torch.Size((*x.shape[:-1], module.in_features))",
        new="torch.Size((*x.shape[:-1], x.shape[-1] * mesh.size()))",
        expect="raised: ",
    ),
    Fault(
        name="a whole input taken for a part",
        kind="order",
        file=STYLES,
        old='"rowwise_rep": _split,',
        new='"rowwise_rep": Rowwise,',
        expect="raised: ",
    ),
    Fault(
        name="gathered columns left on their ranks",
        kind="reduction",
        file=STYLES,
        old="return ColwiseParallel(output_layouts=Replicate())",
        new="return ColwiseParallel()",
        expect="raised: ",
    ),
)

PLANS = (
    Fault(
        name="a tie lost under the plan",
        kind="tied",
        file=PLAN,
        old="        owner.register_parameter(leaf, shared)",
        new="        pass",
        expect="value: ",
    ),
    Fault(
        name="a key that matches nothing passed over",
        kind="border",
        file=KEYS,
        old="if not names and not was_removed(key, model):",
        new="if was_removed(key, model):",
        expect="value: ",
    ),
    Fault(
        name="two keys for one module, the later taken",
        kind="order",
        file=KEYS,
        old="            if name in found:\n",
        new="            if name not in found and False:\n",
        expect="value: ",
    ),
    Fault(
        name="heads that do not divide passed over",
        kind="border",
        file=CHECK,
        old="if isinstance(number, int) and number % tp:",
        new="if isinstance(number, int) and number % tp and tp > number * 8:",
        expect="value: ",
    ),
    Fault(
        name="KV heads taken for heads",
        kind="border",
        file=CHECK,
        old='"k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"',
        new='"k_proj": "num_attention_heads", "v_proj": "num_attention_heads"',
        expect="value: ",
    ),
    Fault(
        name="a tie of two placements passed over",
        kind="tied",
        file=CHECK,
        old="        if one != two:",
        new="        if one != two and not (one or two):",
        expect="value: ",
    ),
    Fault(
        name="packed halves under FSDP passed over",
        kind="border",
        file=CHECK,
        old="if packed and fsdp_size > 1:",
        new="if packed and fsdp_size > 1024:",
        expect="value: ",
    ),
    Fault(
        name="to_cpu that returns a shard",
        kind="group",
        file=TO_CPU,
        old="return v.full_tensor().cpu()",
        new="return v.to_local().cpu()",
        expect="raised: ",
    ),
    Fault(
        name="to_cpu that returns an addend",
        kind="reduction",
        file=TO_CPU,
        old="return v.full_tensor().cpu()",
        new="from torch.distributed.tensor import Replicate\n"
        "            return v.redistribute(\n"
        "                placements=[p if p.is_partial() else Replicate() for p in v.placements]\n"
        "            ).to_local().cpu()",
        expect="value: ",
    ),
)

FAULTS = (*PARTS, *CUTS, *PLANS)
