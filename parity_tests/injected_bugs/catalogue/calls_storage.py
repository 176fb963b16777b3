"""Injected bugs that are seen where tensors are strided, expanded or share storage."""

from parity_tests.injected_bugs.injected_bug import InjectedBug


def as_if_dense(x: str) -> str:
    """The elements of x read as if they lay side by side."""
    return f"{x}.as_strided({x}.shape, {x}.new_empty({x}.shape).stride())"


STRIDES = (
    InjectedBug(
        name="message with the strides of its input",
        kind="call",
        at="collectives:wide_copy",
        old=", memory_format=torch.contiguous_format",
        new="",
        expect="protocol: strides",
    ),
    InjectedBug(
        name="exchange of an input as it is stored",
        kind="call",
        at="collectives:all_to_all_equal",
        old="    x = x.contiguous()\n",
        new="",
        expect="protocol: strides",
    ),
    InjectedBug(
        name="maximum over a copy with strides",
        kind="call",
        at="collectives:all_reduce_max",
        old=".clone(memory_format=torch.contiguous_format)",
        new=".clone()",
        expect="protocol: strides",
    ),
    InjectedBug(
        name="broadcast of a copy with strides",
        kind="call",
        at="collectives:_Broadcast.forward",
        old=".clone(memory_format=torch.contiguous_format)",
        new=".clone()",
        expect="protocol: strides",
        survives="the schemes broadcast one row, of which every copy is dense",
    ),
    InjectedBug(
        name="gathered shard as it is stored",
        kind="call",
        at="collectives:_pad_rows",
        old="return shard.contiguous()",
        new="return shard",
        expect="protocol: strides",
    ),
    InjectedBug(
        name="flat message of a strided view",
        kind="call",
        at="collectives:_exchange",
        old="x.reshape(-1).contiguous()",
        new="x.reshape(-1)",
        expect="protocol: strides",
    ),
    InjectedBug(
        name="message that must be one view",
        kind="call",
        at="collectives:_exchange",
        old="x.reshape(-1).contiguous()",
        new="x.view(-1)",
        expect="raised: view",
    ),
    InjectedBug(
        name="ring shift of a tensor as it is stored",
        kind="call",
        at="collectives:_start",
        old="[x.contiguous() for x in tensors]",
        new="list(tensors)",
        expect="protocol: strides",
    ),
    InjectedBug(
        name="log-softmax with the strides of its input",
        kind="call",
        at="vocab_parallel:_log_softmax",
        old="large_tensors.empty(logits.shape, logits.dtype, logits.device)",
        new="torch.empty_like(logits)",
        expect="raised: view",
    ),
    InjectedBug(
        name="softmax with the strides of its input",
        kind="call",
        at="vocab_parallel:_compute_distributed_softmax",
        old="large_tensors.empty(logits.shape, logits.dtype, logits.device)",
        new="torch.empty_like(logits)",
        expect="raised: view",
    ),
    InjectedBug(
        name="one block of whatever strides",
        kind="call",
        at="vocab_parallel:row_blocks",
        old="if n <= rows and x.is_contiguous():",
        new="if n <= rows:",
        expect="raised: view",
    ),
    InjectedBug(
        name="row blocks as if rows lay side by side",
        kind="call",
        at="vocab_parallel:_row_views",
        old="x.view(n, width)",
        new="x.as_strided((n, width), (width, 1))",
        expect="value: ",
    ),
    InjectedBug(
        name="ids that must be one view",
        kind="call",
        at="vocab_parallel:forward",
        old="ids.reshape(",
        new="ids.view(",
        expect="raised: view",
    ),
    InjectedBug(
        name="cotangent of the entropy that must be one view",
        kind="call",
        at="vocab_parallel:backward",
        old="g_entropy.reshape(-1)",
        new="g_entropy.view(-1)",
        expect="raised: view",
    ),
    InjectedBug(
        name="cotangent of the log-probability that must be one view",
        kind="call",
        at="vocab_parallel:backward",
        old="g_logprob.reshape(column.shape)",
        new="g_logprob.view(column.shape)",
        expect="raised: view",
    ),
    InjectedBug(
        name="cotangent of hidden states' scores as if it were dense",
        kind="call",
        at="vocab_parallel:_backward",
        old="(column, g.T",
        new=f"(column, {as_if_dense('g')}.T",
        expect="gradient: ",
    ),
    InjectedBug(
        name="targets of a sampler that must be one view",
        kind="call",
        at="vocab_parallel:forward",
        old="target.reshape(-1, 1)",
        new="target.view(-1, 1)",
        expect="raised: view",
    ),
    InjectedBug(
        name="cotangent of a sampler's score that must be one view",
        kind="call",
        at="vocab_parallel:backward",
        old="cotangent.reshape(-1, 1)",
        new="cotangent.view(-1, 1)",
        expect="raised: view",
    ),
    InjectedBug(
        name="cotangent of the cross entropy that must be one view",
        kind="call",
        at="vocab_parallel:DistributedCrossEntropy.backward",
        old="x.reshape(-1, 1) for x in",
        new="x.view(-1, 1) for x in",
        expect="raised: view",
    ),
    InjectedBug(
        name="cotangent of looked-up logits that must be one view",
        kind="call",
        at="vocab_parallel:LogitsAt.backward",
        old="torch.where(column >= 0, cotangent, 0.0).reshape(rows)",
        new="torch.where(column >= 0, cotangent, 0.0).view(rows)",
        expect="raised: view",
    ),
    InjectedBug(
        name="looked-up columns that must be one view",
        kind="call",
        at="vocab_parallel:LogitsAt.backward",
        old="index_of(column).reshape(rows)",
        new="index_of(column).view(rows)",
        expect="raised: view",
    ),
    InjectedBug(
        name="queries with strided rows",
        kind="call",
        at="context_parallel:with_contiguous_rows",
        old="q if q.stride(-1) == 1 else q.contiguous()",
        new="q",
        expect="value: ",
    ),
    *(
        InjectedBug(
            name=f"{what} as if it were dense",
            kind="call",
            at=at,
            old=old,
            new=old.replace(x, as_if_dense(x)),
            expect=expect,
        )
        for what, at, old, x, expect in (
            (
                "cotangent of an all_gather", "collectives:AllGather.backward", "apply(cotangent", "cotangent",
                "gradient: ",
            ),
            (
                "cotangent of a reduce_scatter", "collectives:ReduceScatter.backward", "apply(cotangent", "cotangent",
                "gradient: ",
            ),
            (
                "cotangent of an all_reduce", "collectives:_AllReduce.backward", "apply(cotangent", "cotangent",
                "gradient: ",
            ),
            (
                "cotangent of a broadcast", "collectives:_Broadcast.backward", "apply(cotangent", "cotangent",
                "gradient: ",
            ),
            (
                "cotangent of a ring shift", "collectives:_RingShift.backward", "apply(cotangent", "cotangent",
                "gradient: ",
            ),
            (
                "cotangent of an all_to_all", "collectives:_AllToAll.backward", "apply(cotangent", "cotangent",
                "gradient: ",
            ),
            ("shard to be gathered", "collectives:all_gather_concat", "x.movedim(dim, 0)", "x", "value: "),
            ("addend to be scattered", "collectives:reduce_scatter_sum", "shards = x.to(", "x", "value: "),
            ("tensor to be exchanged", "collectives:_exchange", "x.split(sent", "x", "value: "),
            ("cotangent of permuted rows", "layouts:_Permute.backward", "apply(cotangent", "cotangent", "gradient: "),
            ("tensor to select rows from", "collectives:index_select", "MIN_BYTES:\n        return x.", "x", "value: "),
            (
                "cotangent of an attention", "context_parallel:_BlockwiseAttention.backward",
                "pending_dkv, cotangent,", "cotangent", "gradient: ",
            ),
            ("logits to look up in", "vocab_parallel:LogitsAt.forward", "logits.gather", "logits", "value: "),
        )
    ),
)  # fmt: skip

