"""Injected bugs of the layout of a batch: its tokens in the caller's coordinates, sharded and gathered."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    InjectedBug(
        name="a batch laid end to end by its columns",
        kind="order",
        at="context_parallel:BatchLayout.shard",
        old="stream = x.flatten(dim, dim + len(self.shape) - 1)",
        new="stream = x.transpose(dim, dim + 1).flatten(dim, dim + 1)",
        expect="value: ",
    ),
    InjectedBug(
        name="a batch padded before its first column",
        kind="border",
        at="context_parallel:BatchLayout.shard",
        old="0, more], value=fill)",
        new="more, 0], value=fill)",
        expect="value: ",
    ),
    InjectedBug(
        name="chunks gathered token by token",
        kind="order",
        at="context_parallel:BatchLayout.gather",
        old="stream = x.flatten(dim, dim + len(self.local_shape) - 1)",
        new="stream = (x.transpose(dim, dim + 1) if self.chunks > 1 else x).flatten(\n"
        "            dim, dim + len(self.local_shape) - 1\n"
        "        )",
        expect="value: ",
    ),
    InjectedBug(
        name="the last columns for the first ones of a gathered batch",
        kind="border",
        at="context_parallel:BatchLayout.gather",
        old=".narrow(dim + 1, 0, self.shape[1])",
        new=".narrow(dim + 1, self.tokens.total - self.shape[1], self.shape[1])",
        expect="value: ",
    ),
    InjectedBug(
        name="cotangents of a gathered batch taken as equal",
        kind="reduction",
        at="context_parallel:BatchLayout._unshard",
        old="gradient=gradient)",
        new='gradient="I")',
        expect="cost: ",
    ),
    InjectedBug(
        name="a batch's layout for another rank of its group",
        kind="group",
        at="context_parallel:Stream.batch_layout",
        old="self.layout(cp_size, cp_rank), shape",
        new="self.layout(cp_size, (cp_rank + 1) % cp_size), shape",
        expect="raised: ",
    ),
)
