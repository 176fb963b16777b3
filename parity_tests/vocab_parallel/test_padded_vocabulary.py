"""Parity of a vocabulary with padding: a rank has columns past its range, which are in the softmax and are no ids."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from jax_ref.vocab_parallel import (
    gather_logprob,
    linear_logprob,
    logits_at,
    logprob_and_negative_entropy,
    sampled_logprob,
    topk,
)
from parity_tests.parity import parity
from parity_tests.vocab_parallel.decided_rows import decided_rows
from parity_tests.vocab_parallel.ignored_rows import SOME_IGNORED
from parity_tests.vocab_parallel.shard import group_of_several, wants_no_gradient
from parity_tests.vocab_parallel.test_linear_logprob import FLOATS
from shardproof import integers, scheme, values
from torch_impl import vocab_parallel as vp


def id_count(columns):
    """The number of ids; the other columns, a third of them, are padding."""
    return columns - columns // 3


def padded(size, world):
    """Each rank's ids, followed by its columns of padding; a rank with more ids than another has less padding."""
    ids = np.array_split(np.arange(id_count(size)), world)
    padding = np.array_split(np.arange(id_count(size), size), world)
    return [np.concatenate(parts) for parts in zip(ids, reversed(padding), strict=True)]


def stated(mesh, columns):
    """The range of this rank's ids, which are the first of its columns."""
    ids = [each for each in mesh.global_ids("v").tolist() if each < id_count(len(columns))]
    start, end = (ids[0], ids[-1] + 1) if ids else (0, 0)
    return {"vocab_start_index": start, "vocab_end_index": end}


def of_ids(ids, columns):
    """The ids, with -1 for the number of a column of padding, which is no id."""
    return jnp.where(ids < id_count(len(columns)), ids, -1)


DECLARED = dict(
    mesh={"tp": (1, 2, 3, 4)},
    layouts={"padded": padded},
    dims={"v": (8, 5, 13, 3)},
    dtypes=("float32", "float64", "bfloat16"),
    sums="float32",
    reduction=("v",),
)
LOGITS = {"logits": "b s v/tp:padded", "target": "b s", "columns": "v"}
IDS = {"target": SOME_IGNORED, "columns": integers(0, 0)}  # the number of columns


def scored(logits, target, columns, temperature):
    return logprob_and_negative_entropy(logits, of_ids(target, columns), temperature)


@scheme(
    contract=vp.vocab_parallel_logprob,
    reference=scored,
    inputs=LOGITS,
    outputs=("b s tp=I", "b s tp=I"),
    draw=IDS,
    options={"temperature": (1.0, 0.7)},
    rank_options={"chunk_size": (None, 1)},
    roundings=3,  # log total, mean shifted logit, gradient
    **{**DECLARED, "dtypes": ("float32", "bfloat16")},  # in float64 the reference's slope has no more digits than ours
)
def logprob_beside_padding(mesh, logits, target, columns, temperature, chunk_size):
    options = dict(temperature=temperature, chunk_size=chunk_size, with_entropy=True)
    return vp.vocab_parallel_logprob(logits, target, mesh["tp"], **stated(mesh, columns), **options)


def sampled(logits, target, columns, top_k, top_p, temperature, min_p):
    return sampled_logprob(logits, of_ids(target, columns), top_k, top_p, temperature, min_p)


@scheme(
    contract=vp.ChunkedDistributedLogprobWithSampling,
    reference=sampled,
    inputs=LOGITS,
    outputs="b s tp=I",
    draw={**IDS, "logits": decided_rows()},
    options={
        "top_k": (3, None),
        "top_p": (0.75, 1.0, 0.0, None),
        "temperature": (1.0, 0.5),
        "min_p": (None, 0.05, 0.0),
    },
    rank_options={"chunk_size": (None, 1)},
    roundings=2,  # log total, gradient
    **DECLARED,
)
def sampling_beside_padding(mesh, logits, target, columns, top_k, top_p, temperature, min_p, chunk_size):
    start, end = stated(mesh, columns).values()
    return vp.ChunkedDistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, chunk_size, wants_no_gradient(), temperature, start, end, min_p
    )


