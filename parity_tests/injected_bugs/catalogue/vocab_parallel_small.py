"""Injected bugs of the short route that small calls of the log-probability take on full rows."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    InjectedBug(
        name="small call: largest term left out of the sum",
        kind="statistic",
        at="vocab_parallel:forward",
        old=".sum(-1, keepdim=True).log1p_()",
        new=".sum(-1, keepdim=True).log_()",
        expect="value: ",
    ),
    InjectedBug(
        name="small call: last id of the vocabulary taken for an id outside it",
        kind="border",
        at="vocab_parallel:forward",
        old="index = column.clamp(0, options.vocab_end - options.vocab_start - 1)",
        new="index = column.clamp(0, options.vocab_end - options.vocab_start - 2)",
        expect="value: ",
    ),
    InjectedBug(
        name="small call: temperature missing from the logit at the id",
        kind="scale",
        at="vocab_parallel:forward",
        old="_divide_by_temperature(wide.gather(-1, index) - row_max, options)",
        new="(wide.gather(-1, index) - row_max)",
        expect="value: ",
    ),
    InjectedBug(
        name="small call: temperature missing from the gradient",
        kind="scale",
        at="vocab_parallel:backward",
        old="_divide_by_temperature(gradient.masked_fill_(is_outside, 0.0), ctx.options)",
        new="gradient.masked_fill_(is_outside, 0.0)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="small call: gradient of an ignored row",
        kind="border",
        at="vocab_parallel:backward",
        old="gradient.masked_fill_(is_outside, 0.0)",
        new="gradient",
        expect="gradient: ",
    ),
    InjectedBug(
        name="small call: one minus p at the id where p is almost one",
        kind="precision",
        at="vocab_parallel:backward",
        old="log_p.gather(-1, index).expm1_()",
        new="log_p.gather(-1, index).exp_().sub_(1.0)",
        expect="gradient: ",
    ),
)
