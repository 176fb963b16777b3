"""Parity of log-softmax with its gradient, of full rows, of chosen columns, of the largest, and of a sum over ranks."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from jax_ref.vocab_parallel import argmax, columns, log_softmax, logprob, sequence
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.ignored_rows import SOME_IGNORED
from parity_tests.vocab_parallel.shard import owned_range
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp

WIDE_OUTPUTS = False
RANKS = {"tp": (1, 2, 3, 4)}
DTYPES = ("float32", "float64", "bfloat16", "float16")


def sums_over_tp(case):
    """Two numbers of each token, added up over tp in backward."""
    return {"all_reduce": (1, 2 * case.b * case.s * case.accumulator_itemsize)} if case.mesh["tp"] > 1 else {}


def widths(case):
    return over_tp(case, 1)[0], 8 * over_tp(case, 1)[0]


def full_rows_cost(case):
    """The log-softmax; then the widths, and the widest shard of the result."""
    several = case.mesh["tp"] > 1
    widest = max(case.layouts["v/tp"]["lengths"])
    rows = several, several * case.b * case.s * widest * case.itemsize
    return Cost(
        forward=all_gathers(over_tp(case, 2 * case.b * case.s), widths(case), rows), backward=sums_over_tp(case)
    )


LOG_SOFTMAX = dict(
    reference=log_softmax,
    mesh=RANKS,
    inputs={"logits": "b s v/tp:ragged"},
    dtypes=DTYPES,
    reduction=("v",),
    sums="float32",
)


@scheme(
    contract=vp.vocab_parallel_log_softmax,
    outputs="b s v/tp:ragged",
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 2 * c.b * c.s)), backward=sums_over_tp(c)),
    **LOG_SOFTMAX,
)
def log_softmax_with_gradient(mesh, logits):
    return vp.vocab_parallel_log_softmax(logits, mesh["tp"])


CERTAIN = math.log(0.9)  # far from the probabilities of equal columns, and of columns that differ by 1


def of_one_column(logits, target, at):
    if at == "target":
        return logprob(logits, target)
    log_p = log_softmax(logits)
    return jnp.where(log_p > CERTAIN, log_p, 0.0).sum(-1)


@scheme(
    reference=of_one_column,
    mesh=RANKS,
    inputs={"logits": "b s v/tp:ragged", "target": "b s"},
    outputs="b s tp=P",
    draw={"target": SOME_IGNORED, "logits": values("peaked", "normal", "peaked", "huge")},
    options={"at": ("certain", "target")},
    dtypes=("float32", "float64"),
    reduction=("v",),
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 2 * c.b * c.s)), backward=sums_over_tp(c)),
)
def column_of_log_softmax(mesh, logits, target, at):
    """A cotangent of one column: as its probability approaches 1, its gradient keeps the digits of 1 - p."""
    log_p = vp.vocab_parallel_log_softmax(logits, mesh["tp"])
    is_chosen = mesh.global_ids("v") == target.unsqueeze(-1) if at == "target" else log_p > CERTAIN
    return torch.where(is_chosen, log_p, 0.0).sum(-1)


@scheme(contract=vp.vocab_parallel_full_log_softmax, cost=full_rows_cost, **LOG_SOFTMAX)
def full_log_softmax(mesh, logits):
    return vp.vocab_parallel_full_log_softmax(logits, mesh["tp"])


@scheme(
    reference=columns,
    mesh=RANKS,
    contract=vp.vocab_parallel_gather_columns,
    inputs={"x": "b s v/tp:ragged", "ids": "k"},
    draw={"ids": SOME_IGNORED},
    dims={"k": (1, 2, 3, 8, 0)},
    rank_options={"counted": (False, True), "chunk_size": (None, 1, 5)},
    wide=True,
    dtypes=DTYPES,
    cost=lambda c: Cost(
        forward={
            "all_reduce": (1, c.b * c.s * c.k * c.accumulator_itemsize),
            **(all_gathers(widths(c)) if c.counted else {}),
        }
    ),
)
def gathered_columns(mesh, x, ids, counted, chunk_size):
    stated = {} if counted else dict(zip(("vocab_start_index", "vocab_end_index"), owned_range(mesh), strict=True))
    return vp.vocab_parallel_gather_columns(x, ids, mesh["tp"], chunk_size=chunk_size, **stated)


@scheme(
    reference=argmax,
    mesh=RANKS,
    contract=vp.vocab_parallel_argmax,
    inputs={"logits": "b s v/tp:ragged"},
    draw={"logits": values("normal", "ties", "neg_inf_mask", "zeros", "iota", "huge", "ties", "nan")},
    nograd=("logits",),
    rank_options={"counted": (False, True), "chunk_size": (None, 1, 5)},
    dtypes=DTYPES,
    cost=lambda c: Cost(
        forward=all_gathers(over_tp(c, 2 * c.b * c.s + 1), *([widths(c)] if c.counted else [])),
    ),
)
def largest_id(mesh, logits, counted, chunk_size) -> Int[Tensor, "b s"]:
    stated = {} if counted else dict(zip(("vocab_start_index", "vocab_end_index"), owned_range(mesh), strict=True))
    return vp.vocab_parallel_argmax(logits, mesh["tp"], chunk_size=chunk_size, **stated)


@scheme(
    reference=sequence,
    mesh=RANKS,
    contract=vp.group_all_reduce_sum,
    inputs={"x": "b s tp=P"},
    dtypes=DTYPES,
    sums="float32",
    cost=lambda c: Cost(forward={"all_reduce": (2, 2 * c.b * c.s * c.accumulator_itemsize)}),
)
def sum_over_a_group(mesh, x):
    """A sum with a gradient, beside one without."""
    assert not vp.group_all_reduce_sum(x, mesh["tp"]).requires_grad
    return vp.group_all_reduce_sum(x, mesh["tp"], with_grad=True)


SCHEMES = (
    log_softmax_with_gradient,
    column_of_log_softmax,
    full_log_softmax,
    gathered_columns,
    largest_id,
    sum_over_a_group,
)
test_parity = parity(SCHEMES, lockstep=40, gloo=5)


def on_two_ranks(body):
    return run(body, CaseSpec(scheme="columns", mesh={"tp": 2})).results


def test_a_sum_without_gradient_counts_and_leaves_its_argument_alone():
    def body(mesh, case):
        terms = torch.full((2,), 1 + mesh.rank("tp"))
        floats = torch.ones(2, requires_grad=True)
        total = vp.group_all_reduce_sum(floats, mesh["tp"])
        return vp.group_all_reduce_sum(terms, mesh["tp"]).tolist(), terms.tolist(), total.requires_grad

    (first, of_0, with_grad), (second, of_1, _) = on_two_ranks(body)
    assert (first, second, of_0, of_1, with_grad) == ([3, 3], [3, 3], [1, 1], [2, 2], False)


# Of bool it would be a logical or, and narrow integers wrap.
test_a_sum_that_would_not_fit_its_dtype_is_rejected = rejected(
    {"tp": 2},
    [
        (
            name,
            lambda mesh, name=name: vp.group_all_reduce_sum(torch.ones(2, dtype=getattr(torch, name)), mesh["tp"]),
            f"vocab_parallel.group_all_reduce_sum: tensor is {name}, in which a sum over ranks may not fit; "
            "pass tensor.long()",
        )
        for name in ("bool", "uint8", "int8", "int16", "uint32")
    ],
)


def test_a_column_that_is_all_but_certain_keeps_its_gradient():
    """At p = 1 - 1e-9 the gradient is 1 - p, which float32 has, although 1 - 1e-9 is 1 in it."""

    def body(mesh, case):
        logits = torch.tensor([[0.0, -20.7], [-30.0, -40.0]][mesh.rank("tp")]).view(1, 2).requires_grad_()
        cotangent = torch.tensor([[1.0, 0.0], [0.0, 0.0]][mesh.rank("tp")]).view(1, 2)
        (gradient,) = torch.autograd.grad(vp.vocab_parallel_log_softmax(logits, mesh["tp"]), logits, cotangent)
        return gradient.double().numpy()

    at_column = on_two_ranks(body)[0][0, 0]
    assert 0 < at_column < np.finfo(np.float32).eps


def test_no_rank_has_a_column():
    def body(mesh, case):
        with pytest.raises(ValueError) as caught:
            vp.vocab_parallel_argmax(torch.zeros(1, 2, 0), mesh["tp"])
        return str(caught.value)

    message = "vocab_parallel.vocab_parallel_argmax: no rank of tp has a column of the vocabulary; pass logits of one "
    assert on_two_ranks(body) == (message + "id or more",) * 2
