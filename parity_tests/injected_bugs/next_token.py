"""Faults of scores of a sequence: whose id comes next, whose ids these are, and where they are stored."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

SHIFT = (
    InjectedBug(
        name="ids not shifted",
        kind="sequence",
        at="vocab_parallel:next_ids",
        old="shifted[:, : max(ids.shape[1] - 1, 0)] = ids[:, 1:]",
        new="shifted[:, : ids.shape[1]] = ids",
        expect="value: ",
    ),
    InjectedBug(
        name="ids shifted in this rank's share",
        kind="sequence",
        at="vocab_parallel:scored_over_cp",
        old="scores = scoring.scores(logits, _get_tokens_on_this_cp_rank(target, rank, cp))",
        new="own = _get_tokens_on_this_cp_rank(target.roll(1, 1), rank, cp)\n"
        "    scores = scoring.scores(logits, own.roll(-1, 1))",
        expect="value: ",
    ),
    InjectedBug(
        name="ids shifted the other way",
        kind="sequence",
        at="vocab_parallel:next_ids",
        old="shifted[:, : max(ids.shape[1] - 1, 0)] = ids[:, 1:]",
        new="shifted[:, 1 : ids.shape[1]] = ids[:, :-1]",
        expect="value: ",
    ),
    InjectedBug(
        name="first id after the last",
        kind="sequence",
        at="vocab_parallel:next_ids",
        old="    return shifted\n",
        new="    shifted[:, ids.shape[1] - 1 : ids.shape[1]] = ids[:, :1]\n    return shifted\n",
        expect="value: ",
        equivalent="what this position scores is dropped, and only a row that is NaN has a gradient where "
        "the cotangent is 0; test_next_token.py asks that of it",
    ),
    InjectedBug(
        name="padding that is token 0",
        kind="border",
        at="vocab_parallel:next_ids",
        old="ids.new_full((len(ids), size), NO_ID)",
        new="ids.new_full((len(ids), size), 0)",
        expect="value: ",
        equivalent="what this position scores is dropped, and only a row that is NaN has a gradient where "
        "the cotangent is 0; test_next_token.py asks that of it",
    ),
    InjectedBug(
        name="scores not gathered in order",
        kind="order",
        at="vocab_parallel:scored_over_cp",
        old="scores = allgather_cp_sharded_tensor(scores, cp_group)",
        new="from torch_impl.collectives import all_gather\n\n"
        "        scores = all_gather(scores, cp_group, out='R', dim=1)",
        expect="value: ",
    ),
    InjectedBug(
        name="scores gathered as if all cotangents were one",
        kind="reduction",
        at="vocab_parallel:scored_over_cp",
        old="scores = allgather_cp_sharded_tensor(scores, cp_group)",
        new="whole = allgather_cp_sharded_tensor(scores.detach(), cp_group)\n"
        "        own = _get_tokens_on_this_cp_rank(torch.arange(whole.shape[1], "
        "device=whole.device)[None], rank, cp)[0]\n"
        "        scores = whole.index_copy(1, own, scores)",
        expect="gradient: ",
    ),
    InjectedBug(
        name="last position kept, first dropped",
        kind="sequence",
        at="vocab_parallel:scored_over_cp",
        old="return scores[:, : max(ids.shape[1] - 1, 0)]",
        new="return scores[:, 1 : ids.shape[1]]",
        expect="value: ",
    ),
    InjectedBug(
        name="temperature forgotten",
        kind="scale",
        at="vocab_parallel:Scoring.plan",
        old="temperature=1.0 if params is None else params.temperature",
        new="temperature=1.0",
        expect="value: ",
    ),
    InjectedBug(
        name="temperature turned over",
        kind="scale",
        at="vocab_parallel:Scoring.plan",
        old="1.0 if params is None else params.temperature",
        new="1.0 if params is None else 1.0 / params.temperature",
        expect="value: ",
    ),
    InjectedBug(
        name="filter forgotten",
        kind="statistic",
        at="vocab_parallel:Scoring.limits",
        old="return Limits(None, None) if params is None else checked_limits(self.function, "
        "params.top_k, params.top_p)",
        new="return Limits(None, None)",
        expect="value: ",
    ),
    InjectedBug(
        name="top-p forgotten where there is a top-k",
        kind="statistic",
        at="vocab_parallel:Scoring.limits",
        old="checked_limits(self.function, params.top_k, params.top_p)",
        new="checked_limits(self.function, params.top_k, params.top_p if (params.top_k or 0) < 1 else 1.0)",
        expect="value: ",
    ),
    InjectedBug(
        name="scores in the logits' dtype",
        kind="precision",
        at="vocab_parallel:_Scores.forward",
        old="return sampling.forward(ctx, logits, target, plan, limits)",
        new="return sampling.forward(ctx, logits, target, plan, limits).to(logits.dtype).float()",
        expect="value: ",
    ),
)

OWNED = (
    InjectedBug(
        name="ids counted as if all shards were as wide",
        kind="border",
        at="vocab_parallel:gathered_range_and_size",
        old="end = ends[group.rank()]\n",
        new="end = (group.rank() + 1) * width\n",
        expect="value: ",
    ),
    InjectedBug(
        name="ids counted from the end of the next",
        kind="border",
        at="vocab_parallel:gathered_range_and_size",
        old="return end - width, end, ends[-1]",
        new="return end, end + width, ends[-1]",
        expect="value: ",
    ),
    InjectedBug(
        name="DTensor's blocks rounded down",
        kind="border",
        at="vocab_parallel:ceil_range",
        old="return ceil_bound(size, world, rank), ceil_bound(size, world, rank + 1)",
        new="block = size // world\n    return min(rank * block, size), min((rank + 1) * block, size)",
        expect="value: ",
        equivalent="drawn shards of a DTensor are even; uneven ones are judged case by case in test_stored_order.py",
    ),
    InjectedBug(
        name="DTensor's blocks of the wrong rank",
        kind="border",
        at="vocab_parallel:range_of_dtensor",
        old="ceil_range(logits.shape[-1], mesh.size(tp), mesh.get_local_rank(tp))",
        new="ceil_range(logits.shape[-1], mesh.size(tp), mesh.size(tp) - 1 - mesh.get_local_rank(tp))",
        expect="value: ",
    ),
)

STORED_ORDER = (
    InjectedBug(
        name="stored ids shifted as they lie",
        kind="sequence",
        at="vocab_parallel:scored_in_stored_order",
        old="target = next_ids(ids.whole().to(logits.device)[:, original], size)[:, stored]",
        new="target = next_ids(ids.whole().to(logits.device), size)",
        expect="value: ",
    ),
    InjectedBug(
        name="shifted ids not put back in stored order",
        kind="order",
        at="vocab_parallel:scored_in_stored_order",
        old="[:, original], size)[:, stored]",
        new="[:, original], size)",
        expect="value: ",
    ),
    InjectedBug(
        name="the order of storage taken for its inverse",
        kind="order",
        at="vocab_parallel:scored_in_stored_order",
        old="original = inverted(stored)",
        new="original, stored = stored, inverted(stored)",
        expect="value: ",
    ),
    InjectedBug(
        name="scores left in stored order",
        kind="order",
        at="vocab_parallel:scored_in_stored_order",
        old='out="I", dim=1)[:, original]',
        new='out="I", dim=1)',
        expect="value: ",
    ),
    InjectedBug(
        name="stored scores with cp times the gradient",
        kind="scale",
        at="vocab_parallel:scored_in_stored_order",
        old='scores, cp_group, out="I", dim=1',
        new='scores, cp_group, out="R", dim=1',
        expect="gradient: off by the constant factor",
    ),
    InjectedBug(
        name="targets of the first cp rank on all",
        kind="group",
        at="vocab_parallel:scored_in_stored_order",
        old="target.chunk(ids.cp, dim=1)[cp_group.rank()]",
        new="target.chunk(ids.cp, dim=1)[0]",
        expect="value: ",
    ),
    InjectedBug(
        name="this rank's ids for all ids",
        kind="group",
        at="vocab_parallel:StoredIds.whole",
        old="return gathered(self.local, self.cp_group, 1, [self.local.shape[1]] * self.cp)",
        new="return self.local.repeat(1, self.cp)",
        expect="value: ",
    ),
    InjectedBug(
        name="all cp ranks' ids by their world rank",
        kind="group",
        at="vocab_parallel:scored_in_stored_order",
        old="target.chunk(ids.cp, dim=1)[cp_group.rank()]",
        new="target.chunk(ids.cp, dim=1)[torch.distributed.get_rank() % ids.cp]",
        expect="value: ",
    ),
)

BUGS = (*SHIFT, *OWNED, *STORED_ORDER)
