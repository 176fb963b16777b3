"""Injected bugs that are seen where a gradient is not needed, another call comes between, or backward runs twice."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

THREAD = "__import__('threading').get_ident()"  # of a rank of lockstep


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


def in_a_buffer_of_its_shape(owner: str, x: str) -> str:
    """x, copied into a buffer that only the next call of the same rank and shape overwrites; autograd sees nothing."""
    return f"{owner}.__dict__.setdefault(({THREAD}, {x}.dtype, {x}.shape), {x}.clone()).data.copy_({x})"


def cached_by(owner: str, key: str, value: str) -> str:
    """A value that is computed once for each key."""
    return f"{owner}.__dict__.setdefault({key}, {value})"


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
        old="*kv_of(dkv).to(local_kv.dtype), dsinks",
        new="*(kv_of(dkv).to(local_kv.dtype) if ctx.needs_input_grad[0] else (None, None)), dsinks",
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
                "ctx.save_for_backward(hidden, weight, logits, column, *normaliser, shifted_mean)",
                "largest, total = normaliser\n        "
                "ctx.save_for_backward(hidden, weight, logits, column, largest, "
                f"{in_a_workspace('_forward', 'total')}, shifted_mean)",
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
                f"total = {in_a_workspace('difference_of_probabilities', 'total')}\n            "
                "ctx.save_for_backward(student_logits, target_logits, largest, total, *p)",
            ),
            (
                "log-sum-exp of the attention", "context_parallel:_BlockwiseAttention.forward",
                "ctx.save_for_backward(q, local_kv, out, running.lse, sinks)",
                "lse = running.lse\n        "
                f"ctx.save_for_backward(q, local_kv, out, {in_a_workspace('kv_of', 'lse')}, sinks)",
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
            name=f"{what} in a buffer of its shape",
            kind="call",
            at=at,
            old=old,
            new=new,
            expect="gradient: ",
        )
        for what, at, old, new in (
            (
                "normaliser", "vocab_parallel:forward",
                "ctx.save_for_backward(logits, *normaliser, column, shifted_mean)",
                "largest, total = normaliser\n        "
                f"total = {in_a_buffer_of_its_shape('forward', 'total')}\n        "
                "ctx.save_for_backward(logits, largest, total, column, shifted_mean)",
            ),
            (
                "normaliser of hidden states' logits", "vocab_parallel:_forward",
                "ctx.save_for_backward(hidden, weight, logits, column, *normaliser, shifted_mean)",
                "largest, total = normaliser\n        "
                f"total = {in_a_buffer_of_its_shape('_forward', 'total')}\n        "
                "ctx.save_for_backward(hidden, weight, logits, column, largest, total, shifted_mean)",
            ),
            (
                "log-sum-exp of the attention", "context_parallel:_BlockwiseAttention.forward",
                "ctx.save_for_backward(q, local_kv, out, running.lse, sinks)",
                "lse = running.lse\n        "
                f"ctx.save_for_backward(q, local_kv, out, {in_a_buffer_of_its_shape('kv_of', 'lse')}, sinks)",
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
                "columns of a mixer", "mamba:_columns", "raised: ", "return columns, inverse_permutation(columns)",
                "return " + cached_by("inverse_permutation", "cp", "(columns, inverse_permutation(columns))"),
            ),
            (
                "block schedule", "context_parallel:schedule_of", "value: ",
                "return layout.cached((\"schedule\", causal, window), lambda: _schedule(layout, causal, window))",
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
        old="normaliser.log_row_sum.exp().mul_(-temperature)",
        new="normaliser.log_row_sum.exp_().mul_(-temperature)",
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
                "        return as_replicated(cotangent, ctx.group), None, None",
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

BUGS = (*PARTIAL_GRADIENTS, *OTHER_CALLS, *SECOND_BACKWARD)
