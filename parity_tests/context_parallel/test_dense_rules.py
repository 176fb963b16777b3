"""Masks and entries of a dense batch: accepted ones, and the rules that others break; parity of a context's buffers."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Int
from torch import Tensor

from shardproof import CaseSpec, Cost, integers, scheme
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl import context_parallel as cp

FUNCTION = "context_parallel.batch: "
INFINITE = 99
MASK_RULES = (
    "has a negative entry",
    "has an entry other than 0 and 1",
    "an id of packed sequences",
    "left padding is lost",
    "holes are lost",
)
SHAPES = {  # a mask's shape: its message; masks of tokens follow MASK_RULES instead
    "of tokens": "",
    "longer": r"attention_mask is \[(?!.*under cp it is \[b, s\])",
    "pairs": r"attention_mask is \[.*under cp it is \[b, s\]",
}
SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def drawn_masks(rng, shape):
    """Masks times two: ones, then padding; a little over half have a row or an entry that may break a rule."""
    n, b, s = shape
    real = rng.integers(0, s + 1, (n, b, 1)) * (rng.random((n, b, 1)) < 0.8)
    masks = np.where(np.arange(s) < real, 2, 0)
    for i in np.flatnonzero(rng.random(n) < 0.6):
        row = masks[i, rng.integers(0, b)]
        if rng.random() < 0.4:  # padding on the left
            row[:] = row[::-1].copy()
        else:
            row[rng.integers(0, s)] = rng.choice([0, 0, 2, 1, 3, -1, -2, 4, 6, INFINITE])
    return masks


def first_broken_rule(mask):
    """The first rule that a mask breaks, and the first row that breaks it; None if it breaks none."""
    column, is_one = np.arange(mask.shape[-1]), mask != 0
    last = np.where(is_one, column, -1).max(-1)
    leading = np.where(is_one, column, mask.shape[-1]).min(-1)
    violated = [
        (mask < 0).any(-1),
        ((mask % 2 != 0) | (mask == INFINITE)).any(-1),
        (mask > 2).any(-1),
        (leading > 0) & (leading < mask.shape[-1]),
        last + 1 != is_one.sum(-1),
    ]
    found = [(rule, int(rows.argmax())) for rule, rows in zip(MASK_RULES, violated, strict=True) if rows.any()]
    return found[0] if found else None


def batch_or_sentence(mesh, batch, **settings):
    """The padded batch before its context is entered, or the sentence of its rejection."""
    try:
        return cp.make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch, **settings)[1]
    except (TypeError, ValueError) as error:
        if not str(error).startswith(FUNCTION):
            raise
        return str(error).removeprefix(FUNCTION)


@settings(max_examples=few(20))
@given(SEEDS, st.tuples(st.sampled_from((3, 2)), st.sampled_from((8, 4))), st.sampled_from(tuple(SHAPES)))
def test_masks_of_a_dense_batch(rng, sizes, shape):
    """A rejection names the broken rule and the row; an accepted mask gives the padding."""
    masks, ids = drawn_masks(rng, (8, *sizes)), torch.ones(sizes, dtype=torch.int64)

    def of_tokens(twice):
        return torch.where(twice == INFINITE, torch.inf, twice / 2)

    def body(mesh, case):
        outcomes = []
        for mask in map(of_tokens, torch.from_numpy(masks)):
            longer = mask[:, [*range(mask.shape[1]), -1]]
            forms = {"of tokens": mask, "longer": longer, "pairs": mask[:, None] * mask[..., None]}
            made = batch_or_sentence(mesh, {"input_ids": ids, "attention_mask": forms[shape]})
            outcomes.append(made if isinstance(made, str) else made["padding_mask"].tolist())
        return outcomes

    ranks = run(body, CaseSpec(scheme="masks", mesh={"cp": 2}))
    assert ranks.ledger.rows == []
    for outcomes in ranks.results:
        for mask, found in zip(masks, outcomes, strict=True):
            broken = first_broken_rule(mask)
            if shape != "of tokens":
                assert re.match(SHAPES[shape], found)
            elif broken is None:
                assert found == (mask == 0).tolist(), mask
            else:
                rule, row = broken
                assert found.startswith(f"attention_mask: row {row} ") and rule in found, mask


# A drawn call: the entry that is not a tensor, one of these or none; whether tokens are embeddings, and their number of
# dims; and for each of two more sequence dims, whether it is something else than an integer.
ENTRIES = ("labels", "loss_mask", "position_ids", "padding_mask", "attention_mask", "teacher", "name")
BY_TOKEN = len(ENTRIES) - 1
ACCEPTED = "accepted"


def drawn_calls(rng, n):
    wrong = np.where(rng.random(n) < 0.5, len(ENTRIES), rng.integers(0, len(ENTRIES), n))
    embedded = rng.integers(0, 2, n)
    dims = np.where(rng.random(n) < 0.7, 2 + embedded, rng.integers(1, 4, n))
    return np.stack([wrong, embedded, dims, rng.random(n) < 0.2, rng.random(n) < 0.2], 1)


def expected_message(wrong, embedded, dims, first, second):
    """The pattern of a call's message."""
    if first or second:
        return ".*pass a dict of the sequence's dim"
    if dims < 2 + embedded:
        names = ", ".join(["[^],]+"] * (2 + embedded))
        return rf"\w+ is \[.*\]; it is \[{names}\], one row"
    return rf"{ENTRIES[wrong]} is .*; pass a Tensor$" if wrong < BY_TOKEN else ACCEPTED


