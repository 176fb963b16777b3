"""Which masks a context drops, and which calls its attention takes, in which thread and how long."""

import re
import threading

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.backends.mha import get_fastpath_enabled, set_fastpath_enabled

from shardproof import CaseSpec
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.context_parallel import adapt_model_to_context, create_context_parallel_ctx

SHAPES = ("square", "more keys", "fewer queries")
SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


class Masked(nn.Module):
    """An attention that only tells whether a mask reaches it."""

    is_causal = True

    def __init__(self, window):
        super().__init__()
        self.sliding_window = window

    def forward(self, hidden_states, attention_mask=None):
        return attention_mask is not None


def causal_pairs(size, window):
    distance = np.arange(size)[:, None] - np.arange(size)
    return (distance >= 0) & (distance < (window or size))


def drawn_pairs(rng, shape, window):
    """True where a key is seen: the causal rule with padding on the right, half of the masks with one entry changed."""
    n, b, size, _ = shape
    real = np.where(rng.random((n, b)) < 0.5, size, rng.integers(0, size + 1, (n, b)))[..., None, None]
    place = np.arange(size)
    # A query of padding sees anything but itself.
    of_padding = (rng.random(shape) < 0.3) & (place[:, None] != place)
    seen = np.where(place[:, None] < real, causal_pairs(size, window), of_padding)
    for i in np.flatnonzero(rng.random(n) < 0.5):
        entry = i, rng.integers(0, b), rng.integers(0, size), rng.integers(0, size)
        seen[entry] = ~seen[entry]
    return seen


def is_dropped_by_rule(seen, window, shape):
    """A mask of all keys is dropped if in each row some number of queries sees by the rule and no other sees itself."""
    size = seen.shape[-1]
    if shape != "square":  # of another number of keys it is a shard's, and says nothing of the sequence
        return shape == "more keys"
    is_ruled = (seen == causal_pairs(size, window)).all(-1)
    sees_itself = np.diagonal(seen, axis1=1, axis2=2)
    fits = [is_ruled[..., :real].all(-1) & ~sees_itself[..., real:].any(-1) for real in range(size + 1)]
    return bool(np.stack(fits).any(0).all())


REJECTION = "context_parallel.adapt_model_to_context: own: attention_mask ["


