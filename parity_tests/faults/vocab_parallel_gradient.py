"""Faults of the gradient of vocab-parallel log-probability and entropy, of its buffers, and of the dtypes."""

from parity_tests.faults.fault import Fault

FOLDER = "torch_impl/vocab_parallel"
JOINT = f"{FOLDER}/joint.py"
STATISTICS = f"{FOLDER}/statistics.py"

GRADIENT = (
    Fault(
        name="gradient of the entropy left out",
        kind="reduction",
        file=JOINT,
        old="gradient.addcmul_(without_rows(slope, g == 0), g)",
        new="pass",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="slope around the entropy, not the depth",
        kind="statistic",
        file=JOINT,
        old="depth.unsqueeze(-1))",
        new="(depth - log_total).unsqueeze(-1))",
        expect="gradient: ",
    ),
    Fault(
        name="gradient not divided by the temperature",
        kind="scale",
        file=JOINT,
        old="out.copy_(gradient if temperature == 1.0 else gradient.div_(temperature))",
        new="out.copy_(gradient)",
        expect="gradient: off by the constant factor",
    ),
    Fault(
        name="temperature multiplied",
        kind="scale",
        file=STATISTICS,
        old="difference.div_(temperature)",
        new="difference.mul_(temperature)",
        expect="value: ",
    ),
    Fault(
        name="gradient averaged over the tokens",
        kind="scale",
        file=JOINT,
        old="p.mul_(-asked.total.unsqueeze(-1))",
        new="p.mul_(-asked.total.unsqueeze(-1) / len(p))",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="opposite sign of the softmax term",
        kind="scale",
        file=JOINT,
        old="p.mul_(-asked.total.unsqueeze(-1))",
        new="p.mul_(asked.total.unsqueeze(-1))",
        expect="gradient: forward equal, gradient not",
    ),
    Fault(
        name="cotangents of the two outputs exchanged",
        kind="order",
        file=JOINT,
        old="g_logprob = None if column is None else cotangents[0]",
        new="g_logprob = None if column is None else cotangents[-1]",
        expect="gradient: ",
    ),
    Fault(
        name="cotangent read in column order",
        kind="order",
        file=JOINT,
        old="g_logprob = None if column is None else cotangents[0]",
        new="g_logprob = None if column is None or cotangents[0] is None else cotangents[0].mT",
        expect="gradient: ",
    ),
    Fault(
        name="statistics of a block written to its neighbour's rows",
        kind="order",
        file=JOINT,
        old="    return statistics\n",
        new="    return statistics.roll(block_rows(logits, plan.chunk_size), 1)\n",
        expect="value: ",
    ),
    Fault(
        name="gradient written over the logits unasked",
        kind="buffer",
        file=JOINT,
        old="gradient = None if plan.inplace_gradient else",
        new="gradient = None if not plan.inplace_gradient else",
        expect="hygiene: was modified",
    ),
    Fault(
        name="logits shifted in place",
        kind="buffer",
        file=STATISTICS,
        old="difference = wide - largest if wide.dtype == z.dtype else wide.sub_(largest)",
        new="difference = wide.sub_(largest)",
        expect="hygiene: was modified",
    ),
    Fault(
        name="target's logit read after the shift",
        kind="buffer",
        file=STATISTICS,
        old="looked_up = block.gather(",
        new="looked_up = depths.gather(",
        expect="value: ",
    ),
)

PRECISION = (
    Fault(
        name="no shift before exp",
        kind="precision",
        file=STATISTICS,
        old="largest = wide.gather(-1, at_largest)\n",
        new="largest = torch.zeros_like(at_largest, dtype=accumulator(block.dtype))\n",
        expect="value: ",
    ),
    Fault(
        name="row statistics in the logits' own dtype",
        kind="precision",
        file=STATISTICS,
        old="depths = below(wide, shift, temperature)",
        new="depths = (block - shift.to(block.dtype)) / temperature",
        expect="value: within what bfloat16 accumulation may do",
    ),
    Fault(
        name="float64 narrowed to float32",
        kind="precision",
        file=STATISTICS,
        old="difference = wide - largest if wide.dtype == z.dtype else wide.sub_(largest)",
        new="difference = (z.float() - largest.float()).to(largest.dtype)",
        expect="value: float32 accumulation",
    ),
    Fault(
        name="normaliser in one number",
        kind="precision",
        file=STATISTICS,
        old="below(z_t, whole.largest, temperature) - whole.log_total, whole)",
        new="z_t / temperature - (whole.largest / temperature + whole.log_total), whole)",
        expect="value: ",
    ),
    Fault(
        name="one minus the probability of a certain target",
        kind="precision",
        file=JOINT,
        old="term = -torch.expm1(log_p_here) * asked.own",
        new="term = (1 - log_p_here.exp()) * asked.own",
        expect="gradient: ",
    ),
    Fault(
        name="gradient rounded to bfloat16",
        kind="precision",
        file=JOINT,
        old="p = log_p.exp_()\n",
        new="p = log_p.exp().bfloat16().to(log_p.dtype)\n",
        expect="gradient: ",
    ),
    Fault(
        name="logarithm with an epsilon inside",
        kind="precision",
        file=STATISTICS,
        old="rest = (weight * rest_r).sum(0) +",
        new="rest = 1e-5 + (weight * rest_r).sum(0) +",
        expect="value: ",
    ),
)

FAULTS = (*GRADIENT, *PRECISION)
