"""Mistakes that were made elsewhere, re-created on our components.

The classes of TrainVerify's artifact, and those findings of NVIDIA/Megatron-LM #7452 for which
there is a component. Where theirs stood in a component that is not here, the nearest of ours carries it.
"""

from parity_tests.injected_bugs.injected_bug import InjectedBug

TRAIN_VERIFY = (
    InjectedBug(
        name="all-reduce missing, data flow intact",
        kind="reduction",
        at="collectives:_AllReduce.forward",
        old="ctx.group, ctx.out = group, out\n        return summed(x, group)",
        new="ctx.group, ctx.out = group, out\n        return x.clone()",
        expect="value: missing a sum over tp",
    ),
    InjectedBug(
        name="all-reduce there, its result lost",
        kind="reduction",
        at="collectives:summed",
        old="dist.all_reduce(total, op=",
        new="dist.all_reduce(total.clone(), op=",
        expect="value: missing a sum over tp",
    ),
    InjectedBug(
        name="all-gather for all-reduce",
        kind="reduction",
        at="collectives:_AllReduce.forward",
        old="return summed(x, group)",
        new="from torch_impl.collectives.plain import gathered\n\n"
        "        return gathered(x.unsqueeze(0), group, 0, [1] * group.size())[0]",
        expect="cost: all_gather: declared 0 calls",
    ),
    InjectedBug(
        name="all-reduce for all-gather",
        kind="reduction",
        at="vocab_parallel:exchanged",
        old="return gathered(statistics.unsqueeze(0), group, 0, [1] * group.size())",
        new="from torch_impl.collectives.plain import summed\n\n"
        "    return summed(statistics, group).expand(group.size(), *statistics.shape)",
        expect="cost: all_gather: declared 1 calls",
    ),
    InjectedBug(
        name="reduction missing in a fused backward",
        kind="reduction",
        at="collectives:_AllGather.backward",
        old='if ctx.out == "R":',
        new='if ctx.out == "none":',
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="wrong neighbour",
        kind="schedule",
        at="collectives:start_ring_shift",
        old="to, source = (rank + shift) % world, (rank - shift) % world",
        new="to, source = (rank - shift) % world, (rank + shift) % world",
        expect="value: same values in another order",
    ),
    InjectedBug(
        name="one rank sends to another than the others do",
        kind="schedule",
        at="collectives:start_ring_shift",
        old="to, source = (rank + shift) % world, (rank - shift) % world",
        new="to, source = (rank + (shift if rank else -shift)) % world, (rank - shift) % world",
        expect="value: wrong only where tp rank",
    ),
    InjectedBug(
        name="one rank has another constant",
        kind="scale",
        at="vocab_parallel:statistics_of",
        old="statistics[:, part] = local(block, block_column, plan.temperature,",
        new="statistics[:, part] = local(block, block_column, plan.temperature * (1 + (plan.group.rank() == 1)),",
        expect="value: ",
    ),
    InjectedBug(
        name="one rank has another exponent",
        kind="scale",
        at="vocab_parallel:statistics_of",
        old="statistics[:, part] = local(block, block_column,",
        new="statistics[:, part] = local(block * (0.6931 if plan.group.rank() == 1 else 1.0), block_column,",
        expect="value: ",
    ),
    InjectedBug(
        name="ranks have inconsistent constants",
        kind="scale",
        at="vocab_parallel:backward",
        old="write(out, block, plan.temperature, plan.normalised",
        new="write(out, block, plan.temperature * (1 + plan.group.rank()), plan.normalised",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="one rank's backward takes the wrong tensors",
        kind="buffer",
        at="vocab_parallel:backward",
        old="logits, largest, log_total, column, depth = ctx.saved_tensors\n",
        new="logits, largest, log_total, column, depth = ctx.saved_tensors\n"
        "    if plan.group.rank() == 1:\n        largest, log_total = log_total, largest\n",
        expect="gradient: wrong only where tp rank 1 owns",
    ),
    InjectedBug(
        name="backward reversed on one rank",
        kind="schedule",
        at="collectives:_RingShift.backward",
        old="_shifted(cotangent, ctx.group, -ctx.shift)",
        new="_shifted(cotangent, ctx.group, ctx.shift if ctx.group.rank() == 1 else -ctx.shift)",
        expect="deadlock: [bwd]",
    ),
    InjectedBug(
        name="gradient divided by the number of ranks",
        kind="scale",
        at="collectives:_AllReduce.backward",
        old='gradient = summed(cotangent, ctx.group) if ctx.out == "R" else cotangent',
        new='gradient = summed(cotangent, ctx.group) / ctx.group.size() if ctx.out == "R" else cotangent',
        expect="gradient: off by the constant factor",
    ),
    InjectedBug(
        name="backward scaled otherwise than forward",
        kind="scale",
        at="vocab_parallel:write_gradient",
        old="out.copy_(gradient if temperature == 1.0 else gradient.div_(temperature))",
        new="out.copy_(gradient if temperature == 1.0 else gradient / temperature**2)",
        expect="gradient: off by the constant factor",
    ),
    InjectedBug(
        name="last operation of the last block missing",
        kind="schedule",
        at="vocab_parallel:backward",
        old="        write(out, block, plan.temperature,",
        new="        if part.start and part.stop == largest.numel():\n            out.zero_()\n            continue\n"
        "        write(out, block, plan.temperature,",
        expect="gradient: forward equal, gradient not",
    ),
)

MEGATRON = (
    InjectedBug(
        name="cross entropy on gathered logits",
        kind="statistic",
        at="vocab_parallel:merged_normaliser",
        old="return Normaliser(largest, rest.log1p())",
        new="return Normaliser(largest, rest.log1p() + math.log(len(m_r)))",
        expect="value: log tp",
    ),
    InjectedBug(
        name="entropy from one rank's statistics",
        kind="statistic",
        at="vocab_parallel:merged_depth",
        old="return torch.where(weight == 0, 0.0, weight * (d_r + above)).sum(0)",
        new="return torch.where(weight == 0, 0.0, weight * (d_r + above))[0]",
        expect="value: ",
    ),
    InjectedBug(
        name="statistics exchanged over the global group",
        kind="group",
        at="vocab_parallel:forward",
        old="st.exchanged(statistics_of(logits, column, plan), plan.group)",
        new="st.exchanged(statistics_of(logits, column, plan), torch.distributed.group.WORLD)",
        expect="hygiene: the default group is used inside a sub-group",
    ),
    InjectedBug(
        name="padding mask from the rank's own targets",
        kind="group",
        at="vocab_parallel:forward",
        old="torch.where(z_t == math.inf, st.NOBODYS, column)",
        new="torch.where(column == st.NOT_HERE, st.NOBODYS, column)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="replicated value with a partial gradient",
        kind="tied",
        at="collectives:_AllReduce.backward",
        old='gradient = summed(cotangent, ctx.group) if ctx.out == "R" else cotangent',
        new="gradient = cotangent",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="replicated gradient counted once per rank",
        kind="tied",
        at="collectives:_AllReduce.backward",
        old='gradient = summed(cotangent, ctx.group) if ctx.out == "R" else cotangent',
        new="gradient = summed(cotangent, ctx.group)",
        expect="gradient: off by the constant factor",
    ),
)

BUGS = tuple(
    InjectedBug(**{**vars(fault), "source": source})
    for source, faults in (("TrainVerify", TRAIN_VERIFY), ("NVIDIA/Megatron-LM #7452", MEGATRON))
    for fault in faults
)
