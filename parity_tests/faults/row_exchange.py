"""Faults of the exchange of rows for columns."""

from parity_tests.faults.fault import Fault

FOLDER = "torch_impl/vocab_parallel"
ROW_EXCHANGE = f"{FOLDER}/row_exchange.py"

ROWS = (
    Fault(
        name="rows cut by columns",
        kind="order",
        file=ROW_EXCHANGE,
        old="return all_to_all(vocab_parallel_logits, group, split_dim=0, concat_dim=1)",
        new="parts = vocab_parallel_logits.view(-1, tp, vocab_parallel_logits.shape[1]).transpose(0, 1)\n"
        "    return all_to_all(parts.reshape(vocab_parallel_logits.shape), group, split_dim=0, concat_dim=1)",
        expect="value: ",
    ),
    Fault(
        name="rows exchanged without a gradient",
        kind="reduction",
        file=ROW_EXCHANGE,
        old="return all_to_all(vocab_parallel_logits, group, split_dim=0, concat_dim=1)",
        new="return all_to_all(vocab_parallel_logits.detach(), group, split_dim=0, concat_dim=1)",
        expect="gradient: ",
    ),
    Fault(
        name="columns exchanged without a gradient",
        kind="reduction",
        file=ROW_EXCHANGE,
        old="return all_to_all(seq_parallel_logits, group, split_dim=1, concat_dim=0)",
        new="return all_to_all(seq_parallel_logits.detach(), group, split_dim=1, concat_dim=0)",
        expect="gradient: ",
    ),
    Fault(
        name="columns averaged over the ranks",
        kind="scale",
        file=ROW_EXCHANGE,
        old="return all_to_all(seq_parallel_logits, group, split_dim=1, concat_dim=0)",
        new="return all_to_all(seq_parallel_logits / tp, group, split_dim=1, concat_dim=0)",
        expect="value: off by the constant factor",
    ),
    Fault(
        name="columns handed to the next rank",
        kind="order",
        file=ROW_EXCHANGE,
        old="return all_to_all(seq_parallel_logits, group, split_dim=1, concat_dim=0)",
        new="return all_to_all(seq_parallel_logits.roll(columns // tp, 1), group, split_dim=1, concat_dim=0)",
        expect="value: same values in another order",
    ),
    Fault(
        name="exchanged rows rounded to bfloat16",
        kind="precision",
        file=ROW_EXCHANGE,
        old="return all_to_all(vocab_parallel_logits, group, split_dim=0, concat_dim=1)",
        new="x = vocab_parallel_logits\n"
        "    return all_to_all(x.bfloat16().to(x.dtype), group, split_dim=0, concat_dim=1)",
        expect="value: ",
    ),
)

FAULTS = (*ROWS,)
