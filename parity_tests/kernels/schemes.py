"""Functions of production that run on kernels, as schemes: in Triton's interpreter, whose tensors are on the CPU.

They stand in no test file, since only a process of that interpreter can run them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from jax_ref.vocab_parallel import gather_logprob, logprob, logprob_and_negative_entropy
from parity_tests.kernels import device as device  # rounds as a GPU does
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.shard import owned_range
from shardproof import Cost, ids, scheme, values
from torch_impl.kernels.softmax import local_statistics, write_gradient
from torch_impl.vocab_parallel import fused_logprob, vocab_parallel_logprob
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.fused_logprob import EntropyCotangent, id_cotangents

KINDS = values("peaked", "neg_inf_mask", "normal", "ties", "huge")
STEP = 2  # columns: a row of five has three blocks
DECLARED: dict[str, Any] = dict(
    mesh={"tp": (1, 2, 3)},
    inputs={"logits": "b s v/tp:ragged", "target": "b s"},
    draw={"target": ids("v", ignore=-100)},
    dims={"b": (1, 2), "s": (1, 2, 3), "v": (4, 7, 12, 1)},  # the interpreter takes milliseconds a program
    options={"temperature": (0.7, 1.0)},
    reduction=("v",),
    engines=("lockstep",),  # the interpreter is this process's
)


def one_exchange(numbers):
    """One all_gather of so many numbers per token forward, nothing backward."""
    return lambda c: Cost(forward=all_gathers(over_tp(c, numbers * c.b * c.s)))


@scheme(
    contract=vocab_parallel_logprob,
    reference=logprob,
    dtypes=("float32", "float64", "bfloat16", "float16"),
    cost=one_exchange(3),
    **DECLARED,
)
def triton_logprob(mesh, logits, target, temperature):
    return _logprob(mesh, logits, target, temperature, False)


@scheme(
    contract=vocab_parallel_logprob,
    reference=logprob_and_negative_entropy,
    outputs=("b s tp=I", "b s tp=I"),
    dtypes=("float32", "bfloat16"),
    roundings=3,  # log total, mean shifted logit, gradient
    cost=one_exchange(4),
    **DECLARED,
)
def triton_logprob_with_entropy(mesh, logits, target, temperature):
    return _logprob(mesh, logits, target, temperature, True)


def _logprob(mesh, logits, target, temperature, with_entropy):
    start, end = owned_range(mesh)
    owned = dict(vocab_start_index=start, vocab_end_index=end)
    options = dict(temperature=temperature, with_entropy=with_entropy, backend="triton")
    return vocab_parallel_logprob(logits, target, mesh["tp"], **owned, **options)


@scheme(
    reference=gather_logprob,
    outputs="b s k tp=I",
    dtypes=("float32", "float64", "bfloat16"),
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, (2 + c.k) * c.b * c.s))),
    **{
        **DECLARED,
        "inputs": {"logits": "b s v/tp:ragged", "ids": "b s k"},
        "draw": {"ids": ids("v", ignore=-100), "logits": KINDS},
        "dims": {**DECLARED["dims"], "k": (2, 3, 1, 8, 0)},
        "options": {},
    },
)
def triton_gather_logprob(mesh, logits, ids):
    options = fused_logprob.LogprobOptions(mesh["tp"], *owned_range(mesh), has_id_dim=True, backend="triton")
    return _GatherLogprob.apply(logits, ids, options)


class _GatherLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, plan):
        return fused_logprob.forward(ctx, logits, ids, plan)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, *cotangents):
        return fused_logprob.backward(ctx, *cotangents), None, None


@scheme(
    reference=logprob_and_negative_entropy,
    outputs=("b s tp=I", "b s tp=I"),
    dtypes=("float32", "bfloat16"),
    roundings=3,
    cost=one_exchange(4),
    **{**DECLARED, "draw": {**DECLARED["draw"], "logits": KINDS}},
)
def logprob_in_steps(mesh, logits, target, temperature):
    return _InSteps.apply(logits, target, *owned_range(mesh), mesh["tp"], temperature)


class _InSteps(torch.autograd.Function):
    """The kernels as production calls them, but with blocks of `STEP` columns."""

    @staticmethod
    def forward(ctx, logits, target, start, end, group, temperature):
        rows = logits.flatten(0, 1)
        column = st.local_column(target.reshape(-1, 1), start, end)
        row_max_r, row_sum_m1_r, z_r, shifted_mean_r = st.gather_statistics(
            local_statistics(rows, column, temperature, True, STEP), group
        ).unbind(1)
        normaliser, z_t = st.global_normaliser(row_max_r, row_sum_m1_r, temperature), st.global_target_logit(z_r)
        shifted_mean = st.global_shifted_mean(row_max_r, row_sum_m1_r, shifted_mean_r, normaliser, temperature)
        column = torch.where(z_t.unsqueeze(-1) == torch.inf, st.OUT_OF_VOCABULARY, column)
        ctx.save_for_backward(logits, *normaliser, column, shifted_mean)
        ctx.temperature = temperature
        scores = st.logprob_of(z_t, normaliser, temperature), shifted_mean - normaliser.log_row_sum
        return tuple(x.view(target.shape) for x in scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logprob, g_entropy):
        logits, *normaliser, column, shifted_mean = ctx.saved_tensors
        rows = logits.flatten(0, 1)
        gradient, at_target = torch.empty_like(rows), id_cotangents(column, g_logprob.reshape(-1, 1))
        entropy = EntropyCotangent(shifted_mean, g_entropy.reshape(-1))
        write_gradient(gradient, rows, st.Normaliser(*normaliser), at_target, entropy, ctx.temperature, True, STEP)
        return gradient.view(logits.shape), None, None, None, None, None
