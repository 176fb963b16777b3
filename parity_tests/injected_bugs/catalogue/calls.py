"""Injected bugs that a plain call does not show.

They are seen where tensors are strided or share storage, some gradients are not needed, the function is called again
before its backward, or backward runs twice.
"""

from parity_tests.injected_bugs.injected_bug import InjectedBug

THREAD = "__import__('threading').get_ident()"  # of a rank of lockstep


def as_if_dense(x: str) -> str:
    """The elements of x read as if they lay side by side."""
    return f"{x}.as_strided({x}.shape, {x}.new_empty({x}.shape).stride())"


def of_last_call(owner: str, name: str, values: str) -> str:
    """Statements that save a list which the next call of the same rank overwrites."""
    return (
        f"saved = {owner}.__dict__.get('saved_{name}') or {{}}\n"
        f"        setattr({owner}, 'saved_{name}', saved)\n"
        f"        ctx.{name} = saved.setdefault({THREAD}, [])\n"
        f"        ctx.{name}[:] = {values}"
    )


def in_a_workspace(owner: str, x: str) -> str:
    """x, copied into memory that the next call of the same rank overwrites."""
    return (
        f"{owner}.__dict__.setdefault(({THREAD}, {x}.dtype), {x}.new_empty(10**5))[: {x}.numel()]"
        f".view({x}.shape).copy_({x})"
    )


def cached_by(owner: str, key: str, value: str) -> str:
    """A value that is computed once for each key."""
    return f"{owner}.__dict__.setdefault({key}, {value})"


