"""Injected bugs of Megatron-FSDP's contract: strategies and switches, the meta device, checked gradients."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    # Megatron-FSDP: strategies and switches
    InjectedBug(
        name="replicated parameters reduced among shards alone",
        kind="group",
        at="parallelizer:parallelize",
        old="axes.fsdp_mesh if settings.is_sharded else axes.loss_mesh",
        new="axes.fsdp_mesh if settings.is_sharded else axes.shard_mesh",
        expect="value: ",
    ),
    InjectedBug(
        name="a loss per token that is averaged all the same",
        kind="scale",
        at="parallelizer:_configure_units",
        old="                module.set_gradient_divide_factor(1.0)",
        new="                pass",
        expect="value: off by the constant factor",
    ),
    InjectedBug(
        name="every gradient summed and none averaged",
        kind="scale",
        at="parallelizer:_configure_units",
        old="            if settings.calculate_per_token_loss:",
        new="            if True:",
        expect="value: off by the constant factor",
    ),
    InjectedBug(
        name="replicated parameters whose gradients stay on their ranks",
        kind="reduction",
        at="parallelizer:_shard_unit",
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
        old="{name: styles[name] for name in unit.modules if name in styles}",
        new="{name: styles[name] for name in unit.modules if name in styles and not name.endswith('up')}",
        expect="raised: ",
    ),
    InjectedBug(
        name="a root that is never reduced",
        kind="reduction",
        at="parallelizer:parallelize",
        old="        _shard_unit(unit, mesh, settings)\n",
        new="        _shard_unit(unit, mesh, settings) if unit is not units[-1] or len(units) == 1 else None\n",
        expect="raised: ",
    ),
    InjectedBug(
        name="reductions in bfloat16",
        kind="precision",
        at="parallelizer:_shard_unit",
        old="MixedPrecisionPolicy(param_dtype=unit.dtype if has_masters else None, reduce_dtype=reduce_dtype)",
        new="MixedPrecisionPolicy(param_dtype=unit.dtype if has_masters else None, reduce_dtype=torch.bfloat16)",
        expect="value: ",
    ),
    InjectedBug(
        name="float64 reduced in float32 where the policy says float32",
        kind="precision",
        at="parallelizer:_shard_unit",
        old="torch.promote_types(unit.dtype, torch.float32) if",
        new="torch.float32 if",
        expect="value: ",
    ),
    # Megatron-FSDP: values from the meta device
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
        old="module_seed = (seed + zlib.crc32(name.encode())) % 2**62",
        new="module_seed = seed + len(modules)",
        expect="value: ",
    ),
    # Megatron-FSDP: the check of gradients
    InjectedBug(
        name="each rank looks at its own gradients alone",
        kind="group",
        at="parallelizer:_GradientCheck._check",
        old="        dist.all_reduce(distance, op=dist.ReduceOp.MAX, group=self._group)",
        new="        pass",
        expect="value: ",
    ),
    InjectedBug(
        name="the ranks' places of what is not finite added up",
        kind="reduction",
        at="parallelizer:_GradientCheck._check",
        old="op=dist.ReduceOp.MAX, group=self._group",
        new="op=dist.ReduceOp.SUM, group=self._group",
        expect="raised: ",
    ),
    InjectedBug(
        name="infinities taken for finite",
        kind="statistic",
        at="parallelizer:_distance_from_end",
        old="torch.where(magnitudes.isfinite(), 0, from_end)",
        new="torch.where(~magnitudes.isnan(), 0, from_end)",
        expect="value: ",
    ),
    InjectedBug(
        name="a look at the gradients before they are reduced",
        kind="schedule",
        at="parallelizer:_GradientCheck._queue",
        old="            after_backward(self._check)",
        new="            self._check()",
        expect="value: ",
    ),
    InjectedBug(
        name="the gradient check skipped for sharded strategies",
        kind="schedule",
        at="parallelizer:parallelize",
        old="    if settings.check_for_nan_in_grad:",
        new="    if settings.check_for_nan_in_grad and not settings.is_sharded:",
        expect="value: ",
    ),
)
