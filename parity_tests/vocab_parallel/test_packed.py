"""Parity of vocab_parallel.packed."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings

from jax_ref.layouts import dual_chunk_swap
from jax_ref.vocab_parallel.packed import packed_next_token_logprob
from parity_tests import Cost, check, every_case, ids, integers, offsets, scheme
from parity_tests.vocab_parallel.shard import owned_range
from torch_impl import vocab_parallel as vp

DECLARED = dict(
    mesh={"cp": (1, 2), "tp": (1, 2, 4)},
    outputs="b u tp=I cp=R",
    dims={"b": "n-1", "n": (3, 5)},
    draw={
        "target": ids("v", ignore=-100),
        "padded": offsets("t", padded=True),
        "true": offsets("t"),
        "columns": integers(0, 0),
    },
    options={"temperature": (1.0, 0.7)},
    rank_options={"chunk_size": (None, 1, 5)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("v",),
    cost=lambda c: Cost(
        forward={"all_gather": (2, (3 + 1) * c.t // c.cp * c.accumulator_itemsize)},
        backward={"reduce_scatter": (1, c.t * c.accumulator_itemsize)},
    ),
)
INPUTS = {"logits": "1 t/cp:packed v/tp:ragged", "target": "1 t", "padded": "n", "true": "n", "columns": "u"}


def scored(mesh, logits, target, padded, columns, temperature, chunk_size, **further):
    return vp.from_parallel_logits_to_logprobs_packed_sequences(
        logits,
        target,
        padded,
        len(columns) + 1,
        *owned_range(mesh),
        mesh["tp"],
        cp_group=mesh["cp"],
        chunk_size=chunk_size,
        sampling_params=SimpleNamespace(top_k=None, top_p=1.0, temperature=temperature),
        **further,
    )


def by_padded(logits, target, padded, true, columns, temperature):
    return packed_next_token_logprob(
        logits, target, padded[:-1], jnp.diff(padded), len(columns) + 1, temperature=temperature
    )


def by_true(logits, target, padded, true, columns, temperature):
    return packed_next_token_logprob(
        logits, target, padded[:-1], jnp.diff(true), len(columns) + 1, temperature=temperature
    )


@scheme(reference=by_padded, inputs=INPUTS, **DECLARED)
def packed_next_tokens(mesh, logits, target, padded, true, columns, temperature, chunk_size):
    return scored(mesh, logits, target, padded, columns, temperature, chunk_size)


@scheme(reference=by_true, inputs=INPUTS, **DECLARED)
def packed_next_tokens_of_true_lengths(mesh, logits, target, padded, true, columns, temperature, chunk_size):
    return scored(mesh, logits, target, padded, columns, temperature, chunk_size, cu_seqlens=true)


def rolled_and_cut(target, padded, cp, rank):
    """As a data loader would: each sequence rolled in itself, this rank's share of it, one sequence after another."""
    pieces = [target[:, :0]]
    for start, stop in zip(padded[:-1].tolist(), padded[1:].tolist(), strict=True):
        sequence = target[:, start:stop].roll(-1, dims=1)
        pieces.append(sequence[:, dual_chunk_swap(stop - start, cp)[rank]])
    return torch.cat(pieces, dim=1)


@scheme(reference=by_padded, inputs=INPUTS, **DECLARED)
def packed_next_tokens_rolled_before(mesh, logits, target, padded, true, columns, temperature, chunk_size):
    own = rolled_and_cut(target, padded, mesh.size("cp"), mesh.rank("cp"))
    return scored(mesh, logits, own, padded, columns, temperature, chunk_size, target_is_pre_rolled=True)


SCHEMES = (packed_next_tokens, packed_next_tokens_of_true_lengths, packed_next_tokens_rolled_before)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared, engine):
    @settings(max_examples=20 if engine == "lockstep" else 4)
    @given(every_case(declared, engine=engine))
    def example(case):
        check(case)

    example()
