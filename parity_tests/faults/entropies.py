"""Faults of negative entropy and of soft cross entropy: whose weight, whose depth, where p or q is 0."""

from parity_tests.faults.fault import Fault

FOLDER = "torch_impl/vocab_parallel"
CROSS = f"{FOLDER}/cross_entropy.py"
ENTROPY = f"{FOLDER}/entropy.py"
JOINT = f"{FOLDER}/joint.py"
ROWS = f"{FOLDER}/rows.py"
STATISTICS = f"{FOLDER}/statistics.py"

OF_ENTROPY = (
    Fault(
        name="entropy with its usual sign",
        kind="scale",
        file=ENTROPY,
        old="return joint.forward(ctx, vocab_parallel_logits, None, plan)[0]",
        new="return -joint.forward(ctx, vocab_parallel_logits, None, plan)[0]",
        expect="value: opposite sign",
    ),
    Fault(
        name="gradient of the entropy with the opposite sign",
        kind="scale",
        file=ENTROPY,
        old="return joint.backward(ctx, *grad_outputs), None",
        new="return -joint.backward(ctx, *grad_outputs), None",
        expect="gradient: opposite sign",
    ),
    Fault(
        name="entropy per rank",
        kind="group",
        file=JOINT,
        old="depth = st.merged_depth(m_r, rest_r, further[-1], whole, plan.temperature)",
        new="r = 0 if plan.group is None else plan.group.rank()\n"
        "        depth = st.merged_depth(m_r[r:][:1], rest_r[r:][:1], further[-1][r:][:1], whole, plan.temperature)",
        expect="value: ",
    ),
    Fault(
        name="weights of the ranks without the sums of their shards",
        kind="statistic",
        file=STATISTICS,
        old="weight = (above + (rest_r.log1p() - whole.log_total)).exp()",
        new="weight = (above - whole.log_total).exp()",
        expect="value: ",
    ),
    Fault(
        name="local depth not divided by its sum",
        kind="statistic",
        file=STATISTICS,
        old="terms.mul_(without_minus_infinity(depths)).sum(-1) / (1.0 + rest)",
        new="(terms * without_minus_infinity(depths)).sum(-1)",
        expect="value: ",
    ),
    Fault(
        name="local depth divided by all terms but the largest",
        kind="statistic",
        file=STATISTICS,
        old="terms.mul_(without_minus_infinity(depths)).sum(-1) / (1.0 + rest)",
        new="(terms * without_minus_infinity(depths)).sum(-1) / rest.clamp_min(1.0)",
        expect="value: ",
    ),
    Fault(
        name="entropy of masked columns counts",
        kind="border",
        file=JOINT,
        old="slope = st.without_minus_infinity(depths).sub_(depth.unsqueeze(-1)).mul_(p)",
        new="slope = depths.sub_(depth.unsqueeze(-1)).mul_(p)",
        expect="gradient: not finite",
    ),
    Fault(
        name="entropy's cotangent averaged over the ranks",
        kind="reduction",
        file=ENTROPY,
        old="return joint.backward(ctx, *grad_outputs), None",
        new="g = grad_outputs[0] / ctx.plan.group.size()\n        return joint.backward(ctx, g), None",
        expect="gradient: ",
    ),
)
OF_CROSS_ENTROPY = (
    Fault(
        name="student and target exchanged",
        kind="order",
        file=CROSS,
        old="x_r = st.local_cross_depth(q_block, p_block, q[0], p[0], p[1])",
        new="x_r = st.local_cross_depth(p_block, q_block, p[0], q[0], q[1])",
        expect="value: ",
    ),
    Fault(
        name="cross entropy of a rank's own columns",
        kind="statistic",
        file=CROSS,
        old="q, p = st.merged_normaliser(m_q, rest_q, 1.0), st.merged_normaliser(m_p, rest_p, 1.0)",
        new="r = group.rank()\n"
        "        q, p = st.merged_normaliser(m_q[r:][:1], rest_q[r:][:1], 1.0), st.merged_normaliser(m_p, rest_p, 1.0)",
        expect="value: ",
    ),
    Fault(
        name="cross entropy without the student's normaliser",
        kind="statistic",
        file=CROSS,
        old="return q.log_total - st.merged_cross_depth(",
        new="return p.log_total - st.merged_cross_depth(",
        expect="value: ",
    ),
    Fault(
        name="student's shards not brought to one maximum",
        kind="statistic",
        file=STATISTICS,
        old="depth = x_r + (m_q - q.largest)",
        new="depth = x_r + torch.where(m_q == -math.inf, m_q, 0.0)",
        expect="value: ",
    ),
    Fault(
        name="target's shards weighted alike",
        kind="statistic",
        file=STATISTICS,
        old="weight = ((m_p - p.largest) + (rest_p.log1p() - p.log_total)).exp()",
        new="weight = torch.full_like(m_p, 1 / len(m_p))",
        expect="value: ",
    ),
    Fault(
        name="infinite surprise of an improbable column forgotten",
        kind="border",
        file=STATISTICS,
        old="of_no_weight = torch.where((depth == -math.inf) & (m_p > -math.inf), -math.inf, 0.0)",
        new="of_no_weight = torch.zeros_like(depth)",
        expect="value: ",
    ),
    Fault(
        name="a column masked in both surprises",
        kind="border",
        file=STATISTICS,
        old="is_impossible = (masked & (p_block > -math.inf)).any(-1)",
        new="is_impossible = masked.any(-1)",
        expect="value: ",
    ),
    Fault(
        name="zero times minus infinity in the cross depth",
        kind="border",
        file=STATISTICS,
        old="found = terms.mul_(depths.masked_fill_(masked, 0.0)).sum(-1)",
        new="found = (terms * depths).sum(-1)",
        expect="value: ",
    ),
    Fault(
        name="gradient of the cross entropy towards the target",
        kind="scale",
        file=CROSS,
        old="gap = log_q - log_p",
        new="gap = log_p - log_q",
        expect="gradient: opposite sign",
    ),
    Fault(
        name="student's probability alone",
        kind="reduction",
        file=CROSS,
        old="gradient[part] = _difference(log_q, log_p).mul_(g)",
        new="gradient[part] = log_q.exp() * g",
        expect="gradient: ",
    ),
    Fault(
        name="difference of two certain probabilities",
        kind="precision",
        file=CROSS,
        old="gradient[part] = _difference(log_q, log_p).mul_(g)",
        new="gradient[part] = (log_q.exp() - log_p.exp()) * g",
        expect="gradient: ",
    ),
    Fault(
        name="sums of the cross entropy in float32 alone",
        kind="precision",
        file=CROSS,
        old="dtype = torch.promote_types(accumulator(student.dtype), accumulator(target.dtype))",
        new="dtype = torch.float32",
        expect="value: ",
    ),
    Fault(
        name="target's rows of another block",
        kind="order",
        file=ROWS,
        old="yield slice(done, done + len(view)), views",
        new="yield slice(done, done + len(view)), (view, *(x.flip(0) for x in views[1:]))",
        expect="value: ",
    ),
    Fault(
        name="cross entropy's cotangent in place",
        kind="buffer",
        file=CROSS,
        old="per_row = [x.reshape(-1, 1) for x in (*per_row, *grad_outputs)]",
        new="per_row = [x.reshape(-1, 1) for x in (*per_row, grad_outputs[0].neg_().neg_().add_(1).sub_(1))]",
        expect="hygiene: was modified",
    ),
    Fault(
        name="statistics of student and target in two messages",
        kind="reduction",
        file=CROSS,
        old="parts = st.exchanged(_local_statistics(student_logits, target_logits), group)",
        new="both = _local_statistics(student_logits, target_logits)\n"
        "        parts = torch.cat([st.exchanged(x, group) for x in both.split(3)], 1)",
        expect="cost: forward all_gather",
    ),
    Fault(
        name="cross entropy over the global group",
        kind="group",
        file=CROSS,
        old="parts = st.exchanged(_local_statistics(student_logits, target_logits), group)",
        new="group = torch.distributed.group.WORLD\n"
        "        parts = st.exchanged(_local_statistics(student_logits, target_logits), group)",
        expect="value: ",
    ),
)
FAULTS = (*OF_ENTROPY, *OF_CROSS_ENTROPY)
