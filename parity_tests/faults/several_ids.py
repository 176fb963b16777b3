"""Faults of log-probabilities at several ids: which slot, whose column, sums of cotangents by id."""

from parity_tests.faults.fault import Fault

FOLDER = "torch_impl/vocab_parallel"
ASKED = f"{FOLDER}/asked.py"
GATHER = f"{FOLDER}/gather_logprob.py"
JOINT = f"{FOLDER}/joint.py"
STATISTICS = f"{FOLDER}/statistics.py"

FAULTS = (
    Fault(
        name="an id of nobody asks all the same",
        kind="border",
        file=ASKED,
        old="g = torch.where(column == NOBODYS, 0.0, g)",
        new="g = g.clone()",
        expect="gradient: ",
    ),
    Fault(
        name="an id of another rank asks nothing",
        kind="border",
        file=ASKED,
        old="g = torch.where(column == NOBODYS, 0.0, g)",
        new="g = torch.where(column < 0, 0.0, g)",
        expect="gradient: ",
    ),
    Fault(
        name="duplicates ask once",
        kind="reduction",
        file=ASKED,
        old="own = torch.zeros_like(g).scatter_add_(-1, first, g).gather(-1, first)",
        new="own = torch.zeros_like(g).scatter_(-1, first, g).gather(-1, first)",
        expect="gradient: ",
    ),
    Fault(
        name="other ids are those before alone",
        kind="reduction",
        file=ASKED,
        old="(before + after).gather(-1, source)",
        new="before.gather(-1, source)",
        expect="gradient: ",
    ),
    Fault(
        name="the own id among the others",
        kind="statistic",
        file=ASKED,
        old="past = torch.searchsorted(in_order, column, right=True)",
        new="past = torch.searchsorted(in_order, column)",
        expect="gradient: ",
    ),
    Fault(
        name="cotangents not brought to the order of the ids",
        kind="order",
        file=ASKED,
        old="sorted_g = g.gather(-1, order)",
        new="sorted_g = g.clone()",
        expect="gradient: ",
    ),
    Fault(
        name="another rank's slots undo this one's",
        kind="border",
        file=ASKED,
        old="source = torch.where(column >= 0, slot, order[:, -1:])",
        new="source = slot.expand_as(column)",
        expect="gradient: ",
    ),
    Fault(
        name="total of the owned slots alone",
        kind="statistic",
        file=ASKED,
        old="(before + after).gather(-1, source), g.sum(-1))",
        new="(before + after).gather(-1, source), torch.where(column >= 0, g, 0.0).sum(-1))",
        expect="gradient: ",
    ),
    Fault(
        name="the sum over slots is a mean",
        kind="scale",
        file=ASKED,
        old="(before + after).gather(-1, source), g.sum(-1))",
        new="(before + after).gather(-1, source), g.mean(-1))",
        expect="gradient: ",
    ),
    Fault(
        name="other ids' sum as a difference",
        kind="precision",
        file=ASKED,
        old="(before + after).gather(-1, source)",
        new="(g.bfloat16().to(g.dtype).sum(-1, keepdim=True) - own).gather(-1, source)",
        expect="gradient: ",
    ),
    Fault(
        name="other ids have no part at an id",
        kind="reduction",
        file=JOINT,
        old="term = term - log_p_here.exp() * asked.others",
        new="term = term * 1.0",
        expect="gradient: ",
    ),
    Fault(
        name="nobody's slots undo this rank's",
        kind="border",
        file=ASKED,
        old="column.gather(-1, source), own.gather",
        new="torch.where(column == NOBODYS, column, column.gather(-1, source)), own.gather",
        expect="gradient: ",
    ),
    Fault(
        name="ids read slot by slot, not token by token",
        kind="order",
        file=JOINT,
        old="z_t = st.merged_target(parts[:, 2 : 2 + column.shape[-1]]).mT",
        new="z_t = st.merged_target(parts[:, 2 : 2 + column.shape[-1]]).view(column.shape)",
        expect="value: ",
    ),
    Fault(
        name="one slot too far in the message",
        kind="border",
        file=JOINT,
        old="parts[:, 2 : 2 + column.shape[-1]]",
        new="parts[:, 1 : 1 + column.shape[-1]]",
        expect="value: ",
    ),
    Fault(
        name="columns of an empty shard in the softmax",
        kind="border",
        file=STATISTICS,
        old="[math.inf] * (0 if column is None else column.shape[-1])",
        new="[0.0] * (0 if column is None else column.shape[-1])",
        expect="value: ",
    ),
    Fault(
        name="slots exchanged one by one",
        kind="reduction",
        file=JOINT,
        old="parts = st.exchanged(statistics_of(logits, column, plan), plan.group)",
        new="local = statistics_of(logits, column, plan)\n"
        "    parts = torch.cat([st.exchanged(x, plan.group) for x in local.split(3 if plan.several else 99)], 1)",
        expect="cost: forward all_gather",
    ),
    Fault(
        name="cotangent of several ids in a transposed order",
        kind="order",
        file=GATHER,
        old="return joint.backward(ctx, *grad_outputs), None",
        new="return joint.backward(ctx, grad_outputs[0].flip(-1)), None",
        expect="gradient: ",
    ),
    Fault(
        name="gradient at several ids summed over the ranks",
        kind="reduction",
        file=GATHER,
        old="return joint.backward(ctx, *grad_outputs), None",
        new="g = grad_outputs[0].clone()\n"
        "        torch.distributed.all_reduce(g, group=ctx.plan.group)\n"
        "        return joint.backward(ctx, g), None",
        expect="cost: backward all_reduce",
    ),
    Fault(
        name="cotangent at several ids scaled in place",
        kind="buffer",
        file=GATHER,
        old="return joint.backward(ctx, *grad_outputs), None",
        new="grad_outputs[0].mul_(1.5)\n        return joint.backward(ctx, grad_outputs[0] / 1.5), None",
        expect="hygiene: was modified",
    ),
    Fault(
        name="ids taken within the shard",
        kind="border",
        file=GATHER,
        old="            vocab_start_index,\n            vocab_end_index,\n            chunk_size=chunk_size,",
        new="            0,\n            vocab_end_index - vocab_start_index,\n            chunk_size=chunk_size,",
        expect="value: ",
    ),
)
