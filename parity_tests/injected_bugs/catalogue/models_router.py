"""Injected bugs of the router's losses inside of a model: what they are a mean of, and how they reach the gradient."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    InjectedBug(
        name="a router's losses divided by the ranks of cp",
        kind="scale",
        at="models:Moe.begin_step",
        old="averaged_over * self.placement.cp.size() / shards",
        new="averaged_over / shards",
        expect="value: ",
    ),
    InjectedBug(
        name="a router's losses summed over micro-batches",
        kind="scale",
        at="models:Moe.begin_step",
        old="averaged_over * self.placement.cp.size() / shards",
        new="averaged_over",
        expect="value: ",
    ),
    InjectedBug(
        name="a z-loss over this rank's tokens of a sequence",
        kind="scale",
        at="models:Moe.forward",
        old="z_loss(logits, rows[1] * cp.size())",
        new="z_loss(logits, rows[1])",
        expect="value: ",
    ),
    InjectedBug(
        name="all sequences of a rank balanced as one",
        kind="sequence",
        at="models:Moe.forward",
        old="sequence_balance_loss(probabilities.unflatten(0, rows), experts.unflatten(0, rows), cp)",
        new="sequence_balance_loss(probabilities[None], experts[None], cp)",
        expect="value: ",
    ),
    InjectedBug(
        name="a router's losses reported and not learned from",
        kind="reduction",
        at="models:Moe.forward",
        old="return with_loss(y, loss)",
        new="return with_loss(y, loss) if False else y + 0.0 * loss",
        expect="gradient: ",
    ),
    InjectedBug(
        name="an auxiliary loss without a gradient",
        kind="reduction",
        at="expert_parallel:_WithLoss.backward",
        old="cotangent.new_ones((), dtype=ctx.dtype)",
        new="cotangent.new_zeros((), dtype=ctx.dtype)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="an auxiliary loss weighed by what comes after it",
        kind="scale",
        at="expert_parallel:_WithLoss.backward",
        old="cotangent.new_ones((), dtype=ctx.dtype)",
        new="cotangent.sum().to(ctx.dtype)",
        expect="gradient: ",
    ),
)
