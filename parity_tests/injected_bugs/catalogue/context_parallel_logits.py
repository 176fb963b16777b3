"""Injected bugs of the logits of attention over cp: sinks, their gradient, and soft-capping."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    InjectedBug(
        name="a sink that takes no share",
        kind="statistic",
        at="context_parallel:RunningAttention.__init__",
        old="self.lse.copy_(sinks[:, None])",
        new="self.lse.sub_(sinks.sum())",
        expect="value: ",
    ),
    InjectedBug(
        name="the gradient of a sink of this rank alone",
        kind="reduction",
        at="context_parallel:_addend_gradients",
        old="of_ring = as_replicated(sinks, groups.ring)",
        new="of_ring = sinks",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="the gradient of a sink summed over the ring alone",
        kind="group",
        at="context_parallel:_addend_gradients",
        old="return of_ring if groups.size == groups.ring.size() else as_replicated(of_ring, groups.heads)",
        new="return of_ring",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="the gradient of a sink of the other sign",
        kind="scale",
        at="context_parallel:_sink_gradient",
        old="return -(weights",
        new="return (weights",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="the gradient of a sink as if it took all",
        kind="statistic",
        at="context_parallel:_sink_gradient",
        old="-(weights * products.sum(-1))",
        new="-products.sum(-1)",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="the sinks of the first heads on every rank",
        kind="order",
        at="context_parallel:head_parallel_attention",
        old="options.sinks.unflatten(0, (heads_size, -1))[heads.rank()]",
        new="options.sinks.unflatten(0, (heads_size, -1))[0]",
        expect="value: ",
    ),
    InjectedBug(
        name="a cap without its slope",
        kind="scale",
        at="context_parallel:plain_backward",
        old="                ds = ds * (1 - (scores / softcap).clamp(min=-1).square())\n",
        new="                ds = ds * 1\n",
        expect="gradient: forward equal, gradient not",
    ),
    InjectedBug(
        name="scores capped before they are scaled",
        kind="scale",
        at="context_parallel:_scores",
        old="scores = softcap * (scores / softcap).tanh()",
        new="scores = scale * softcap * (scores / (scale * softcap)).tanh()",
        expect="value: ",
    ),
    InjectedBug(
        name="a cap that is dropped in backward",
        kind="scale",
        at="context_parallel:_backward",
        old="block.mask, block.is_causal, scale, options.softcap)",
        new="block.mask, block.is_causal, scale, None)",
        expect="gradient: forward equal, gradient not",
    ),
)
