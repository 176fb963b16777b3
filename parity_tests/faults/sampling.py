"""Faults of sampled log-probabilities: what the lists say, and what a target outside the kept tokens is worth."""

from parity_tests.faults.fault import Fault

FOLDER = "torch_impl/vocab_parallel"
LISTED = f"{FOLDER}/listed.py"
SAMPLING = f"{FOLDER}/sampling.py"

LISTS = (
    Fault(
        name="ties beyond a rank's list not counted",
        kind="statistic",
        file=LISTED,
        old="return torch.where(largest[:, -1] == z, last_count, listed)",
        new="return listed",
        expect="value: ",
    ),
    Fault(
        name="top-k of the own list",
        kind="statistic",
        file=LISTED,
        old="lists = Lists(everyone[:, :k],",
        new="rank = 0 if plan.group is None else plan.group.rank()\n"
        "    lists = Lists(everyone[rank : rank + 1, :k].expand(len(everyone), -1, -1),",
        expect="value: ",
    ),
    Fault(
        name="short lists padded by zeros",
        kind="border",
        file=LISTED,
        old="(0, max(k - width, 0)), value=-math.inf)",
        new="(0, max(k - width, 0)), value=0.0)",
        expect="value: ",
    ),
    Fault(
        name="the k-th largest counted with those above it",
        kind="statistic",
        file=LISTED,
        old="is_above = k_largest > kth",
        new="is_above = k_largest >= kth",
        expect="value: ",
    ),
    Fault(
        name="the largest of a list counted twice",
        kind="statistic",
        file=LISTED,
        old="is_above[:, 0] = False  # the first is no part of the rest",
        new="pass",
        expect="value: ",
    ),
    Fault(
        name="top-p stops before the token that reaches it",
        kind="border",
        file=LISTED,
        old="is_kept = is_above & (upto - weights < room)",
        new="is_kept = is_above & (upto < room)",
        expect="value: ",
    ),
    Fault(
        name="masses of a list without the temperature",
        kind="scale",
        file=LISTED,
        old="torch.where(is_above, weight_of(k_largest, largest, temperature), 0.0)",
        new="torch.where(is_above, weight_of(k_largest, largest, 1.0), 0.0)",
        expect="value: ",
    ),
    Fault(
        name="target counted among the ties before it",
        kind="border",
        file=LISTED,
        old="(columns < column)).sum(-1, keepdim=True)",
        new="(columns <= column)).sum(-1, keepdim=True)",
        expect="value: ",
    ),
    Fault(
        name="lists sent once for the values and once for the rest",
        kind="reduction",
        file=LISTED,
        old="everyone = st.exchanged(told, plan.group)",
        new="everyone = torch.cat([st.exchanged(told[:k], plan.group), st.exchanged(told[k:], plan.group)], dim=1)",
        expect="cost: forward all_gather",
    ),
    Fault(
        name="lists in the logits' own dtype",
        kind="precision",
        file=LISTED,
        old="block.topk(min(k, width)).values.to(dtype)",
        new="block.topk(min(k, width)).values.bfloat16().to(dtype)",
        expect="value: ",
    ),
    Fault(
        name="list of the smallest logits",
        kind="order",
        file=LISTED,
        old="block.topk(min(k, width)).values",
        new="block.topk(min(k, width), largest=False).values",
        expect="value: ",
    ),
)

SCORES = (
    Fault(
        name="filtered target scored like a kept one",
        kind="border",
        file=SAMPLING,
        old="score = score + torch.where(kept.has_target | is_nobodys, 0.0, -math.inf)",
        new="pass",
        expect="value: ",
    ),
    Fault(
        name="nobody's target scored as a filtered one",
        kind="border",
        file=SAMPLING,
        old="torch.where(kept.has_target | is_nobodys, 0.0, -math.inf)",
        new="torch.where(kept.has_target & ~is_nobodys, 0.0, -math.inf)",
        expect="value: ",
    ),
    Fault(
        name="gradient on filtered columns",
        kind="statistic",
        file=SAMPLING,
        old="masked = block.masked_fill(~kept, -math.inf)",
        new="masked = block",
        expect="gradient: ",
    ),
    Fault(
        name="term of a filtered target",
        kind="border",
        file=SAMPLING,
        old="torch.where(kept.has_target & ~is_nobodys, column.squeeze(-1), missed)",
        new="torch.where(is_nobodys, missed, column.squeeze(-1))",
        expect="gradient: ",
    ),
    Fault(
        name="slope of nobody's sampled target",
        kind="border",
        file=SAMPLING,
        old="missed = torch.where(is_nobodys, st.NOBODYS, st.NOT_HERE).to(column.dtype)",
        new="missed = torch.full_like(column.squeeze(-1), st.NOT_HERE)",
        expect="gradient: ",
    ),
    Fault(
        name="sampled gradient without the temperature",
        kind="scale",
        file=SAMPLING,
        old="write(gradient[part], masked, plan.temperature, True,",
        new="write(gradient[part], masked, 1.0, True,",
        expect="gradient: ",
    ),
    Fault(
        name="equal shards assumed where no range is given",
        kind="border",
        file=SAMPLING,
        old="start, end = gathered_range(logits.shape[-1], group, logits.device)",
        new="gathered_range(logits.shape[-1], group, logits.device)\n"
        "    start, end = group.rank() * logits.shape[-1], (group.rank() + 1) * logits.shape[-1]",
        expect="value: ",
    ),
    Fault(
        name="sampled gradient written over the logits",
        kind="buffer",
        file=SAMPLING,
        old="gradient = logits.new_empty(len(column), logits.shape[-1])",
        new="gradient = logits.detach().view(len(column), logits.shape[-1])",
        expect="hygiene: was modified",
    ),
    Fault(
        name="cotangents of the tokens in reverse",
        kind="order",
        file=SAMPLING,
        old="cotangent.reshape(-1, 1))",
        new="cotangent.reshape(-1, 1).flip(0))",
        expect="gradient: ",
    ),
    Fault(
        name="kept sums in bfloat16",
        kind="precision",
        file=SAMPLING,
        old="rows = largest[part], log_total[part], None, None",
        new="rows = largest[part], log_total[part].bfloat16().to(log_total.dtype), None, None",
        expect="gradient: ",
    ),
)

FAULTS = (*LISTS, *SCORES)
