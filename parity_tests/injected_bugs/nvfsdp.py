"""Faults of Megatron-FSDP's contract: strategies, switches, values from the meta device, the look at gradients."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

STRATEGIES = (
    InjectedBug(
        name="whole parameters reduced among shards alone",
        kind="group",
        at="parallelizer:parallelize",
        old="axes.fsdp_mesh if settings.is_sharded else axes.loss_mesh",
        new="axes.fsdp_mesh if settings.is_sharded else axes.shard_mesh",
        expect="value: ",
    ),
    InjectedBug(
        name="a loss per token that is averaged all the same",
        kind="scale",
        at="parallelizer:_tell_units",
        old="                module.set_gradient_divide_factor(1.0)",
        new="                pass",
        expect="value: off by the constant factor",
    ),
    InjectedBug(
        name="every gradient summed and none averaged",
        kind="scale",
        at="parallelizer:_tell_units",
        old="            if settings.calculate_per_token_loss:",
        new="            if True:",
        expect="value: off by the constant factor",
    ),
    InjectedBug(
        name="whole parameters whose gradients stay on their ranks",
        kind="reduction",
        at="parallelizer:_shard",
        old="            replicate_module(module, mesh, policy)",
        new="            replicate_module(module, mesh, policy)\n"
        "            module.set_requires_gradient_sync = lambda sync: None\n"
        "            FSDPModule.set_requires_gradient_sync(module, False)",
        expect="value: ",
    ),
    InjectedBug(
        name="a part of the plan applied to half of a block",
        kind="group",
        at="parallelizer:parallelize",
        old="{name: styled[name] for name in part.inside if name in styled}",
        new="{name: styled[name] for name in part.inside if name in styled and not name.endswith('up')}",
        expect="raised: ",
    ),
    InjectedBug(
        name="a root that nobody reduces",
        kind="reduction",
        at="parallelizer:parallelize",
        old="        _shard(part, mesh, settings)\n",
        new="        _shard(part, mesh, settings) if part is not parts[-1] or len(parts) == 1 else None\n",
        expect="raised: ",
    ),
    InjectedBug(
        name="reductions in bfloat16",
        kind="precision",
        at="parallelizer:_shard",
        old="MixedPrecisionPolicy(param_dtype=part.dtype if keeps_masters else None, reduce_dtype=reduced)",
        new="MixedPrecisionPolicy(param_dtype=part.dtype if keeps_masters else None, reduce_dtype=torch.bfloat16)",
        expect="value: ",
    ),
    InjectedBug(
        name="float64 reduced in float32 where float32 was asked",
        kind="precision",
        at="parallelizer:_shard",
        old="torch.promote_types(part.dtype, torch.float32) if",
        new="torch.float32 if",
        expect="value: ",
    ),
)

META_VALUES = (
    InjectedBug(
        name="values from each rank's own seed",
        kind="group",
        at="parallelizer:shared_seed",
        old="    return int(seed)",
        new="    return torch.initial_seed() % 2**62",
        expect="value: ",
    ),
    InjectedBug(
        name="a seed that is sent along the first axis alone",
        kind="group",
        at="parallelizer:shared_seed",
        old="    for axis in range(mesh.ndim):",
        new="    for axis in range(1):",
        expect="value: ",
    ),
    InjectedBug(
        name="values that depend on the unit they are made in",
        kind="order",
        at="parallelizer:materialize",
        old="own_seed = (seed + zlib.crc32(name.encode())) % 2**62",
        new="own_seed = seed + len(modules)",
        expect="value: ",
    ),
)

LOOK = (
    InjectedBug(
        name="each rank looks at its own gradients alone",
        kind="group",
        at="parallelizer:_Watch._check",
        old="        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)",
        new="        pass",
        expect="value: ",
    ),
    InjectedBug(
        name="the ranks' places of what is not finite added up",
        kind="reduction",
        at="parallelizer:_Watch._check",
        old="op=dist.ReduceOp.MAX, group=self._group",
        new="op=dist.ReduceOp.SUM, group=self._group",
        expect="raised: ",
    ),
    InjectedBug(
        name="infinities taken for finite",
        kind="statistic",
        at="parallelizer:_not_finite",
        old="torch.where(magnitudes.isfinite(), 0, to_the_end)",
        new="torch.where(~magnitudes.isnan(), 0, to_the_end)",
        expect="value: ",
    ),
    InjectedBug(
        name="a look at the gradients before they are reduced",
        kind="schedule",
        at="parallelizer:_Watch._ask",
        old="            after_backward(self._check)",
        new="            self._check()",
        expect="value: ",
    ),
    InjectedBug(
        name="the look asked for by nobody",
        kind="schedule",
        at="parallelizer:parallelize",
        old="    if settings.check_for_nan_in_grad:",
        new="    if settings.check_for_nan_in_grad and not settings.is_sharded:",
        expect="value: ",
    ),
)

BUGS = (*STRATEGIES, *META_VALUES, *LOOK)
