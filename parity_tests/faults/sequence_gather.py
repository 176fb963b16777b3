"""Faults of a sequence cut over cp and gathered: which pieces, in what order, whose cotangents."""

from parity_tests.faults.fault import Fault

GATHER = "torch_impl/vocab_parallel/sequence_gather.py"

ORDER = (
    Fault(
        name="gathered sequence left in rank order",
        kind="order",
        file=GATHER,
        old="return rows_at(rank_major, inverted(torch.cat(held(local * cp, cp, tensor.device))), ctx.dim)",
        new="return rank_major",
        expect="value: same values in another order",
    ),
    Fault(
        name="gathered sequence put in order the wrong way",
        kind="order",
        file=GATHER,
        old="inverted(torch.cat(held(local * cp, cp, tensor.device)))",
        new="torch.cat(held(local * cp, cp, tensor.device))",
        expect="value: same values in another order",
    ),
    Fault(
        name="cotangent of a gathered sequence left in order",
        kind="order",
        file=GATHER,
        old="rank_major = rows_at(grad_output, torch.cat(held(size, cp, grad_output.device)), ctx.dim)",
        new="rank_major = grad_output",
        expect="gradient: ",
    ),
    Fault(
        name="cotangent of a gathered sequence not summed over cp",
        kind="reduction",
        file=GATHER,
        old="return scattered_sum(rank_major, ctx.group, ctx.dim, [size // cp] * cp), None, None",
        new="own = rank_major.split(size // cp, ctx.dim)[ctx.group.rank()]\n"
        "        return own.contiguous(), None, None",
        expect="gradient: ",
    ),
    Fault(
        name="cotangent of a gathered sequence averaged over cp",
        kind="scale",
        file=GATHER,
        old="return scattered_sum(rank_major, ctx.group, ctx.dim, [size // cp] * cp), None, None",
        new="return scattered_sum(rank_major, ctx.group, ctx.dim, [size // cp] * cp) / cp, None, None",
        expect="gradient: off by the constant factor",
    ),
    Fault(
        name="cotangent of a gathered sequence summed in place",
        kind="buffer",
        file=GATHER,
        old="size, cp = grad_output.shape[ctx.dim], ctx.group.size()",
        new="size, cp = grad_output.shape[ctx.dim], ctx.group.size()\n"
        "        torch.distributed.all_reduce(grad_output, group=ctx.group)\n"
        "        grad_output.div_(cp)",
        expect="hygiene: ",
    ),
    Fault(
        name="gather along the dim before",
        kind="order",
        file=GATHER,
        old="rank_major = gathered(tensor, cp_group, ctx.dim, [local] * cp)",
        new="rank_major = gathered(tensor, cp_group, ctx.dim - 1, [len(tensor)] * cp)",
        expect="raised: ",
    ),
    Fault(
        name="piece of the next rank",
        kind="order",
        file=GATHER,
        old="held(input_ids.shape[dim], cp_size, input_ids.device)[cp_rank]",
        new="held(input_ids.shape[dim], cp_size, input_ids.device)[(cp_rank + 1) % cp_size]",
        expect="value: same values in another order",
    ),
    Fault(
        name="a contiguous block for the two pieces",
        kind="order",
        file=GATHER,
        old="return dual_chunk_swap(size, cp, device=device) if cp > 1",
        new="return contiguous(size, cp, device=device) if cp > 1",
        expect="value: same values in another order",
    ),
    Fault(
        name="a piece cut off from the graph",
        kind="reduction",
        file=GATHER,
        old="return rows_at(input_ids,",
        new="return rows_at(input_ids.detach(),",
        expect="gradient: ",
    ),
)

FAULTS = (*ORDER,)
