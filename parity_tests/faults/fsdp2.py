"""Faults of cutting a whole model: axes, units, policies, offload, checkpointing, and the plan before them."""

from parity_tests.faults.fault import Fault

FSDP2 = "torch_impl/parallelizer/fsdp2.py"
AXES = "torch_impl/parallelizer/mesh_axes.py"
UNITS = "torch_impl/parallelizer/units.py"
CHECKPOINTING = "torch_impl/parallelizer/activation_checkpointing.py"
OUTPUT = "torch_impl/parallelizer/own_output.py"
PLAN = "torch_impl/parallelizer/tp_plan.py"

AXES_FAULTS = (
    Fault(
        name="cp ranks that FSDP does not know",
        kind="group",
        file=AXES,
        old="parts = [name for name in (self.data, self.cp) if name is not None]",
        new="parts = [name for name in (self.data,) if name is not None]",
        expect="gradient: ",
        source="a parallelizer that shards over data_parallel alone where nobody made dp_cp",
    ),
    Fault(
        name="replicas that FSDP does not know",
        kind="group",
        file=AXES,
        old="if self.size(self.replicate) == 1 or self.replicate is None:",
        new="if self.shard_size > 0:",
        expect="gradient: ",
        source="a parallelizer that refuses HSDP, where the refusal is taken out",
    ),
    Fault(
        name="replicas and shards exchanged",
        kind="group",
        file=AXES,
        old="joined([self.mesh[self.replicate], self.shard_mesh])",
        new="joined([self.shard_mesh, self.mesh[self.replicate]])",
        expect="gradient: ",
        equivalent="gradients are the mean over both; what is cut over which is seen in placements alone",
    ),
    Fault(
        name="the loss shared among shards alone",
        kind="group",
        file=AXES,
        old="parts = [name for name in (self.replicate, self.shard, self.data, self.cp) if name is not None]",
        new="parts = [name for name in (self.shard, self.data, self.cp) if name is not None]",
        expect="value: ",
    ),
    Fault(
        name="data ranks counted without the replicas",
        kind="scale",
        file=AXES,
        old="return self.size(self.replicate, self.shard, self.data, self.cp)",
        new="return self.size(self.shard, self.data, self.cp)",
        expect="gradient: off by the constant factor",
    ),
    Fault(
        name="data ranks counted without cp",
        kind="scale",
        file=AXES,
        old="return self.size(self.replicate, self.shard, self.data, self.cp)",
        new="return self.size(self.replicate, self.shard, self.data)",
        expect="gradient: off by the constant factor",
    ),
    Fault(
        name="the tensor-parallel axis taken for the data's",
        kind="group",
        file=AXES,
        old="return None if self.tp is None else self.mesh[self.tp]",
        new="return None if self.tp is None else self.shard_mesh",
        expect="raised: does not divide by tp=4",
    ),
)

POLICIES = (
    Fault(
        name="output_dtype on the blocks",
        kind="precision",
        file=FSDP2,
        old="inner, groups = replace(policy, output_dtype=None), units(model)",
        new="inner, groups = policy, units(model)",
        expect="raised: expected m1 and m2 to have the same dtype",
        source="NeMo Automodel, one policy for every unit: the last block hands float32 to a bfloat16 head",
    ),
    Fault(
        name="float64 narrowed unasked",
        kind="precision",
        file=FSDP2,
        old="return MixedPrecisionPolicy()\n",
        new="return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n",
        expect="value: ",
        source="NeMo Automodel: bfloat16 unless told otherwise, for a model of any dtype",
    ),
    Fault(
        name="float64 parameters computed in float32",
        kind="precision",
        file=FSDP2,
        old="return MixedPrecisionPolicy()\n",
        new="return MixedPrecisionPolicy(param_dtype=torch.float32)\n",
        expect="raised: mat1 and mat2 must have the same dtype",
    ),
    Fault(
        name="gradients reduced in bfloat16 whatever was asked",
        kind="precision",
        file=FSDP2,
        old="    if given is not None:\n        return given\n",
        new="    if given is not None:\n        return replace(given, reduce_dtype=torch.bfloat16)\n",
        expect="gradient: ",
    ),
    Fault(
        name="a policy that was given and is not used",
        kind="precision",
        file=FSDP2,
        old="    if given is not None:\n        return given\n",
        new="",
        expect="value: ",
    ),
    Fault(
        name="buffers cast with the parameters",
        kind="precision",
        file=FSDP2,
        old="    _shard(model, mesh, policy, offload, reshard_after_forward)\n",
        new="    model.to(torch.bfloat16)\n    _shard(model, mesh, policy, offload, reshard_after_forward)\n",
        expect="value: ",
        source="recipes that call model.to(dtype) first: rotary frequencies lose their digits",
    ),
)

