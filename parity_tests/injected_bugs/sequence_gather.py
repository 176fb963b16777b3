"""Faults of a sequence cut over cp and gathered: which pieces, in what order, whose cotangents."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

ORDER = (
    InjectedBug(
        name="gathered sequence left in rank order",
        kind="order",
        at="vocab_parallel:AllGatherCPTensor.forward",
        old="return rows_at(rank_major, inverted(torch.cat(held(local * cp, cp, tensor.device))), ctx.dim)",
        new="return rank_major",
        expect="value: same values in another order",
    ),
    InjectedBug(
        name="gathered sequence put in order the wrong way",
        kind="order",
        at="vocab_parallel:AllGatherCPTensor.forward",
        old="inverted(torch.cat(held(local * cp, cp, tensor.device)))",
        new="torch.cat(held(local * cp, cp, tensor.device))",
        expect="value: same values in another order",
    ),
    InjectedBug(
        name="cotangent of a gathered sequence left in order",
        kind="order",
        at="vocab_parallel:AllGatherCPTensor.backward",
        old="rank_major = rows_at(grad_output, torch.cat(held(size, cp, grad_output.device)), ctx.dim)",
        new="rank_major = grad_output",
        expect="gradient: ",
    ),
    InjectedBug(
        name="cotangent of a gathered sequence not summed over cp",
        kind="reduction",
        at="vocab_parallel:AllGatherCPTensor.backward",
        old="return scattered_sum(rank_major, ctx.group, ctx.dim, [size // cp] * cp), None, None",
        new="own = rank_major.split(size // cp, ctx.dim)[ctx.group.rank()]\n"
        "        return own.contiguous(), None, None",
        expect="gradient: ",
    ),
    InjectedBug(
        name="cotangent of a gathered sequence averaged over cp",
        kind="scale",
        at="vocab_parallel:AllGatherCPTensor.backward",
        old="return scattered_sum(rank_major, ctx.group, ctx.dim, [size // cp] * cp), None, None",
        new="return scattered_sum(rank_major, ctx.group, ctx.dim, [size // cp] * cp) / cp, None, None",
        expect="gradient: off by the constant factor",
    ),
    InjectedBug(
        name="cotangent of a gathered sequence summed in place",
        kind="buffer",
        at="vocab_parallel:AllGatherCPTensor.backward",
        old="size, cp = grad_output.shape[ctx.dim], ctx.group.size()",
        new="size, cp = grad_output.shape[ctx.dim], ctx.group.size()\n"
        "        torch.distributed.all_reduce(grad_output, group=ctx.group)\n"
        "        grad_output.div_(cp)",
        expect="hygiene: ",
    ),
    InjectedBug(
        name="gather along the dim before",
        kind="order",
        at="vocab_parallel:AllGatherCPTensor.forward",
        old="rank_major = gathered(tensor, cp_group, ctx.dim, [local] * cp)",
        new="rank_major = gathered(tensor, cp_group, ctx.dim - 1, [len(tensor)] * cp)",
        expect="raised: ",
    ),
    InjectedBug(
        name="piece of the next rank",
        kind="order",
        at="vocab_parallel:_get_tokens_on_this_cp_rank",
        old="held(input_ids.shape[dim], cp_size, input_ids.device)[cp_rank]",
        new="held(input_ids.shape[dim], cp_size, input_ids.device)[(cp_rank + 1) % cp_size]",
        expect="value: same values in another order",
    ),
    InjectedBug(
        name="a contiguous block for the two pieces",
        kind="order",
        at="vocab_parallel:held",
        old="return dual_chunk_swap(size, cp, device=device) if cp > 1",
        new="return contiguous(size, cp, device=device) if cp > 1",
        expect="value: same values in another order",
    ),
    InjectedBug(
        name="a piece cut off from the graph",
        kind="reduction",
        at="vocab_parallel:_get_tokens_on_this_cp_rank",
        old="return rows_at(input_ids,",
        new="return rows_at(input_ids.detach(),",
        expect="gradient: ",
    ),
)

BUGS = (*ORDER,)
