"""Faults of vocab-parallel softmax and log-probability: whose statistic is merged, which column is a target's."""

from parity_tests.faults import vocab_parallel_gradient
from parity_tests.faults.fault import Fault

FOLDER = "torch_impl/vocab_parallel"
JOINT = f"{FOLDER}/joint.py"
LOGPROB = f"{FOLDER}/logprob.py"
ROWS = f"{FOLDER}/rows.py"
SOFTMAX = f"{FOLDER}/softmax.py"
STATISTICS = f"{FOLDER}/statistics.py"

STATISTIC = (
    Fault(
        name="normaliser of the own shard",
        kind="statistic",
        file=JOINT,
        old="whole = st.merged_normaliser(m_r, rest_r, plan.temperature)",
        new="own = slice(plan.group.rank(), plan.group.rank() + 1)\n"
        "    whole = st.merged_normaliser(m_r[own], rest_r[own], plan.temperature)",
        expect="value: the copies of the other ranks are right",
    ),
    Fault(
        name="softmax of the own shard",
        kind="statistic",
        file=SOFTMAX,
        old="exchanged(joint.statistics_of(logits, None, plan), group).unbind(1)",
        new="joint.statistics_of(logits, None, plan).unsqueeze(0).unbind(1)",
        expect="value: ",
    ),
    Fault(
        name="ranks' largest terms left out of the sum",
        kind="statistic",
        file=STATISTICS,
        old="rest = (weight * rest_r).sum(0) + weight.scatter(0, first, 0.0).sum(0)",
        new="rest = (weight * rest_r).sum(0)",
        expect="gradient: ",
    ),
    Fault(
        name="largest term counted twice",
        kind="statistic",
        file=STATISTICS,
        old="weight.scatter(0, first, 0.0).sum(0)",
        new="weight.sum(0)",
        expect="value: ",
    ),
    Fault(
        name="ranks' sums not brought to one maximum",
        kind="statistic",
        file=STATISTICS,
        old="weight = below(m_r, largest, temperature).exp()",
        new="weight = torch.ones_like(m_r)",
        expect="value: ",
    ),
    Fault(
        name="local sum counts its largest term",
        kind="statistic",
        file=STATISTICS,
        old="rest = terms.scatter_(-1, at_largest, 0.0).sum(-1)",
        new="rest = terms.sum(-1)",
        expect="value: ",
    ),
    Fault(
        name="depth below the own maximum",
        kind="statistic",
        file=STATISTICS,
        old="weight * (d_r + above)).sum(0)",
        new="weight * d_r).sum(0)",
        expect="value: ",
    ),
    Fault(
        name="depths averaged without their weights",
        kind="statistic",
        file=STATISTICS,
        old="weight * (d_r + above)).sum(0)",
        new="weight.sum(0) * (d_r + above)).mean(0)",
        expect="value: ",
    ),
    Fault(
        name="entropy without its normaliser",
        kind="statistic",
        file=JOINT,
        old="outputs.append(depth - whole.log_total)",
        new="outputs.append(depth.clone())",
        expect="value: ",
    ),
    Fault(
        name="target's logit from the largest answer",
        kind="reduction",
        file=STATISTICS,
        old="return z_t.amin(0)",
        new="return z_t.amax(0)",
        expect="value: ",
    ),
    Fault(
        name="target's logit added up over the ranks",
        kind="reduction",
        file=STATISTICS,
        old="return z_t.amin(0)",
        new="return torch.where(z_t < math.inf, z_t, 0.0).sum(0)",
        expect="value: owned by nobody",
    ),
    Fault(
        name="statistics exchanged chunk by chunk",
        kind="reduction",
        file=JOINT,
        old="st.exchanged(statistics_of(logits, column, plan), plan.group)",
        new="torch.cat([st.exchanged(x, plan.group) for x in statistics_of(logits, column, plan).split(2, 1)], 2)",
        expect="cost: forward all_gather",
    ),
    Fault(
        name="gradient summed over the ranks",
        kind="reduction",
        file=LOGPROB,
        old="return joint.backward(ctx, *cotangents), None, None\n",
        new="gradient = joint.backward(ctx, *cotangents)\n"
        "        torch.distributed.all_reduce(gradient, group=ctx.plan.group)\n        return gradient, None, None\n",
        expect="cost: backward all_reduce",
    ),
)