UNIT_FAULTS = (
    Fault(
        name="a root that is not sharded",
        kind="reduction",
        file=FSDP2,
        old="    fully_shard(model, mesh=mesh, mp_policy=policy,",
        new="    _ = dict(mesh=mesh, mp_policy=policy,",
        expect="raised: ",
    ),
    Fault(
        name="blocks sharded over replicas and not inside them",
        kind="group",
        file=FSDP2,
        old="        fully_shard(module, mesh=mesh, mp_policy=inner,",
        new="        within = mesh[mesh.mesh_dim_names[-1]] if mesh.ndim > 1 else mesh\n"
        "        fully_shard(module, mesh=within, mp_policy=inner,",
        expect="gradient: ",
    ),
    Fault(
        name="units double wrapped: the lists of layers as well",
        kind="tied",
        file=UNITS,
        old="            yield from _elements(child, is_inside=True)\n        elif",
        new="            yield from _elements(child, is_inside=True)\n            yield child\n        elif",
        expect="raised: ",
    ),
    Fault(
        name="modules inside a block as units of their own",
        kind="tied",
        file=UNITS,
        old="        elif is_inside:\n            yield child\n",
        new="        elif is_inside:\n            yield from child.children()\n",
        expect="cost: ",
    ),
    Fault(
        name="a unit that a step forgets",
        kind="reduction",
        file=UNITS,
        old="return [block for block in found.values() if next(block.parameters(), None) is not None]",
        new="return [block for block in found.values() if next(block.parameters(), None) is not None][1:]",
        expect="cost: ",
    ),
)

ORDER = (
    Fault(
        name="FSDP before the tensor plan",
        kind="schedule",
        file=FSDP2,
        old="        apply_plan(model, tp_shard_plan, axes.tp_mesh)\n",
        new="        _shard(model, mesh, policy, offload, reshard_after_forward)\n"
        "        apply_plan(model, tp_shard_plan, axes.tp_mesh)\n",
        expect="raised: ",
    ),
    Fault(
        name="ties lost under the tensor plan",
        kind="tied",
        file=PLAN,
        old="    for first, *others in ties:\n        _tie(model, first, others)\n",
        new="",
        expect="value: ",
        source="parallelize_module, which gives each name a parameter of its own",
    ),
    Fault(
        name="a block that is given its input twice when computed again",
        kind="schedule",
        file=CHECKPOINTING,
        old="return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)",
        new="return checkpoint(forward, *(x.detach() for x in args), use_reentrant=False, **kwargs)",
        expect="gradient: ",
    ),
    Fault(
        name="checkpointing that keeps nothing to go back with",
        kind="schedule",
        file=CHECKPOINTING,
        old="return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)",
        new="return checkpoint(forward, *args, use_reentrant=True, **kwargs)",
        expect="raised: ",
    ),
    Fault(
        name="pinned memory on a mesh without an accelerator",
        kind="buffer",
        file=FSDP2,
        old="        return replace(given, pin_memory=False)\n",
        new="        return given\n",
        expect="raised: ",
    ),
    Fault(
        name="an output whose gradient stops",
        kind="reduction",
        file=OUTPUT,
        old="        return cotangent\n",
        new="        return torch.zeros_like(cotangent)\n",
        expect="gradient: ",
    ),
    Fault(
        name="an output in other memory, not filled",
        kind="buffer",
        file=OUTPUT,
        old="return x.detach()",
        new="return torch.zeros_like(x)",
        expect="value: ",
    ),
)

FAULTS = (*AXES_FAULTS, *POLICIES, *UNIT_FAULTS, *ORDER)
