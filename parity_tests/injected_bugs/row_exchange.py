"""Faults of the exchange of rows for columns."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

ROWS = (
    InjectedBug(
        name="rows cut by columns",
        kind="order",
        at="vocab_parallel:all_to_all_vp2sq",
        old="return all_to_all(vocab_parallel_logits, group, split_dim=0, concat_dim=1)",
        new="parts = vocab_parallel_logits.view(-1, tp, vocab_parallel_logits.shape[1]).transpose(0, 1)\n"
        "    return all_to_all(parts.reshape(vocab_parallel_logits.shape), group, split_dim=0, concat_dim=1)",
        expect="value: ",
    ),
    InjectedBug(
        name="rows exchanged without a gradient",
        kind="reduction",
        at="vocab_parallel:all_to_all_vp2sq",
        old="return all_to_all(vocab_parallel_logits, group, split_dim=0, concat_dim=1)",
        new="return all_to_all(vocab_parallel_logits.detach(), group, split_dim=0, concat_dim=1)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="columns exchanged without a gradient",
        kind="reduction",
        at="vocab_parallel:all_to_all_sq2vp",
        old="return all_to_all(seq_parallel_logits, group, split_dim=1, concat_dim=0)",
        new="return all_to_all(seq_parallel_logits.detach(), group, split_dim=1, concat_dim=0)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="columns averaged over the ranks",
        kind="scale",
        at="vocab_parallel:all_to_all_sq2vp",
        old="return all_to_all(seq_parallel_logits, group, split_dim=1, concat_dim=0)",
        new="return all_to_all(seq_parallel_logits / tp, group, split_dim=1, concat_dim=0)",
        expect="value: off by the constant factor",
    ),
    InjectedBug(
        name="columns handed to the next rank",
        kind="order",
        at="vocab_parallel:all_to_all_sq2vp",
        old="return all_to_all(seq_parallel_logits, group, split_dim=1, concat_dim=0)",
        new="return all_to_all(seq_parallel_logits.roll(columns // tp, 1), group, split_dim=1, concat_dim=0)",
        expect="value: same values in another order",
    ),
    InjectedBug(
        name="exchanged rows rounded to bfloat16",
        kind="precision",
        at="vocab_parallel:all_to_all_vp2sq",
        old="return all_to_all(vocab_parallel_logits, group, split_dim=0, concat_dim=1)",
        new="x = vocab_parallel_logits\n"
        "    return all_to_all(x.bfloat16().to(x.dtype), group, split_dim=0, concat_dim=1)",
        expect="value: ",
    ),
)

BUGS = (*ROWS,)
