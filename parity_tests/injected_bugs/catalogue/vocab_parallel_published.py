"""Injected bugs of the vocabulary that others published first."""

from parity_tests.injected_bugs.injected_bug import MEGATRON, TRAIN_VERIFY, InjectedBug

BUGS = (
    # Published mistakes
    InjectedBug(
        name="all-reduce for all-gather",
        kind="reduction",
        at="vocab_parallel:gather_statistics",
        old="else all_gather_stack(statistics, group)",
        new="else __import__('torch_impl.collectives.plain', fromlist=['all_reduce_sum'])"
        ".all_reduce_sum(statistics, group).expand(group.size(), *statistics.shape)",
        expect="cost: all_gather: declared 1 call of",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="one rank has another constant",
        kind="scale",
        at="vocab_parallel:row_statistics",
        old="local(block, block_column, options.temperature,",
        new="local(block, block_column, options.temperature * (1 + (options.group.rank() == 1)),",
        expect="value: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="one rank has another exponent",
        kind="scale",
        at="vocab_parallel:row_statistics",
        old="local(block, block_column,",
        new="local(block * (0.6931 if options.group.rank() == 1 else 1.0), block_column,",
        expect="value: ",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="ranks have inconsistent constants",
        kind="scale",
        at="vocab_parallel:backward",
        old="options.temperature, options.normalised)",
        new="options.temperature * (1 + options.group.rank()), options.normalised)",
        expect="gradient: forward equal, gradient not",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="one rank's backward takes the wrong tensors",
        kind="buffer",
        at="vocab_parallel:backward",
        old="logits, row_max, log_row_sum, column, shifted_mean = ctx.saved_tensors\n",
        new="logits, row_max, log_row_sum, column, shifted_mean = ctx.saved_tensors\n"
        "    if options.group.rank() == 1:\n        row_max, log_row_sum = log_row_sum, row_max\n",
        expect="gradient: wrong only where tp rank 1 owns",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="backward scaled otherwise than forward",
        kind="scale",
        at="vocab_parallel:_dense_gradient",
        old="log_row_sum.exp().mul_(-temperature)",
        new="log_row_sum.exp().mul_(-(temperature**2))",
        expect="gradient: off by the constant factor",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="last operation of the last block missing",
        kind="schedule",
        at="vocab_parallel:backward",
        old="        write(out, block, normaliser,",
        new="        if row_slice.start and row_slice.stop == row_max.numel():\n"
        "            out.zero_()\n            continue\n"
        "        write(out, block, normaliser,",
        expect="gradient: forward equal, gradient not",
        source=TRAIN_VERIFY,
    ),
    InjectedBug(
        name="cross entropy on gathered logits",
        kind="statistic",
        at="vocab_parallel:global_normaliser",
        old="return Normaliser(row_max, row_sum_m1.log1p())",
        new="return Normaliser(row_max, row_sum_m1.log1p() + math.log(len(row_max_r)))",
        expect="value: log tp",
        source=MEGATRON,
    ),
    InjectedBug(
        name="entropy from one rank's statistics",
        kind="statistic",
        at="vocab_parallel:global_shifted_mean",
        old="return torch.where(weight == 0, 0.0, weight * (shifted_mean_r + shifted_max_r)).sum(0)",
        new="return torch.where(weight == 0, 0.0, weight * (shifted_mean_r + shifted_max_r))[0]",
        expect="value: ",
        source=MEGATRON,
    ),
    InjectedBug(
        name="statistics exchanged over the global group",
        kind="group",
        at="vocab_parallel:forward",
        old="statistics.gather_statistics(row_statistics(logits, column, options), options.group)",
        new="statistics.gather_statistics(row_statistics(logits, column, options), torch.distributed.group.WORLD)",
        expect="hygiene: the default group is used inside a sub-group",
        source=MEGATRON,
    ),
    InjectedBug(
        name="padding mask from the rank's own targets",
        kind="group",
        at="vocab_parallel:forward",
        old="column.masked_fill_((z_t == math.inf).mT, statistics.OUT_OF_VOCABULARY)",
        new="column.masked_fill_(column == statistics.ON_ANOTHER_RANK, statistics.OUT_OF_VOCABULARY)",
        expect="gradient: ",
        source=MEGATRON,
    ),
)
