"""Parity of entropy and temperature on every route to next-token scores: groups, DTensor, packed, hidden states."""

from types import SimpleNamespace

import jax.numpy as jnp
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from jax_ref.vocab_parallel import (
    logits_of_hidden,
    negative_entropy,
    next_token_logprob,
    packed_next_token_negative_entropy,
)
from parity_tests.parity import parity
from parity_tests.rejections import check_rejection
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.ignored_rows import (
    SOME_IGNORED,
    is_dropped,
    is_dropped_as_stored,
    is_last_in_stream,
)
from parity_tests.vocab_parallel.shard import ceil, dtensor_of_shards, owned_range, wants_no_gradient
from parity_tests.vocab_parallel.test_linear_logprob import FLOATS
from parity_tests.vocab_parallel.test_packed import by_padded
from parity_tests.vocab_parallel.test_stored_order import stored_logprob
from shardproof import Cost, integers, offsets, scheme, values
from torch_impl import vocab_parallel as vp

COMMON = dict(
    options={"temperature": (1.0, 0.7)},
    rank_options={"chunk_size": (None, 2)},
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    reduction=("v",),
    roundings=3,  # log total, mean shifted logit, gradient
)
OVER_CP = ("b u tp=I cp=R", "b u tp=I cp=R")


def sampling(temperature):
    return SimpleNamespace(top_k=None, top_p=None, temperature=temperature)


