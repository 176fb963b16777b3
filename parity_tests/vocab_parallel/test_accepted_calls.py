"""A call is rejected if and only if its arguments break a rule.

Right and wrong arguments are drawn. The rules, written again here, say how the message of each rejection begins.
"""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardproof import CaseSpec
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp

NEXT_TOKEN = "vocab_parallel.get_next_token_logprobs_from_logits"
PACKED = "vocab_parallel.from_parallel_logits_to_logprobs_packed_sequences"
POSITIONS = 40  # the length of the packed stream


ACCEPTED = "accepted"


def verdict(call, beginnings):
    """ACCEPTED, or the one of `beginnings` that the rejection's message starts with; the full message if none does."""
    try:
        call()
    except (TypeError, ValueError) as error:
        sentence = str(error)
        return next((beginning for beginning in beginnings if sentence.startswith(beginning)), sentence)
    return ACCEPTED


def verdicts(body, **mesh):
    """The distinct results of `body(mesh)` over the ranks."""
    return set(run(lambda view, case: body(view), CaseSpec(scheme="calls", mesh=mesh)).results)


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


SAMPLING_RULES = tuple(f"{NEXT_TOKEN}: {name}" for name in ("top_k=", "top_p=", "temperature=", "with_entropy=True"))


def sampling_rule(top_k, top_p, temperature, with_entropy):
    """Each sampling parameter must have the right kind and range, and an entropy cannot be combined with a filter."""
    k_rule, p_rule, temperature_rule, entropy_rule = SAMPLING_RULES
    if top_k is not None and not (is_number(top_k) and top_k == int(top_k)):
        return k_rule
    if top_p is not None and not (is_number(top_p) and 0 <= top_p <= 1):
        return p_rule
    if temperature <= 0:
        return temperature_rule
    is_filtered = (top_k is not None and top_k > 0) or (top_p is not None and top_p < 1)
    return entropy_rule if with_entropy and is_filtered else ACCEPTED


SAMPLING = {
    "top_k": st.sampled_from((None, 0, 2, 3, 2.5)),
    "top_p": st.sampled_from((None, 1.0, 0.5, 0.0, 0.75, 1.5, -0.25, True)),
    "temperature": st.sampled_from((1.0, 0.5, 2.0, 0.0, -1.0)),
    "with_entropy": st.booleans(),
}


@settings(max_examples=few(60))
@given(tp=st.sampled_from((1, 2)), **SAMPLING)
def test_sampling_params_that_are_accepted(tp, top_k, top_p, temperature, with_entropy):
    params = SimpleNamespace(top_k=top_k, top_p=top_p, temperature=temperature)

    def call(mesh):
        vp.get_next_token_logprobs_from_logits(
            torch.zeros(1, 2, dtype=torch.int64),
            torch.zeros(1, 2, 4),
            vocab_parallel_rank=mesh.rank("tp"),
            vocab_parallel_group=mesh["tp"],
            sampling_params=params,
            with_entropy=with_entropy,
        )

    seen = verdicts(lambda mesh: verdict(lambda: call(mesh), SAMPLING_RULES), tp=tp)
    assert seen == {sampling_rule(top_k, top_p, temperature, with_entropy)}


FLAWS = {
    "logits of integers": f"{NEXT_TOKEN}: next_token_logits is int64",
    "ids of floats": f"{NEXT_TOKEN}: input_ids is float32",
    "ids without a batch": f"{NEXT_TOKEN}: input_ids is [",
}
PLACEMENT_RULES = ("next_token_logits is sharded over cp", "seq_index is", "input_ids is sharded over cp")
PLACEMENT_RULES = tuple(f"{NEXT_TOKEN}: {words}" for words in PLACEMENT_RULES)


def placement_verdicts(cp, logits_over_cp, ids, order, flaw):
    """The beginnings that the message may have."""
    is_sharded = logits_over_cp == "sharded"
    if flaw:
        return {FLAWS[flaw]}
    if ids == "plain":
        is_accepted = not is_sharded and order is None
    elif order == "repeated":
        is_accepted = False
    elif cp == 1:
        is_accepted = True
    else:
        # Replicated logits have no order to store, and their ids must be replicated too.
        is_accepted = order is not None if is_sharded else ids == "replicated" and order is None
    return {ACCEPTED} if is_accepted else set(PLACEMENT_RULES)