BORDER = (
    Fault(
        name="first id of a shard given away",
        kind="border",
        file=STATISTICS,
        old="owned = (target >= start) & (target < end)",
        new="owned = (target > start) & (target < end)",
        expect="value: ",
    ),
    Fault(
        name="first id of the next shard taken",
        kind="border",
        file=STATISTICS,
        old="owned = (target >= start) & (target < end)",
        new="owned = (target >= start) & (target <= end)",
        expect="raised: is out of bounds",
    ),
    Fault(
        name="column one too low",
        kind="border",
        file=STATISTICS,
        old="torch.where(owned, target - start, NOT_HERE)",
        new="torch.where(owned, (target - start - 1).clamp_min(0), NOT_HERE)",
        expect="gradient: an offset is wrong by 1",
    ),
    Fault(
        name="column counted from the start of the vocabulary",
        kind="border",
        file=STATISTICS,
        old="torch.where(owned, target - start, NOT_HERE)",
        new="torch.where(owned, target % (end - start + 1), NOT_HERE)",
        expect="raised: is out of bounds",
    ),
    Fault(
        name="empty shard counts as one column of zero",
        kind="border",
        file=STATISTICS,
        old="neutral = [-math.inf, 0.0]",
        new="neutral = [0.0, 0.0]",
        expect="value: ",
    ),
    Fault(
        name="nobody's target taken for another rank's",
        kind="border",
        file=JOINT,
        old="column = torch.where(z_t == math.inf, st.NOBODYS, column)",
        new="pass",
        expect="gradient: owned by nobody",
    ),
    Fault(
        name="gradient of nobody's target",
        kind="border",
        file=JOINT,
        old="nobodys = (asked.column == st.NOBODYS).all(-1, keepdim=True)",
        new="nobodys = (asked.column < st.NOBODYS).all(-1, keepdim=True)",
        expect="gradient: owned by nobody",
        equivalent="its cotangents are zero already; a row of NaN tells, which is drawn by no scheme but has a test",
    ),
    Fault(
        name="nobody's target scored by its lookup",
        kind="border",
        file=STATISTICS,
        old="nobodys = torch.where(whole.largest < math.inf, 0.0, math.nan)",
        new="nobodys = -whole.log_total",
        expect="value: owned by nobody",
    ),
    Fault(
        name="everybody puts the target's term",
        kind="border",
        file=JOINT,
        old="kept = torch.where(asked.column >= 0, term, gradient.gather(-1, here))",
        new="kept = term",
        expect="gradient: ",
    ),
    Fault(
        name="masked column has a term of its own",
        kind="border",
        file=STATISTICS,
        old="terms = depths.exp() if with_entropy else depths.exp_()",
        new="terms = depths.clamp_min(-1.0).exp()",
        expect="value: ",
    ),
    Fault(
        name="zero times minus infinity",
        kind="border",
        file=STATISTICS,
        old="return depths.clamp_min_(torch.finfo(depths.dtype).min)",
        new="return depths",
        expect="value: not finite",
    ),
    Fault(
        name="masked shard shifted by minus infinity",
        kind="border",
        file=STATISTICS,
        old="shift = torch.where(largest.isfinite(), largest, 0.0)",
        new="shift = largest",
        expect="value: not finite",
    ),
    Fault(
        name="blocks one row too long",
        kind="border",
        file=ROWS,
        old="done += len(view)",
        new="done += max(len(view) - 1, 1)",
        expect="value: ",
    ),
)

FAULTS = (*STATISTIC, *BORDER, *vocab_parallel_gradient.FAULTS)