def entropy_cost(c, tokens, widths=0):
    """Forward gathers four numbers per token over tp and two over cp; backward scatters the cotangents of those two."""
    size = c.accumulator_itemsize
    several = c.mesh["tp"] > 1
    return Cost(
        forward=all_gathers(
            over_tp(c, 4 * tokens // c.cp),
            (several and widths, several * widths * 8),
            over_cp=[(1, 2 * tokens // c.cp * size)],
        ),
        backward={"reduce_scatter/cp": (1, 2 * tokens * size)},
    )


def next_tokens(logits, target, temperature):
    return (
        next_token_logprob(logits, target, temperature),
        negative_entropy(logits[:, : max(target.shape[1] - 1, 0)], temperature),
    )


GROUPS = dict(
    reference=next_tokens,
    mesh={"cp": (1, 2), "tp": (1, 2, 3)},
    inputs={"logits": "b s/cp:dual_chunk_swap v/tp:ragged", "target": "b n"},
    outputs=OVER_CP,
    dims={"n": "s-1", "u": "n-1", "v": (8, 5, 13)},
    draw={"target": SOME_IGNORED, "logits": values(nan_rows=is_dropped)},
)


@scheme(contract=vp.from_parallel_logits_to_logprobs, cost=lambda c: entropy_cost(c, c.b * c.s), **GROUPS, **COMMON)
def entropy_of_groups(mesh, logits, target, temperature, chunk_size):
    return vp.from_parallel_logits_to_logprobs(
        logits,
        target,
        *owned_range(mesh),
        mesh["tp"],
        cp_group=mesh["cp"],
        chunk_size=chunk_size,
        sampling_params=sampling(temperature),
        inference_only=wants_no_gradient(),
        with_entropy=True,
    )


@scheme(
    contract=vp.get_next_token_logprobs_from_logits,
    cost=lambda c: entropy_cost(c, c.b * c.s, widths=1),
    **GROUPS,
    **COMMON,
)
def entropy_by_rank(mesh, logits, target, temperature, chunk_size):
    return vp.get_next_token_logprobs_from_logits(
        target,
        logits,
        vocab_parallel_rank=mesh.rank("tp"),
        vocab_parallel_group=mesh["tp"],
        context_parallel_group=mesh["cp"],
        sampling_params=sampling(temperature),
        chunk_size=chunk_size,
        with_entropy=True,
    )


def next_tokens_as_stored(logits, target, keys, columns, temperature):
    in_order = logits[:, jnp.argsort(jnp.argsort(keys))]
    return stored_logprob(logits, target, keys, columns, temperature), negative_entropy(in_order[:, :-1], temperature)


@scheme(
    reference=next_tokens_as_stored,
    mesh={"cp": (1, 2, 3), "tp": (1, 2)},
    contract=vp.get_logprobs_from_vocab_parallel_logits,
    inputs={"logits": "b s/cp v/tp:ceil", "target": "b s/cp", "keys": "s", "columns": "v"},
    outputs=("b u tp=I cp=I", "b u tp=I cp=I"),
    layouts={"ceil": ceil},
    dims={"u": "s-1", "v": (8, 4, 12)},
    draw={
        "target": SOME_IGNORED,
        "logits": values(nan_rows=is_dropped_as_stored),
        "keys": integers(0, 9),
        "columns": integers(0, 0),
    },
    cost=lambda c: Cost(
        forward=all_gathers(
            over_tp(c, 4 * c.b * c.s // c.cp),
            over_cp=[(1, 8 * c.b * c.s // c.cp), (1, 2 * c.b * c.s // c.cp * c.accumulator_itemsize)],
        )
    ),
    excluded_conditions=("inference_mode", "int32"),  # ids are sent in their dtype; the cost counts 8 bytes each
    **COMMON,
)
def entropy_of_a_dtensor(mesh, logits, target, keys, columns, temperature, chunk_size):
    return vp.get_logprobs_from_vocab_parallel_logits(
        dtensor_of_shards(mesh, logits, len(keys), len(columns)),
        DTensor.from_local(target, mesh.device_mesh, [Shard(1), Replicate()]),
        seq_index=keys.argsort(stable=True),
        chunk_size=chunk_size,
        sampling_params=sampling(temperature),
        with_entropy=True,
    )


def packed_next_tokens(logits, target, padded, real, columns, temperature):
    entropies = packed_next_token_negative_entropy(logits, padded[:-1], jnp.diff(padded), len(columns) + 1, temperature)
    return by_padded(logits, target, padded, real, columns, temperature), entropies


@scheme(
    reference=packed_next_tokens,
    mesh={"cp": (1, 2), "tp": (1, 2)},
    contract=vp.from_parallel_logits_to_logprobs_packed_sequences,
    inputs={"logits": "1 t/cp:packed v/tp:ragged", "target": "1 t", "padded": "n", "real": "n", "columns": "u"},
    outputs=OVER_CP,
    dims={"b": "n-1", "n": (4, 6, 3), "t": (24, 40, 16), "u": (5, 9, 2), "v": (8, 5, 13)},
    draw={
        "target": SOME_IGNORED,
        "logits": values(nan_rows=is_last_in_stream("padded")),
        "padded": offsets("t", padded=True),
        "real": offsets("t"),
        "columns": integers(0, 0),
    },
    cost=lambda c: entropy_cost(c, c.t),
    **COMMON,
)
def entropy_of_packed(mesh, logits, target, padded, real, columns, temperature, chunk_size):
    return vp.from_parallel_logits_to_logprobs_packed_sequences(
        logits,
        target,
        padded,
        len(columns) + 1,
        *owned_range(mesh),
        mesh["tp"],
        cp_group=mesh["cp"],
        chunk_size=chunk_size,
        sampling_params=sampling(temperature),
        with_entropy=True,
    )


def hidden_next_tokens(hidden, weight, target, temperature):
    return next_tokens(logits_of_hidden(hidden, weight), target, temperature)


@scheme(
    reference=hidden_next_tokens,
    mesh={"cp": (1, 2), "tp": (1, 2, 4)},
    contract=vp.from_parallel_hidden_states_to_logprobs,
    inputs={"hidden": "s/cp:dual_chunk_swap b d tp=I", "weight": "v/tp:ragged d cp=R", "target": "b s"},
    outputs=OVER_CP,
    dims={"v": (8, 5, 13), "d": (3, 5), "u": "s-1"},
    draw={"hidden": FLOATS, "weight": FLOATS, "target": SOME_IGNORED},
    cost=lambda c: Cost(
        forward=entropy_cost(c, c.b * c.s).forward,
        backward={
            "all_reduce/tp": (1, c.b * c.s // c.cp * c.d * c.accumulator_itemsize),
            **entropy_cost(c, c.b * c.s).backward,
        },
    ),
    **{**COMMON, "reduction": ("v", "d"), "roundings": 5, "sums": None},
)
def entropy_of_hidden_states(mesh, hidden, weight, target, temperature, chunk_size):
    return vp.from_parallel_hidden_states_to_logprobs(
        hidden,
        weight,
        None,
        False,
        target,
        *owned_range(mesh),
        mesh["tp"],
        cp_group=mesh["cp"],
        chunk_size=chunk_size,
        temperature=temperature,
        inference_only=wants_no_gradient(),
        with_entropy=True,
    )


SCHEMES = (
    entropy_of_groups,
    entropy_by_rank,
    entropy_of_a_dtensor,
    entropy_of_packed,
    entropy_of_hidden_states,
)
test_parity = parity(SCHEMES, lockstep=20, gloo=4)


def test_an_entropy_beside_a_filter_is_rejected():
    def call(mesh):
        logits, target = torch.zeros(1, 4, 4), torch.zeros(1, 4, dtype=torch.int64)
        filtered = vp.TrainingSamplingParams(top_k=2)
        vp.get_next_token_logprobs_from_logits(target, logits, sampling_params=filtered, with_entropy=True)

    message = (
        "vocab_parallel.get_next_token_logprobs_from_logits: with_entropy=True but top_k=2, top_p=1.0, min_p=None "
        "filter the vocabulary; ask for the entropy in a call without a filter"
    )
    check_rejection({"tp": 1}, "entropy", call, message)