STRIDES = (
    InjectedBug(
        name="message with the strides of its input",
        kind="call",
        at="collectives:widened_copy",
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
        at="collectives:_padded",
        old="return shard.contiguous()",
        new="return shard",
        expect="protocol: strides",
    ),
    InjectedBug(
        name="flat message of a strided view",
        kind="call",
        at="collectives:_exchanged",
        old="x.reshape(-1).contiguous()",
        new="x.reshape(-1)",
        expect="protocol: strides",
    ),
    InjectedBug(
        name="message that must be one view",
        kind="call",
        at="collectives:_exchanged",
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
        at="vocab_parallel:_compute_distributed_log_softmax",
        old=", memory_format=torch.contiguous_format",
        new="",
        expect="raised: view",
    ),
    InjectedBug(
        name="softmax with the strides of its input",
        kind="call",
        at="vocab_parallel:_compute_distributed_softmax",
        old=", memory_format=torch.contiguous_format",
        new="",
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
        old="grad_outputs[0].T",
        new=f"{as_if_dense('grad_outputs[0]')}.T",
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
            ("tensor to be exchanged", "collectives:_exchanged", "x.split(sent", "x", "value: "),
            ("cotangent of permuted rows", "layouts:_Permuted.backward", "apply(cotangent", "cotangent", "gradient: "),
            ("tensor to select rows from", "kernels:_selected", "return x", "x", "value: "),
            (
                "cotangent of an attention", "context_parallel:_BlockwiseAttention.backward",
                "wait_for_dkv, cotangent,", "cotangent", "gradient: ",
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
                "gathered tensor", "collectives:all_gather_concat", "return _un",
                "return x if group.size() == 1 else _un",
            ),
            (
                "scattered sum", "collectives:reduce_scatter_sum", "return total[",
                "return x if group.size() == 1 else total[",
            ),
            (
                "exchanged tensor", "collectives:_exchanged", "if concat_dim == 0:",
                "if group.size() == 1:\n        return x\n    if concat_dim == 0:",
            ),
            (
                "broadcast", "collectives:_Broadcast.forward", "return result",
                "return x if group.size() == 1 else result",
            ),
            (
                "gathered sequence", "vocab_parallel:GatherOverCp.forward", "return rows_at(",
                "return tensor if cp == 1 else rows_at(",
            ),
        )
    ),
    InjectedBug(
        name="rows in order without a copy",
        kind="call",
        at="kernels:_selected",
        old="return x.index_select(dim, index)",
        new=(
            "in_order = torch.arange(x.shape[dim], device=x.device)\n"
            "    return x if torch.equal(index.long(), in_order) else x.index_select(dim, index)"
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

PARTIAL_GRADIENTS = (
    InjectedBug(
        name="hidden states taken for the weight where one is frozen",
        kind="call",
        at="vocab_parallel:_backward",
        old="of_hidden, _, of_weight, *_ = ctx.needs_input_grad",
        new="of_weight, _, of_hidden, *_ = ctx.needs_input_grad",
        expect="gradient: no gradient was returned",
    ),
    InjectedBug(
        name="no gradient of the weight with frozen hidden states",
        kind="call",
        at="vocab_parallel:_backward",
        old="of_hidden, _, of_weight, *_ = ctx.needs_input_grad",
        new="of_hidden = of_weight = ctx.needs_input_grad[0]",
        expect="gradient: no gradient was returned",
    ),
    InjectedBug(
        name="no gradient of the hidden states with a frozen weight",
        kind="call",
        at="vocab_parallel:_backward",
        old="of_hidden, _, of_weight, *_ = ctx.needs_input_grad",
        new="of_hidden = of_weight = ctx.needs_input_grad[2]",
        expect="gradient: no gradient was returned",
    ),
    InjectedBug(
        name="sum over chunks of the weight only with hidden states",
        kind="call",
        at="vocab_parallel:gradients",
        old="if of_weight else None",
        new="if of_weight and of_hidden else None",
        expect="gradient: no gradient was returned",
    ),
    InjectedBug(
        name="term of the hidden states only with the weight",
        kind="call",
        at="vocab_parallel:gradients",
        old="if of_hidden else None",
        new="if of_hidden and of_weight else None",
        expect="gradient: no gradient was returned",
    ),
    InjectedBug(
        name="nothing saved for a frozen weight",
        kind="call",
        at="vocab_parallel:_forward",
        old="if not inference_only:",
        new="if not inference_only and ctx.needs_input_grad[2]:",
        expect="raised: ",
    ),
    InjectedBug(
        name="nothing saved for frozen hidden states",
        kind="call",
        at="vocab_parallel:_forward",
        old="if not inference_only:",
        new="if not inference_only and ctx.needs_input_grad[0]:",
        expect="raised: ",
    ),
    InjectedBug(
        name="no gradient of the queries with frozen keys",
        kind="call",
        at="context_parallel:_BlockwiseAttention.backward",
        old="return dq.to(q.dtype),",
        new="return dq.to(q.dtype) if ctx.needs_input_grad[1] else None,",
        expect="gradient: ",
    ),
    InjectedBug(
        name="no gradients of keys with frozen queries",
        kind="call",
        at="context_parallel:_BlockwiseAttention.backward",
        old="*kv_of(dkv).to(local_kv.dtype), None",
        new="*(kv_of(dkv).to(local_kv.dtype) if ctx.needs_input_grad[0] else (None, None)), None",
        expect="gradient: ",
    ),
    InjectedBug(
        name="frozen keys not saved",
        kind="call",
        at="context_parallel:_BlockwiseAttention.forward",
        old="ctx.save_for_backward(q, local_kv,",
        new="ctx.save_for_backward(q, local_kv if ctx.needs_input_grad[2] else local_kv * 0,",
        expect="gradient: ",
    ),
    InjectedBug(
        name="no gradient of the taps with a frozen input",
        kind="call",
        at="mamba:convolution",
        old="(taps * weight.to(wide))",
        new="(taps * (weight if x.requires_grad else weight.detach()).to(wide))",
        expect="gradient: ",
    ),
    InjectedBug(
        name="entropy without the cotangent of log-probabilities",
        kind="call",
        at="vocab_parallel:backward",
        old="if g_logprob is not None and column is not None and column.numel():",
        new="if column is not None and column.numel():",
        expect="raised: ",
    ),
    InjectedBug(
        name="cotangent of the entropy taken for granted",
        kind="call",
        at="vocab_parallel:backward",
        old="entropy = None if g_entropy is None else",
        new="entropy = None if not options.with_entropy else",
        expect="raised: ",
    ),
    InjectedBug(
        name="log-probabilities without the cotangent of the entropy",
        kind="call",
        at="vocab_parallel:backward",
        old="g_logprob = None if column is None else cotangents[0]",
        new="g_logprob = None if column is None or cotangents[-1] is None else cotangents[0]",
        expect="gradient: ",
    ),
    InjectedBug(
        name="entropy only with the cotangent of log-probabilities",
        kind="call",
        at="vocab_parallel:backward",
        old="g_entropy = cotangents[-1] if options.with_entropy else None",
        new="g_entropy = cotangents[-1] if options.with_entropy and cotangents[0] is not None else None",
        expect="gradient: ",
    ),
)

OTHER_CALLS = (
    *(
        InjectedBug(
            name=f"{what} of the last call",
            kind="call",
            at=at,
            old=old,
            new=new,
            expect="raised: ",
        )
        for what, at, old, new in (
            (
                "lengths of an all_gather", "collectives:AllGather.forward",
                "ctx.group, ctx.out, ctx.dim, ctx.lengths = group, out, dim, lengths",
                "ctx.group, ctx.out, ctx.dim = group, out, dim\n        "
                + of_last_call("AllGather", "lengths", "lengths"),
            ),
            (
                "lengths of a reduce_scatter", "collectives:ReduceScatter.forward",
                "ctx.group, ctx.dim, ctx.lengths = group, dim, lengths",
                "ctx.group, ctx.dim = group, dim\n        " + of_last_call("ReduceScatter", "lengths", "lengths"),
            ),
            (
                "lengths of an all_to_all", "collectives:_AllToAll.forward",
                "ctx.group, ctx.dims, ctx.lengths = group, (split_dim, concat_dim), (sent, received)",
                "ctx.group, ctx.dims = group, (split_dim, concat_dim)\n        "
                + of_last_call("_AllToAll", "lengths", "(sent, received)"),
            ),
            (
                "shape of looked-up logits", "vocab_parallel:LogitsAt.forward",
                "ctx.like, ctx.chunk_size, ctx.group = (logits.shape, logits.dtype), chunk_size, group",
                "ctx.chunk_size, ctx.group = chunk_size, group\n        "
                + of_last_call("LogitsAt", "like", "(logits.shape, logits.dtype)"),
            ),
            (
                "columns of looked-up logits", "vocab_parallel:LogitsAt.forward",
                "ctx.save_for_backward(column)",
                f"ctx.save_for_backward({in_a_workspace('local_column', 'column')})",
            ),
            (
                "normaliser", "vocab_parallel:forward",
                "ctx.save_for_backward(logits, *normaliser, column, shifted_mean)",
                "largest, total = normaliser\n        "
                f"ctx.save_for_backward(logits, largest, {in_a_workspace('forward', 'total')}, column, shifted_mean)",
            ),
            (
                "normaliser of hidden states' logits", "vocab_parallel:_forward",
                "ctx.save_for_backward(hidden, weight, column, *normaliser)",
                "largest, total = normaliser\n        "
                f"ctx.save_for_backward(hidden, weight, column, largest, {in_a_workspace('_forward', 'total')})",
            ),
            (
                "normaliser of the filtered logits", "vocab_parallel:forward",
                "ctx.save_for_backward(logits, *filtered.normaliser, column, filtered.threshold, filtered.last_tie)",
                "largest, total = filtered.normaliser\n        "
                f"total = {in_a_workspace('forward', 'total')}\n        "
                "ctx.save_for_backward(logits, largest, total, column, filtered.threshold, filtered.last_tie)",
            ),
            (
                "normaliser of the student", "vocab_parallel:DistributedCrossEntropy.forward",
                "ctx.save_for_backward(student_logits, target_logits, *q, *p)",
                "largest, total = q\n            "
                f"total = {in_a_workspace('_difference', 'total')}\n            "
                "ctx.save_for_backward(student_logits, target_logits, largest, total, *p)",
            ),
            (
                "log-sum-exp of the attention", "context_parallel:_BlockwiseAttention.forward",
                "ctx.save_for_backward(q, local_kv, out, running.lse)",
                "lse = running.lse\n        "
                f"ctx.save_for_backward(q, local_kv, out, {in_a_workspace('kv_of', 'lse')})",
            ),
            (
                "keys of the attention", "context_parallel:_BlockwiseAttention.forward",
                "ctx.save_for_backward(q, local_kv,",
                f"ctx.save_for_backward(q, {in_a_workspace('kv_of', 'local_kv')},",
            ),
        )
    ),
    *(
        InjectedBug(
            name=f"{what} of the first call",
            kind="call",
            at=at,
            old=old,
            new=new,
            expect=expect,
        )
        for what, at, expect, old, new in (
            (
                "rows of chunks", "layouts:_chunk_rows", "value: ",
                "return start + torch.tensor(order, device=offsets.device)[i // chunk] * chunk + i % chunk",
                "index = start + torch.tensor(order, device=offsets.device)[i // chunk] * chunk + i % chunk\n"
                "    return " + cached_by("_chunk_rows", "(rows, *order)", "index"),
            ),
            (
                "rows of sequences", "layouts:_sequence_major", "value: ",
                "return i // length * (rows // cp_size) + start + i % length",
                "index = i // length * (rows // cp_size) + start + i % length\n"
                "    return " + cached_by("_sequence_major", "(rows, cp_size)", "index"),
            ),
            (
                "positions of ranks", "vocab_parallel:positions_of_ranks", "value: ",
                "return dual_chunk_swap(size, cp, device=device) if cp > 1 else contiguous(size, 1, device=device)",
                "make = dual_chunk_swap if cp > 1 else contiguous\n"
                "    return " + cached_by("positions_of_ranks", "cp", "make(size, cp, device=device)"),
            ),
            (
                "layout", "layouts:dense_layout", "raised: ",
                "return TokenLayout.dense(kind, length, cp_size=cp_size, cp_rank=cp_rank, device=device)",
                "layout = TokenLayout.dense(kind, length, cp_size=cp_size, cp_rank=cp_rank, device=device)\n    return "
                + cached_by("STREAM['contiguous']", "(kind, cp_size, cp_rank)", "layout"),
            ),
            (
                "columns of a mixer", "mamba:_columns", "raised: ", "return columns, inverted(columns)",
                "return " + cached_by("inverted", "cp", "(columns, inverted(columns))"),
            ),
            (
                "block schedule", "context_parallel:schedule_of", "value: ",
                "return layout.derived((\"schedule\", causal, window), lambda: _schedule(layout, causal, window))",
                "return " + cached_by(
                    "_schedule", "(layout.kind, layout.cp_size, layout.cp_rank, causal, window)",
                    "_schedule(layout, causal, window)",
                ),
            ),
        )
    ),
)  # fmt: skip

SECOND_BACKWARD = (
    InjectedBug(
        name="normaliser overwritten by its exponential",
        kind="call",
        at="vocab_parallel:_dense_gradient",
        old="normaliser.log_total.exp().mul_(temperature)",
        new="normaliser.log_total.exp_().mul_(temperature)",
        expect="raised: ",
    ),
    InjectedBug(
        name="options dropped after a backward",
        kind="call",
        at="vocab_parallel:backward",
        old="options: LogprobOptions = ctx.options\n    if options.inference_only:",
        new="options: LogprobOptions = ctx.options\n    ctx.options = None\n    if options.inference_only:",
        expect="raised: ",
    ),
    *(
        InjectedBug(
            name=f"{what} dropped after a backward",
            kind="call",
            at=at,
            old=old,
            new=f"group, ctx.group = ctx.group, None\n        {old.replace('ctx.group', 'group')}",
            expect="raised: ",
        )
        for what, at, old in (
            (
                "group of an all_gather", "collectives:AllGather.backward",
                "return shard_of.apply(cotangent, ctx.group, ctx.dim, ctx.lengths), None, None, None, None",
            ),
            (
                "group of a reduce_scatter", "collectives:ReduceScatter.backward",
                'return AllGather.apply(cotangent, ctx.group, "R", ctx.dim, ctx.lengths), None, None, None',
            ),
            (
                "group of an all_reduce", "collectives:_AllReduce.backward",
                'if ctx.out == "R":\n            return _AllReduce.apply(cotangent, ctx.group, "R"), None, None\n'
                "        return replicated(cotangent, ctx.group), None, None",
            ),
            (
                "group of a broadcast", "collectives:_Broadcast.backward",
                "return _ToSource.apply(cotangent, ctx.group, ctx.src, ctx.out), None, None, None",
            ),
            (
                "group of a ring shift", "collectives:_RingShift.backward",
                "return _RingShift.apply(cotangent, ctx.group, -ctx.shift), None, None",
            ),
            (
                "group of an all_to_all", "collectives:_AllToAll.backward",
                "gradient = _AllToAll.apply(cotangent, ctx.group, concat_dim, split_dim, received, sent)",
            ),
            (
                "group of a mixer's exchange", "mamba:_AllToAll.backward",
                "return _AllToAll.apply(grad_output, ctx.group), None",
            ),
        )
    ),
    InjectedBug(
        name="block schedule dropped after a backward",
        kind="call",
        at="context_parallel:_BlockwiseAttention.backward",
        old="schedule: BlockSchedule = ctx.schedule",
        new="schedule, ctx.schedule = ctx.schedule, None",
        expect="raised: ",
    ),
)  # fmt: skip

BUGS = (*STRIDES, *STORAGE, *PARTIAL_GRADIENTS, *OTHER_CALLS, *SECOND_BACKWARD)
