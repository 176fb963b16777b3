"""Parity of vocab_parallel.next_token."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.distributed.tensor import DTensor, Replicate, Shard

from jax_ref.vocab_parallel.next_token import next_token_logprob, next_token_logprob_of_stored
from parity_tests import Cost, check, every_case, ids, integers, scheme
from parity_tests.vocab_parallel.shard import owned_range
from torch_impl import vocab_parallel as vp

CUT = dict(
    mesh={"cp": (1, 2), "tp": (1, 2, 3, 4)},
    inputs={"logits": "b s/cp:dual_chunk_swap v/tp:ragged", "target": "b s"},
    outputs="b u tp=I cp=R",
    dims={"u": "s-1"},
    draw={"target": ids("v", ignore=-100)},
    options={"temperature": (1.0, 0.7)},
    rank_options={"chunk_size": (None, 1, 2, 5)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("v",),
)
STORED = dict(
    mesh={"cp": (1, 2, 3), "tp": (1, 2, 4)},
    outputs="b u tp=I cp=I",
    dims={"u": "s-1"},
    draw={"target": ids("v", ignore=-100), "keys": integers(0, 9)},
    options={"temperature": (1.0, 0.7)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("v",),
)


def ceil(size, world):
    """DTensor's blocks."""
    block = -(-size // world)
    return [np.arange(size)[rank * block : (rank + 1) * block] for rank in range(world)]


def over_cp(c):
    """Over tp the core's exchange; over cp the scores there and the cotangents back."""
    scores, size = c.b * c.s // c.cp, c.accumulator_itemsize
    return Cost(
        forward={"all_gather": (2, (3 * scores + scores) * size)},
        backward={"reduce_scatter": (1, c.b * c.s * size)},
    )


def over_cp_by_width(c):
    """The same, and one int64 for the widths of the shards."""
    calls, numbers = over_cp(c).forward["all_gather"]
    return Cost(forward={"all_gather": (calls + 1, numbers + 8)}, backward=over_cp(c).backward)


def in_stored_order(c):
    """Ids over cp, the core's exchange over tp, scores over cp; nothing backward."""
    n = c.b * c.s // c.cp
    return Cost(forward={"all_gather": (3, 8 * n + (3 * n + n) * c.accumulator_itemsize)})


def params(temperature):
    return SimpleNamespace(top_k=None, top_p=1.0, temperature=temperature)


@scheme(reference=next_token_logprob, cost=over_cp, **CUT)
def next_tokens(mesh, logits, target, temperature, chunk_size):
    return vp.from_parallel_logits_to_logprobs(
        logits,
        target,
        *owned_range(mesh),
        mesh["tp"],
        cp_group=mesh["cp"],
        chunk_size=chunk_size,
        sampling_params=params(temperature),
    )


@scheme(
    reference=next_token_logprob,
    cost=over_cp,
    **{**CUT, "inputs": {**CUT["inputs"], "target": "b n"}, "dims": {"n": "s-3", "u": "n-1"}},
)
def next_tokens_with_padding(mesh, logits, target, temperature, chunk_size):
    return vp.from_parallel_logits_to_logprobs(
        logits,
        target,
        *owned_range(mesh),
        mesh["tp"],
        cp_group=mesh["cp"],
        chunk_size=chunk_size,
        sampling_params=params(temperature),
    )


@scheme(reference=next_token_logprob, cost=over_cp_by_width, **CUT)
def next_tokens_by_group(mesh, logits, target, temperature, chunk_size):
    return vp.get_next_token_logprobs_from_logits(
        target,
        logits,
        vocab_parallel_rank=mesh.rank("tp"),
        vocab_parallel_group=mesh["tp"],
        context_parallel_group=mesh["cp"],
        sampling_params=params(temperature),
        chunk_size=chunk_size,
    )


def of_keys(logits, target, keys, temperature):
    return next_token_logprob_of_stored(logits, target, jnp.argsort(keys), temperature)


@scheme(
    reference=of_keys,
    inputs={"logits": "b s/cp v/tp:ragged", "target": "b s/cp", "keys": "s"},
    cost=in_stored_order,
    **STORED,
)
def stored_next_tokens(mesh, logits, target, keys, temperature):
    target = DTensor.from_local(target, mesh.device_mesh["cp"], [Shard(1)])
    return vp.dtensor_from_parallel_logits_to_logprobs(
        logits,
        target,
        *owned_range(mesh),
        mesh["tp"],
        seq_index=keys.argsort(stable=True),
        sampling_params=params(temperature),
    )


def of_keys_beside(logits, target, keys, beside, temperature):
    return of_keys(logits, target, keys, temperature)


@scheme(
    reference=of_keys_beside,
    inputs={"logits": "b s/cp v/tp:ceil", "target": "b s/cp", "keys": "s", "beside": "v"},
    layouts={"ceil": ceil},
    cost=in_stored_order,
    **{**STORED, "draw": {**STORED["draw"], "beside": integers(0, 1)}},
)
def next_tokens_of_a_dtensor(mesh, logits, target, keys, beside, temperature):
    b, s, v = len(logits), len(keys), len(beside)
    whole = dict(shape=torch.Size((b, s, v)), stride=(s * v, v, 1))
    return vp.get_logprobs_from_vocab_parallel_logits(
        DTensor.from_local(logits, mesh.device_mesh, [Shard(1), Shard(2)], **whole),
        DTensor.from_local(target, mesh.device_mesh, [Shard(1), Replicate()]),
        seq_index=keys.argsort(stable=True),
        sampling_params=params(temperature),
    )


SCHEMES = (next_tokens, next_tokens_with_padding, next_tokens_by_group, stored_next_tokens, next_tokens_of_a_dtensor)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared, engine):
    @settings(max_examples=20 if engine == "lockstep" else 4)
    @given(every_case(declared, engine=engine))
    def example(case):
        check(case)

    example()