@settings(max_examples=few(20))
@given(
    SEEDS,
    st.tuples(st.sampled_from((2, 3)), st.sampled_from((4, 8))),
    st.sampled_from((None, 3)),
    st.sampled_from(SHAPES),
    st.booleans(),
)
def test_masks_that_a_context_drops(rng, sizes, window, shape, addends):
    """Others are rejected, since attention would lose them; a layer with another window reads each mask before."""
    (b, size), masks, other = sizes, 6, 3 if window is None else None
    seen = np.concatenate([drawn_pairs(rng, (masks, b, size, size), each) for each in (window, other)])

    def outcome(attention, mask):
        try:
            return "kept" if attention(torch.zeros(1), mask) else "dropped"
        except ValueError as error:
            return str(error)

    def body(mesh, case):
        model, outcomes = nn.ModuleDict({"before": Masked(other), "own": Masked(window)}), []
        adapt_model_to_context(model)
        with create_context_parallel_ctx(mesh.device_mesh["cp"], [torch.zeros(size)], [0], set()):
            for pairs in torch.from_numpy(seen)[:, :, None]:
                mask = torch.zeros(pairs.shape).masked_fill(~pairs, -torch.inf) if addends else pairs
                wide = F.pad(mask, (0, 1))
                forms = {"square": mask, "more keys": wide, "fewer queries": mask[..., : size // 2, :]}
                outcomes.append([outcome(each, forms[shape]) for each in model.values()][-1])
        return outcomes

    ranks = run(body, CaseSpec(scheme="masks", mesh={"cp": 2}))
    assert ranks.ledger.rows == []
    for outcomes in ranks.results:
        for mask, found in zip(seen, outcomes, strict=True):
            expected = "dropped" if is_dropped_by_rule(mask, window, shape) else REJECTION
            assert found.startswith(expected), mask.astype(int)


CALL = ("has_mask", "drops_out", "key_heads", "groups", "enables_groups", "more_keys", "in_a_thread")
CALL_RULES = ("attn_mask is ", "dropout_p=", r"query has \d+ heads", r"query has \d+ rows")
ACCEPTED = "accepted"


def drawn_attention_calls(rng, n):
    seldom = [rng.random(n) < 0.15 for _ in range(3)]
    groups = rng.choice([1, 1, 2, 3], n)
    enables = rng.random(n) < np.where(groups > 1, 0.6, 0.3)
    # In lockstep another thread has no group to attend over, so there are only calls that are rejected before.
    is_wrong = seldom[0] | seldom[1] | seldom[2] | ((groups > 1) & ~enables)
    in_a_thread = is_wrong & (rng.random(n) < 0.5)
    return np.stack([seldom[0], seldom[1], rng.integers(1, 3, n), groups, enables, seldom[2], in_a_thread], 1)


def rule_of_call(has_mask, drops_out, key_heads, groups, enables_groups, more_keys, in_a_thread):
    """The rule that a call breaks first, or ACCEPTED."""
    broken = (has_mask, drops_out, groups > 1 and not enables_groups, more_keys)
    return next((rule for rule, is_broken in zip(CALL_RULES, broken, strict=True) if is_broken), ACCEPTED)


def in_a_thread(f):
    outcomes = []

    def body():
        try:
            outcomes.append((f(), None))
        except Exception as error:
            outcomes.append((None, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    value, error = outcomes[0]
    if error is not None:
        raise error
    return value


def verdict_on(size, call):
    """The rule that the message of a call names, or ACCEPTED."""
    of = dict(zip(CALL, call, strict=True))
    q = torch.zeros(1, of["key_heads"] * of["groups"], size, 4)
    k = torch.zeros(1, of["key_heads"], size + of["more_keys"], 4)
    options = {"enable_gqa": True} if of["enables_groups"] else {}
    options |= {"attn_mask": torch.ones(size, k.shape[2], dtype=torch.bool)} if of["has_mask"] else {}
    attend = lambda: F.scaled_dot_product_attention(q, k, k, dropout_p=0.5 * of["drops_out"], **options)  # noqa: E731
    try:
        out = in_a_thread(attend) if of["in_a_thread"] else attend()
    except ValueError as error:
        named = [rule for rule in CALL_RULES if re.match(f"context_parallel.sdpa: {rule}", str(error))]
        return named[0] if named else str(error)
    assert out.shape == q.shape
    return ACCEPTED


@settings(max_examples=few(20))
@given(SEEDS, st.booleans())
def test_calls_of_attention(rng, fused):
    """The rule that a call in a context breaks; after it none does; torch's fused kernels are off inside.

    The fused kernels of nn.MultiheadAttention would go by the context; after it they are as they were. On one rank,
    around which a ring sends nothing, since the kernels are a setting of the process. A thread without a context has
    the only one.
    """
    size, before, calls = 4, get_fastpath_enabled(), drawn_attention_calls(rng, 24).tolist()
    # After the context groups are always enabled, since torch, too, takes none without; and nothing is drawn.
    plain = [[has_mask, 0, heads, groups, 1, more, there] for has_mask, _, heads, groups, _, more, there in calls]

    def body(mesh, case):
        try:
            set_fastpath_enabled(fused)
            with create_context_parallel_ctx(mesh.device_mesh["cp"], [torch.zeros(size)], [0], set(), "alltoall"):
                kernels = [get_fastpath_enabled()]
                inside = [verdict_on(size, call) for call in calls]
            kernels.append(get_fastpath_enabled())
            return inside, [verdict_on(size, call) for call in plain], kernels
        finally:
            set_fastpath_enabled(before)

    ranks = run(body, CaseSpec(scheme="calls", mesh={"cp": 1}))
    ((inside, after, kernels),) = ranks.results
    for call, found in zip(calls, inside, strict=True):
        assert found == rule_of_call(*call), dict(zip(CALL, call, strict=True))
    assert after == [ACCEPTED] * len(plain)
    assert kernels == [False, fused]
    assert ranks.ledger.rows == []
