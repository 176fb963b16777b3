"""Injected bugs of attention over sequences that share a prefix."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    InjectedBug(
        name="the prefix alone, not what it continues itself",
        kind="sequence",
        at="layouts:prefix_levels",
        old="while any(parent >= 0 for parent in level):",
        new="while not levels and any(parent >= 0 for parent in level):",
        expect="value: ",
    ),
    InjectedBug(
        name="padding of a prefix counted as its length",
        kind="border",
        at="layouts:TokenLayout.lengths_before",
        old="self.cu_real.diff().long()",
        new="self.cu_padded.diff().long()",
        expect="value: ",
    ),
    InjectedBug(
        name="the window of a continuation from its own start",
        kind="border",
        at="context_parallel:_split_by_window",
        old="torch.zeros_like(run) if visible.shift is None else visible.shift[run]",
        new="torch.zeros_like(run)",
        expect="value: ",
    ),
    InjectedBug(
        name="masks of a prefix by places in the stream",
        kind="border",
        at="context_parallel:_key_mask",
        old="distance if shift is None else distance + shift[:, None, None]",
        new="distance",
        expect="value: ",
    ),
    InjectedBug(
        name="siblings seen for a prefix",
        kind="sequence",
        at="context_parallel:_visible_prefix_runs",
        old="keys = runs.start[source][prefix], runs.real[source][prefix]",
        new="keys = runs.start[source][continued - 1], runs.real[source][continued - 1]",
        expect="value: ",
    ),
    InjectedBug(
        name="a prefix sent to no continuation on other ranks",
        kind="group",
        at="context_parallel:_seen_by",
        old="if layout.prefix_of:",
        new="if False:",
        expect="value: ",
    ),
    InjectedBug(
        name="a prefix sent to its last continuation alone",
        kind="reduction",
        at="context_parallel:_seen_by_continuations",
        old='first[continued], "amin")',
        new='first[continued], "amax", include_self=False)',
        expect="value: ",
    ),
    InjectedBug(
        name="a layout that forgets its prefixes over another group",
        kind="sequence",
        at="layouts:TokenLayout.rebind",
        old="return replace(layout, prefix_of=self.prefix_of)",
        new="return layout",
        expect="value: ",
    ),
)
