"""Parity of which masks a context drops, and of which calls its attention takes, in which thread and how long."""

import re
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn
from torch.backends.mha import get_fastpath_enabled, set_fastpath_enabled

from shardproof import Cost, check_cases, drawn, scheme
from torch_impl.context_parallel import adapt_model_to_context, create_context_parallel_ctx

SHAPES = ("square", "more keys", "fewer queries")


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


def drawn_pairs(rng, shape, case):
    """1 where a key is seen: the causal rule with padding on the right, half of the masks with one entry changed."""
    n, b, size, _ = shape
    real = np.where(rng.random((n, b)) < 0.5, size, rng.integers(0, size + 1, (n, b)))[..., None, None]
    place = np.arange(size)
    # A query of padding sees anything but itself.
    of_padding = (rng.random(shape) < 0.3) & (place[:, None] != place)
    seen = np.where(place[:, None] < real, causal_pairs(size, case.options["window"]), of_padding)
    for i in np.flatnonzero(rng.random(n) < 0.5):
        entry = i, rng.integers(0, b), rng.integers(0, size), rng.integers(0, size)
        seen[entry] = ~seen[entry]
    return seen.astype(np.int64)


def dropped_by_rule(seen, window, shape):
    """A mask of all keys is dropped if in each row some number of queries sees by the rule and no other sees itself."""
    n, _, size, _ = seen.shape
    if shape != "square":  # of another number of keys it is a shard's, and says nothing of the sequence
        return jnp.full((n,), int(shape == "more keys"), seen.dtype)
    is_ruled = ((seen > 0) == jnp.asarray(causal_pairs(size, window))[None, None]).all(-1)
    sees_itself = jnp.diagonal(seen, axis1=2, axis2=3) > 0
    fits = [is_ruled[..., :real].all(-1) & ~sees_itself[..., real:].any(-1) for real in range(size + 1)]
    return jnp.stack(fits).any(0).all(-1).astype(seen.dtype)


@scheme(
    reference=dropped_by_rule,
    mesh={"cp": (2,)},
    inputs={"seen": "n/cp b s keys"},
    outputs="n/cp",
    dims={"n": (24,), "b": (2, 3), "s": (4, 8), "keys": "s"},
    draw={"seen": drawn(drawn_pairs, integer=True)},
    options={"window": (None, 3), "shape": SHAPES},
    rank_options={"addends": (False, True)},
    cost=lambda c: Cost(),
)
def masks_that_a_context_drops(mesh, seen, window, shape, addends) -> Int[Tensor, " n"]:
    """1 where a mask is dropped in a context, 0 where it is rejected since attention would lose it."""
    size, model = seen.shape[-1], nn.ModuleDict({"own": Masked(window)})
    adapt_model_to_context(model)
    codes = []
    with create_context_parallel_ctx(mesh.device_mesh["cp"], [torch.zeros(size)], [0], set()):
        for pairs in seen[:, :, None] > 0:
            mask = torch.zeros(pairs.shape, device=pairs.device).masked_fill(~pairs, -torch.inf) if addends else pairs
            mask = {"square": mask, "more keys": F.pad(mask, (0, 1)), "fewer queries": mask[..., : size // 2, :]}[shape]
            try:
                codes.append(int(not model["own"](torch.zeros(1), mask)))
            except ValueError as error:
                if not str(error).startswith("context_parallel.adapt_model_to_context: own: attention_mask ["):
                    raise
                codes.append(0)
    return torch.tensor(codes).to(seen)


CALL = ("has_mask", "drops_out", "key_heads", "groups", "enables_groups", "more_keys", "in_a_thread")
CALL_RULES = ("attn_mask is ", "dropout_p=", r"query has \d+ heads", r"query has \d+ rows")


def drawn_attention_calls(rng, shape):
    n = shape[0]
    seldom = [rng.random(n) < 0.15 for _ in range(3)]
    groups = rng.choice([1, 1, 2, 3], n)
    enables = rng.random(n) < np.where(groups > 1, 0.6, 0.3)
    # In lockstep another thread has no group to attend over, so there are only calls that are rejected before.
    is_wrong = seldom[0] | seldom[1] | seldom[2] | ((groups > 1) & ~enables)
    in_a_thread = is_wrong & (rng.random(n) < 0.5)
    return np.stack([seldom[0], seldom[1], rng.integers(1, 3, n), groups, enables, seldom[2], in_a_thread], 1)


def calls_by_rule(calls, fused):
    has_mask, drops_out, _, groups, enables, more_keys, _ = (calls[:, i] for i in range(len(CALL)))
    violated = jnp.stack([has_mask > 0, drops_out > 0, (groups > 1) & (enables == 0), more_keys > 0], 1)
    inside = jnp.where(violated.any(1), violated.argmax(1) + 1, 0)
    # The fused kernels of nn.MultiheadAttention would go by the context; after it they are as they were.
    return inside.astype(calls.dtype), 0 * inside.astype(calls.dtype), jnp.asarray([0, int(fused)], calls.dtype)


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


def rule_of_call(size, call):
    """The rule that a call breaks, counted from 1; 0 where attention takes it."""
    of = dict(zip(CALL, call, strict=True))
    q = torch.zeros(1, of["key_heads"] * of["groups"], size, 4)
    k = torch.zeros(1, of["key_heads"], size + of["more_keys"], 4)
    options = {"enable_gqa": True} if of["enables_groups"] else {}
    options |= {"attn_mask": torch.ones(size, k.shape[2], dtype=torch.bool)} if of["has_mask"] else {}
    attend = lambda: F.scaled_dot_product_attention(q, k, k, dropout_p=0.5 * of["drops_out"], **options)  # noqa: E731
    try:
        out = in_a_thread(attend) if of["in_a_thread"] else attend()
    except ValueError as error:
        (rule,) = (
            i for i, words in enumerate(CALL_RULES, 1) if re.match("context_parallel.sdpa: " + words, str(error))
        )
        return rule
    assert out.shape == q.shape
    return 0


@scheme(
    reference=calls_by_rule,
    mesh={"cp": (1,)},
    inputs={"calls": "n/cp k"},
    outputs=("n/cp", "n/cp", "two"),
    dims={"n": (24,), "k": (len(CALL),), "two": (2,)},
    draw={"calls": drawn(drawn_attention_calls, integer=True)},
    options={"fused": (True, False)},
    cost=lambda c: Cost(),
)
def calls_of_attention(mesh, calls, fused) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"], Int[Tensor, "two"]]:
    """The rule that a call in a context breaks; after it none does; whether torch's fused kernels were on, and are.

    On one rank, around which a ring sends nothing, since the kernels are a setting of the process. A thread without a
    context has the only one.
    """
    size, before = 4, get_fastpath_enabled()
    # After the context groups are always enabled, since torch, too, takes none without; and nothing is drawn.
    plain = [
        [has_mask, 0, heads, groups, 1, more, there] for has_mask, _, heads, groups, _, more, there in calls.tolist()
    ]
    try:
        set_fastpath_enabled(fused)
        with create_context_parallel_ctx(mesh.device_mesh["cp"], [torch.zeros(size)], [0], set(), "alltoall"):
            settings = [get_fastpath_enabled()]
            inside = [rule_of_call(size, call) for call in calls.tolist()]
        settings.append(get_fastpath_enabled())
        after = [rule_of_call(size, call) for call in plain]
    finally:
        set_fastpath_enabled(before)
    return tuple(torch.tensor(each).to(calls) for each in (inside, after, settings))


SCHEMES = (masks_that_a_context_drops, calls_of_attention)


@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared):
    check_cases(declared, 20)
