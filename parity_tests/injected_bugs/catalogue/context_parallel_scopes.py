"""Injected bugs of what a context leaves alone, and of the hooks by which an unmodified model runs inside."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    InjectedBug(
        name="attention over other tokens as if they were sharded",
        kind="sequence",
        at="context_parallel:_OpenContexts.of_caller",
        old="if _SCOPES.rules[-1].is_local:",
        new="if False:",
        expect="raised: ",
    ),
    InjectedBug(
        name="hooks on the modules that are named, not on their parts",
        kind="call",
        at="context_parallel:adapt_model_to_context",
        old="for part in module.modules()}",
        new="for part in [module]}",
        expect="raised: ",
    ),
    InjectedBug(
        name="the window of a dropped mask dropped with it",
        kind="border",
        at="context_parallel:SequenceAttention.attention",
        old="window=_SCOPES.rules[-1].window,",
        new="window=None,",
        expect="value: ",
    ),
    InjectedBug(
        name="the window of a module less its own position",
        kind="border",
        at="context_parallel:_window",
        old="return own",
        new="return own and own - 1",
        expect="value: ",
    ),
    InjectedBug(
        name="the inputs of a layer sharded in blocks",
        kind="order",
        at="context_parallel:_shard",
        old="return large_tensors.index_select(x, layout.local_index, dim)",
        new="return x.chunk(layout.cp_size, dim)[layout.cp_rank]",
        expect="value: ",
    ),
)
