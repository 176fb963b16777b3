"""Injected bugs of the tiles in which long rows are computed on a CPU."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    InjectedBug(
        name="long rows: largest term counted twice",
        kind="statistic",
        at="vocab_parallel:row_sums",
        old=".scatter_(-1, largest, 0.0)\n",
        new="\n",
        expect="value: ",
    ),
    InjectedBug(
        name="long rows: span of the maximum not summed again",
        kind="statistic",
        at="vocab_parallel:row_sums",
        old="span_sum.scatter_(-1, span, terms.sum(-1, keepdim=True)).sum(",
        new="span_sum.sum(",
        expect="value: ",
    ),
    InjectedBug(
        name="long rows: columns after the last full span left out of the maximum and the sum",
        kind="border",
        at="vocab_parallel:_reduce_spans",
        old="reduce(x[:, end:], -1, out=out[:, -1])",
        new="out[:, -1] = -math.inf if reduce is torch.amax else 0.0",
        expect="value: ",
    ),
    InjectedBug(
        name="long rows: last column repeated to fill the last span",
        kind="border",
        at="vocab_parallel:row_sums",
        old=".to(dtype).masked_fill_(columns >= width, -math.inf)",
        new=".to(dtype)",
        expect="value: ",
    ),
    InjectedBug(
        name="long rows: temperature missing from the span that is summed again",
        kind="scale",
        at="vocab_parallel:row_sums",
        old="logits.sub_(finite(row_max)).mul_(scale).exp2_()",
        new="logits.sub_(finite(row_max)).mul_(LOG2_E).exp2_()",
        expect="value: ",
    ),
    InjectedBug(
        name="long rows: entropy's mean over terms and not over their shifted logits",
        kind="statistic",
        at="vocab_parallel:row_sums",
        old="terms.mul_(shifted.clamp_min_(LOWEST_SHIFTED)).sum(",
        new="terms.mul_(shifted.clamp_min_(-1.0)).sum(",
        expect="value: ",
    ),
    InjectedBug(
        name="long rows: gradient of the first row's maximum in every row",
        kind="order",
        at="vocab_parallel:write_terms",
        old="torch.sub(wide, row_max[rows], out=shifted)",
        new="torch.sub(wide, row_max[:1], out=shifted)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="long rows: gradient with the row's scale before the floor",
        kind="border",
        at="vocab_parallel:write_terms",
        old="shifted.clamp_min_(LOWEST_SHIFTED).mul_(row_scale[rows])",
        new="shifted.mul_(row_scale[rows])",
        expect="gradient: not finite",
    ),
    InjectedBug(
        name="long rows: nothing written at the ids of bfloat16 logits",
        kind="border",
        at="vocab_parallel:_scatter_at_ids",
        old="gradient.view(torch.int16).scatter_(-1, index, values.view(torch.int16))",
        new="pass",
        expect="gradient: ",
    ),
)