STORAGE = (
    InjectedBug(
        name="ring shift by a full turn without a copy",
        kind="call",
        at="collectives:_start",
        old="[x.clone(memory_format=torch.contiguous_format) for x in tensors]",
        new="list(tensors)",
        expect="hygiene: shares its storage with input",
        survives="no scheme returns what it receives from a ring shift as it is",
    ),
    *(
        InjectedBug(
            name=f"{what} of one rank without a copy",
            kind="call",
            at=at,
            old=old,
            new=new,
            expect="hygiene: shares its storage with input",
        )
        for what, at, old, new in (
            (
                "sum", "collectives:all_reduce_sum", "return total.to(x.dtype)",
                "return x if group.size() == 1 else total.to(x.dtype)",
            ),
            (
                "gathered tensor", "collectives:all_gather_concat", "return _drop",
                "return x if group.size() == 1 else _drop",
            ),
            (
                "scattered sum", "collectives:reduce_scatter_sum", "return total[",
                "return x if group.size() == 1 else total[",
            ),
            (
                "exchanged tensor", "collectives:_exchange", "if concat_dim == 0:",
                "if group.size() == 1:\n        return x\n    if concat_dim == 0:",
            ),
            (
                "broadcast", "collectives:_Broadcast.forward", "return result",
                "return x if group.size() == 1 else result",
            ),
            (
                "gathered sequence", "vocab_parallel:GatherOverCp.forward", "return large_tensors.index_select(",
                "return tensor if cp == 1 else large_tensors.index_select(",
            ),
        )
    ),
    InjectedBug(
        name="rows in order without a copy",
        kind="call",
        at="collectives:index_select",
        old="if not _has_memory(x)",
        new=(
            "in_order = torch.arange(x.shape[dim], device=x.device)\n"
            "    if torch.equal(index.long(), in_order):\n        return x\n    if not _has_memory(x)"
        ),
        expect="hygiene: shares its storage with input",
    ),
    InjectedBug(
        name="sum in place of an input without a gradient",
        kind="call",
        at="collectives:all_reduce",
        old="return _AllReduce.apply(x, group, out)",
        new=(
            "if torch.is_grad_enabled():\n        return _AllReduce.apply(x, group, out)\n"
            "    dist.all_reduce(x, group=group)\n    return x"
        ),
        expect="hygiene: was modified",
    ),
    InjectedBug(
        name="broadcast in place of an input without a gradient",
        kind="call",
        at="collectives:broadcast",
        old="return _Broadcast.apply(x, group, src, out)",
        new=(
            "if torch.is_grad_enabled():\n        return _Broadcast.apply(x, group, src, out)\n"
            "    dist.broadcast(x, group=group, group_src=src)\n    return x"
        ),
        expect="raised: ",
    ),
)  # fmt: skip

BUGS = (*STRIDES, *STORAGE)
