"""Parity of which masks and entries a dense batch takes, which rule the others break, and which buffers stay shards."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from shardproof import Cost, check_cases, drawn, integers, scheme
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
OTHER_SHAPE, NO_ROWS = 6, 7
SHAPES = ("of tokens", "longer", "pairs")


def drawn_masks(rng, shape):
    """Twice each entry: ones and padding on the right, a little over half of them with one that may not be."""
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


def masks_by_rule(ids, masks, shape):
    n, _, s = masks.shape
    column = jnp.arange(s)[None, None]
    is_one = masks != 0
    last = jnp.where(is_one, column, -1).max(-1)
    leading = jnp.where(is_one, column, s).min(-1)
    rows = [
        (masks < 0).any(-1),
        ((masks % 2 != 0) | (masks == INFINITE)).any(-1),
        (masks > 2).any(-1),
        (leading > 0) & (leading < s),
        last + 1 != is_one.sum(-1),
    ]
    violated = jnp.stack(rows, 1).reshape(n, -1)
    at, b = violated.argmax(-1), masks.shape[1]
    found = jnp.where(violated.any(-1)[:, None], jnp.stack([at // b + 1, at % b], -1), 0)
    if shape != "of tokens":
        found = 0 * found + jnp.array([[OTHER_SHAPE if shape == "longer" else NO_ROWS, 0]])
    padding = jnp.where((found[:, 0] == 0)[:, None, None], (masks == 0).astype(int), -1)
    return found.astype(ids.dtype), padding.astype(ids.dtype)


def batch_or_sentence(mesh, batch, **settings):
    """The padded batch before its context is entered, or why it is rejected."""
    try:
        return cp.make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch, **settings)[1]
    except (TypeError, ValueError) as error:
        if not str(error).startswith(FUNCTION):
            raise
        return str(error).removeprefix(FUNCTION)


@scheme(
    reference=masks_by_rule,
    mesh={"cp": (2,)},
    inputs={"ids": "b s", "masks": "n/cp b s"},
    outputs=("n/cp k", "n/cp b s"),
    dims={"b": (3, 2), "s": (8, 4), "n": (16,), "k": (2,)},
    draw={"ids": integers(0, 9), "masks": drawn(drawn_masks, integer=True)},
    options={"shape": SHAPES},
    cost=lambda c: Cost(),
)
def masks_of_a_dense_batch(mesh, ids, masks, shape) -> tuple[Int[Tensor, "n k"], Int[Tensor, "n b s"]]:
    """Which rule each mask breaks and in which row; the padding of those that are taken, else -1."""
    codes, paddings = [], []
    for twice in masks:
        mask = torch.where(twice == INFINITE, torch.inf, twice / 2)
        mask = {
            "of tokens": mask,
            "longer": mask[:, [*range(mask.shape[1]), -1]],
            "pairs": mask[:, None] * mask[..., None],
        }
        made = batch_or_sentence(mesh, {"input_ids": ids, "attention_mask": mask[shape]})
        if not isinstance(made, str):
            codes.append([0, 0])
            paddings.append(made["padding_mask"].long())
            continue
        paddings.append(torch.full_like(ids, -1))
        if made.startswith("attention_mask is"):
            codes.append([NO_ROWS if "under cp it is [b, s]" in made else OTHER_SHAPE, 0])
        else:
            (rule,) = (i for i, words in enumerate(MASK_RULES, 1) if words in made)
            codes.append([rule, int(re.match(r"attention_mask: row (\d+) ", made)[1])])
    return torch.tensor(codes).to(ids), torch.stack(paddings).to(ids)


# Of each call is drawn: the entry that is no tensor, of these or none; whether tokens are embeddings, and their dims;
# and which of two further sequence dims is given as another kind than an integer.
ENTRIES = ("labels", "loss_mask", "position_ids", "padding_mask", "attention_mask", "teacher", "name")
BY_TOKEN = len(ENTRIES) - 1
NOT_DIMS, FEWER_DIMS = 20, 30


def drawn_calls(rng, shape):
    n = shape[0]
    wrong = np.where(rng.random(n) < 0.5, len(ENTRIES), rng.integers(0, len(ENTRIES), n))
    embedded = rng.integers(0, 2, n)
    dims = np.where(rng.random(n) < 0.7, 2 + embedded, rng.integers(1, 4, n))
    return np.stack([wrong, embedded, dims, rng.random(n) < 0.2, rng.random(n) < 0.2], 1)


def calls_by_rule(calls):
    wrong, embedded, dims, first, second = (calls[:, i] for i in range(5))
    code = jnp.where(wrong < BY_TOKEN, wrong + 1, 0)
    code = jnp.where(dims < 2 + embedded, FEWER_DIMS + 2 + embedded, code)
    return jnp.where(first + second > 0, NOT_DIMS, code)


@scheme(
    reference=calls_by_rule,
    mesh={"cp": (2,)},
    inputs={"calls": "n/cp k"},
    outputs="n/cp",
    dims={"n": (40,), "k": (5,)},
    draw={"calls": drawn(drawn_calls, integer=True)},
    rank_options={"is_list": (True, False)},
    cost=lambda c: Cost(),
)
def entries_that_a_dense_batch_takes(mesh, calls, is_list) -> Int[Tensor, " n"]:
    """The entry that is no tensor, counted from 1; how many dims the tokens should have; 0 where a batch is taken."""
    codes = []
    for wrong, embedded, dims, first, second in calls.tolist():
        tokens = torch.ones((2, 4, 3)[:dims], dtype=torch.float32)
        batch = {"inputs_embeds" if embedded else "input_ids": tokens}
        batch |= {name: torch.ones(2, 4) for name in ENTRIES[:-2]} | {"position_ids": torch.arange(4).expand(2, 4)}
        batch |= {"teacher": torch.ones(4, 3), "student": torch.ones(4), "name": torch.ones(1)}
        batch |= {name: [[1]] if is_list else 1.0 for name in ENTRIES[wrong : wrong + 1]}
        seq_dims = {"teacher": "0" if first else 0, "student": 0.0 if second else 0}
        made = batch_or_sentence(mesh, batch, extra_seq_buffers=seq_dims)
        if not isinstance(made, str):
            codes.append(0)
        elif "pass a dict of the sequence's dim" in made:
            codes.append(NOT_DIMS)
        elif found := re.match(r"\w+ is \[.*\]; it is \[(.*?)\], one row", made):
            codes.append(FEWER_DIMS + len(found[1].split(",")))
        else:
            codes.append(ENTRIES.index(re.match(r"(\w+) is .*; pass a Tensor$", made)[1]) + 1)
    return torch.tensor(codes).to(calls)


def buffers_by_hand(ids, others, stays, refilled):
    """What is written inside is lost where a buffer is restored, and else remains and is added to."""
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
def buffers_of_a_context(mesh, ids, others, stays, refilled, negative) -> Buffers:
    """A context entered twice, of a buffer that is restored and one that may stay a shard, filled anew in between."""
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


SCHEMES = (masks_of_a_dense_batch, entries_that_a_dense_batch_takes, buffers_of_a_context)


@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared):
    check_cases(declared, 20)
