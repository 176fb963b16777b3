"""Faults of Megatron-FSDP's contract: strategies, switches, values from the meta device, the look at gradients."""

from parity_tests.faults.fault import Fault

NATIVE = "torch_impl/parallelizer/nvfsdp_native.py"
META = "torch_impl/parallelizer/meta_init.py"
FINITE = "torch_impl/parallelizer/finite_gradients.py"

STRATEGIES = (
    Fault(
        name="whole parameters reduced among shards alone",
        kind="group",
        file=NATIVE,
        old="axes.fsdp_mesh if settings.is_sharded else axes.loss_mesh",
        new="axes.fsdp_mesh if settings.is_sharded else axes.shard_mesh",
        expect="value: ",
    ),
    Fault(
        name="a loss per token that is averaged all the same",
        kind="scale",
        file=NATIVE,
        old="                module.set_gradient_divide_factor(1.0)",
        new="                pass",
        expect="value: off by the constant factor",
    ),
    Fault(
        name="every gradient summed and none averaged",
        kind="scale",
        file=NATIVE,
        old="            if settings.calculate_per_token_loss:",
        new="            if True:",
        expect="value: off by the constant factor",
    ),
    Fault(
        name="whole parameters whose gradients stay on their ranks",
        kind="reduction",
        file=NATIVE,
        old="            replicate_module(module, mesh, policy)",
        new="            replicate_module(module, mesh, policy)\n"
        "            module.set_requires_gradient_sync = lambda sync: None\n"
        "            FSDPModule.set_requires_gradient_sync(module, False)",
        expect="value: ",
    ),
    Fault(
        name="a part of the plan applied to half of a block",
        kind="group",
        file=NATIVE,
        old="{name: styled[name] for name in part.inside if name in styled}",
        new="{name: styled[name] for name in part.inside if name in styled and not name.endswith('up')}",
        expect="raised: ",
    ),
    Fault(
        name="a root that nobody reduces",
        kind="reduction",
        file=NATIVE,
        old="        _shard(part, mesh, settings)\n",
        new="        _shard(part, mesh, settings) if part is not parts[-1] or len(parts) == 1 else None\n",
        expect="raised: ",
    ),
    Fault(
        name="reductions in bfloat16",
        kind="precision",
        file=NATIVE,
        old="MixedPrecisionPolicy(param_dtype=part.dtype if keeps_masters else None, reduce_dtype=reduced)",
        new="MixedPrecisionPolicy(param_dtype=part.dtype if keeps_masters else None, reduce_dtype=torch.bfloat16)",
        expect="value: ",
    ),
    Fault(
        name="float64 reduced in float32 where float32 was asked",
        kind="precision",
        file=NATIVE,
        old="torch.promote_types(part.dtype, torch.float32) if",
        new="torch.float32 if",
        expect="value: ",
    ),
)

META_VALUES = (
    Fault(
        name="values from each rank's own seed",
        kind="group",
        file=META,
        old="    return int(seed)",
        new="    return torch.initial_seed() % 2**62",
        expect="value: ",
    ),
    Fault(
        name="a seed that is sent along the first axis alone",
        kind="group",
        file=META,
        old="    for axis in range(mesh.ndim):",
        new="    for axis in range(1):",
        expect="value: ",
    ),
    Fault(
        name="values that depend on the unit they are made in",
        kind="order",
        file=META,
        old="own_seed = (seed + zlib.crc32(name.encode())) % 2**62",
        new="own_seed = seed + len(modules)",
        expect="value: ",
    ),
)

LOOK = (
    Fault(
        name="each rank looks at its own gradients alone",
        kind="group",
        file=FINITE,
        old="        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)",
        new="        pass",
        expect="value: ",
    ),
    Fault(
        name="the ranks' places of what is not finite added up",
        kind="reduction",
        file=FINITE,
        old="op=dist.ReduceOp.MAX, group=self._group",
        new="op=dist.ReduceOp.SUM, group=self._group",
        expect="raised: ",
    ),
    Fault(
        name="infinities taken for finite",
        kind="statistic",
        file=FINITE,
        old="torch.where(magnitudes.isfinite(), 0, to_the_end)",
        new="torch.where(~magnitudes.isnan(), 0, to_the_end)",
        expect="value: ",
    ),
    Fault(
        name="a look at the gradients before they are reduced",
        kind="schedule",
        file=FINITE,
        old="            after_backward(self._check)",
        new="            self._check()",
        expect="value: ",
    ),
    Fault(
        name="the look asked for by nobody",
        kind="schedule",
        file=NATIVE,
        old="    if settings.check_for_nan_in_grad:",
        new="    if settings.check_for_nan_in_grad and not settings.is_sharded:",
        expect="value: ",
    ),
)

FAULTS = (*STRATEGIES, *META_VALUES, *LOOK)