@settings(max_examples=few(20))
@given(SEEDS, st.booleans())
def test_entries_that_a_dense_batch_takes(rng, is_list):
    """A rejection names the entry that is not a tensor, or the dims that the tokens must have."""
    calls = drawn_calls(rng, 20).tolist()

    def made(mesh, wrong, embedded, dims, first, second):
        tokens = torch.ones((2, 4, 3)[:dims], dtype=torch.float32)
        batch = {"inputs_embeds" if embedded else "input_ids": tokens}
        batch |= {name: torch.ones(2, 4) for name in ENTRIES[:-2]} | {"position_ids": torch.arange(4).expand(2, 4)}
        batch |= {"teacher": torch.ones(4, 3), "student": torch.ones(4), "name": torch.ones(1)}
        batch |= {name: [[1]] if is_list else 1.0 for name in ENTRIES[wrong : wrong + 1]}
        seq_dims = {"teacher": "0" if first else 0, "student": 0.0 if second else 0}
        outcome = batch_or_sentence(mesh, batch, extra_seq_buffers=seq_dims)
        return outcome if isinstance(outcome, str) else ACCEPTED

    ranks = run(lambda mesh, case: [made(mesh, *call) for call in calls], CaseSpec(scheme="entries", mesh={"cp": 2}))
    assert ranks.ledger.rows == []
    for found in ranks.results:
        for call, sentence in zip(calls, found, strict=True):
            assert re.match(expected_message(*call), sentence), (call, sentence)


def buffers_by_hand(ids, others, stays, refilled):
    """Values written inside are lost if a buffer is restored; else they remain, and the next entry adds to them."""
    kept = ids + 10 if stays else ids
    second = others if refilled else kept
    return jnp.stack([ids, ids]), jnp.stack([ids, second]), ids, second + 10 if stays else second


Buffers = tuple[Int[Tensor, "k b l"], Int[Tensor, "k b l"], Int[Tensor, "b s"], Int[Tensor, "b l"]]


@scheme(
    reference=buffers_by_hand,
    mesh={"cp": (2, 3)},
    inputs={"ids": "b s", "others": "b s"},
    outputs=("k b s/cp:dual_chunk_swap", "k b s/cp:dual_chunk_swap", "b s", "b s/cp:dual_chunk_swap"),
    dims={"b": (2, 1), "s": (12, 24), "k": (2,)},
    draw={"ids": integers(0, 9), "others": integers(0, 9)},
    options={"stays": (True, False), "refilled": (False, True)},
    rank_options={"negative": (False, True)},
    cost=lambda c: Cost(),
)
@pytest.mark.cases(20)
def buffers_of_a_context(mesh, ids, others, stays, refilled, negative) -> Buffers:
    """A context entered twice, with a restored buffer, and one that may stay a shard and be refilled in between."""
    restored, kept = ids.clone(), ids.clone()
    group, unrestored = mesh.device_mesh["cp"], {kept} if stays else set()
    context = cp.create_context_parallel_ctx(group, [restored, kept], [1, -1 if negative else 1], unrestored)
    seen = []
    for step in range(2):
        if step and refilled:
            kept.data = others.clone()
        with context as entered:
            seen.append(torch.stack([restored, kept]))
            restored.add_(10)
            kept.add_(10)
    after = kept if stays else entered.layout.shard(kept, 1)
    (first, second), (third, fourth) = seen[0], seen[1]
    return torch.stack([first, third]), torch.stack([second, fourth]), restored, after