def scores_at(logits, target, columns):
    return gather_logprob(logits, of_ids(target, columns))


def values_at(logits, target, columns):
    return logits_at(logits, of_ids(target, columns))


SEVERAL_IDS = dict(
    inputs={**LOGITS, "target": "b s k"},
    outputs="b s k tp=I",
    draw=IDS,
    rank_options={"chunk_size": (None, 1)},
    **{**DECLARED, "dims": {**DECLARED["dims"], "k": (2, 8, 1)}},
)


@scheme(contract=vp.ChunkedDistributedGatherLogprob, reference=scores_at, **SEVERAL_IDS)
def scores_beside_padding(mesh, logits, target, columns, chunk_size):
    owned = stated(mesh, columns).values()
    return vp.ChunkedDistributedGatherLogprob.apply(logits, target, *owned, chunk_size, mesh["tp"])


@scheme(contract=vp.gather_logits_at_global_indices, reference=values_at, **SEVERAL_IDS)
def values_beside_padding(mesh, logits, target, columns, chunk_size):
    owned = stated(mesh, columns)
    return vp.gather_logits_at_global_indices(
        logits, target, group_of_several(mesh, "tp"), chunk_size=chunk_size, **owned
    )


def largest(logits, each, columns):
    values_, ids = topk(logits[..., : id_count(len(columns))], len(each))
    return values_, ids, ids[..., 0]


@scheme(
    reference=largest,
    inputs={"logits": "b s v/tp:padded", "each": "k", "columns": "v"},
    outputs=("b s k tp=I", "b s k", "b s"),
    draw={
        "logits": values("normal", "ties", "neg_inf_mask", "iota", "large", "nan"),
        "each": integers(0, 0),  # carries k, a dim of the results
        "columns": integers(0, 0),
    },
    nograd=("logits",),
    ties="ordered",
    **{**DECLARED, "dims": {"k": (2, 1, 4), "v": (8, 6, 13)}},
)
def largest_beside_padding(
    mesh, logits, each, columns
) -> tuple[Float[Tensor, "b s k"], Int[Tensor, "b s k"], Int[Tensor, "b s"]]:
    owned = stated(mesh, columns)
    largest_ids = vp.vocab_parallel_argmax(logits, mesh["tp"], **owned)
    return (*vp.distributed_vocab_topk(logits, len(each), mesh["tp"], **owned), largest_ids)


def of_hidden(hidden, weight, target, columns):
    return linear_logprob(hidden, weight, of_ids(target, columns))


@scheme(
    contract=vp.ChunkedDistributedHiddenStatesToLogprobs,
    reference=of_hidden,
    inputs={"hidden": "s b d tp=I", "weight": "v/tp:padded d", "target": "b s", "columns": "v"},
    outputs="b s tp=I",
    draw={**IDS, "hidden": FLOATS, "weight": FLOATS},
    rank_options={"chunk_size": (None, 1, 3)},
    roundings=4,  # logits, d logits, this rank's term of d hidden, the result
    **{
        **{name: value for name, value in DECLARED.items() if name != "sums"},  # products run in the dtype
        "dims": {**DECLARED["dims"], "d": (3, 5, 40)},
        "reduction": ("v", "d"),
    },
)
def hidden_states_beside_padding(mesh, hidden, weight, target, columns, chunk_size):
    owned = stated(mesh, columns).values()
    return vp.ChunkedDistributedHiddenStatesToLogprobs.apply(hidden, target, weight, *owned, chunk_size, mesh["tp"])


SCHEMES = (
    logprob_beside_padding,
    sampling_beside_padding,
    scores_beside_padding,
    values_beside_padding,
    largest_beside_padding,
    hidden_states_beside_padding,
)


test_parity = parity(SCHEMES, lockstep=12, gloo=3)