PLACEMENTS = {
    "logits_over_cp": st.sampled_from(("sharded", "replicated")),
    "ids": st.sampled_from(("sharded", "replicated", "plain")),
    "order": st.sampled_from((None, "permuted", "repeated")),
    "flaw": st.sampled_from((None, None, None, *FLAWS)),
}


@settings(max_examples=few(60))
@given(cp=st.sampled_from((1, 2)), tp=st.sampled_from((1, 2)), **PLACEMENTS)
def test_placements_that_are_accepted(cp, tp, logits_over_cp, ids, order, flaw):
    """DTensor logits that cp shards need a stored order; replicated logits need replicated ids and no order."""
    s, is_sharded = 4, logits_over_cp == "sharded"

    def call(mesh):
        dtype = torch.int64 if flaw == "logits of integers" else torch.float32
        logits = torch.zeros(1, s // cp if is_sharded else s, 3, dtype=dtype)
        logits = DTensor.from_local(logits, mesh.device_mesh, [Shard(1) if is_sharded else Replicate(), Shard(2)])
        stored = torch.zeros(1, s // cp if ids == "sharded" else s, dtype=torch.int64)
        if flaw in ("ids of floats", "ids without a batch"):
            stored = stored.float() if flaw == "ids of floats" else stored[0]
        if ids != "plain":
            placement = Shard(stored.ndim - 1) if ids == "sharded" else Replicate()
            stored = DTensor.from_local(stored, mesh.device_mesh, [placement, Replicate()])
        places = torch.arange(s)
        index = {None: None, "permuted": places.flip(0), "repeated": 0 * places}[order]
        rules = (*FLAWS.values(), *PLACEMENT_RULES)
        return verdict(lambda: vp.get_next_token_logprobs_from_logits(stored, logits, seq_index=index), rules)

    (seen,) = verdicts(call, cp=cp, tp=tp)
    assert seen in placement_verdicts(cp, logits_over_cp, ids, order, flaw)


OFFSET_RULES = ("cu_seqlens: sequence", "cu_seqlens_padded[", "cu_seqlens has", "cu_seqlens_padded ends")
OFFSET_RULES = tuple(f"{PACKED}: {words}" for words in OFFSET_RULES)


def offset_rule(cp, padded, real):
    """Offsets ascend, in multiples of 2 cp if cp > 1. Each sequence fits its slot, and the slots fit the stream."""
    multiple = 2 * cp if cp > 1 else 1
    broken = (
        any(length < 0 for length in real),
        any(length % multiple for length in padded),
        any(length > slot for length, slot in zip(real, padded, strict=True)),
        sum(padded) > POSITIONS,
    )
    return next((rule for rule, is_broken in zip(OFFSET_RULES, broken, strict=True) if is_broken), ACCEPTED)


SEQUENCES = st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 1)), min_size=1, max_size=3)


@settings(max_examples=few(60))
@given(cp=st.sampled_from((1, 2)), tp=st.sampled_from((1, 2)), unit=st.sampled_from((4, 1, 2)), sequences=SEQUENCES)
def test_offsets_that_are_accepted(cp, tp, unit, sequences):
    padded = [unit * length for length, _ in sequences]
    real = [unit * length + extra for length, extra in sequences]
    offsets = [torch.tensor([0, *each]).cumsum(0) for each in (padded, real)]

    def call(mesh):
        vp.from_parallel_logits_to_logprobs_packed_sequences(
            torch.zeros(1, POSITIONS // cp, 3),
            torch.zeros(1, POSITIONS, dtype=torch.int64),
            offsets[0],
            8,
            3 * mesh.rank("tp"),
            3 * mesh.rank("tp") + 3,
            mesh["tp"],
            cp_group=mesh["cp"],
            cu_seqlens=offsets[1],
        )

    seen = verdicts(lambda mesh: verdict(lambda: call(mesh), OFFSET_RULES), cp=cp, tp=tp)
    assert seen == {offset_rule(cp, padded, real)}
