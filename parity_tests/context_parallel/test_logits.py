"""Parity of attention with sinks, whose gradient is summed over cp, and with soft-capped logits, for every exchange."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_ref.context_parallel import attention, seen_pairs
from jax_ref.layouts import contiguous
from parity_tests.context_parallel.attention_schemes import (
    DTYPES,
    HEADS,
    ROUNDINGS,
    RULES,
    SCALE,
    exchange_cost,
    limits,
    rules,
    usp_cost,
)
from parity_tests.parity import parity
from parity_tests.rejections import check_rejection
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.engines.engines import run
from torch_impl.context_parallel import context_parallel_attention
from torch_impl.layouts import TokenLayout

SIZE = 24
DOCUMENTS = np.array([0, 10, 12, 24])
WRITTEN = np.array([0, 9, 11, 20])
DRAWN = dict(
    draw={**HEADS, **RULES, "sinks": values("normal", "ties")},
    options={"softcap": (None, 0.5, 2.0)},
    dtypes=DTYPES,
    wider_inputs=("sinks",),
    reduction=("b", "s", "p"),
    roundings=ROUNDINGS,
)
DIMS = {"b": (1,), "h": (4,), "g": (4, 2), "s": (SIZE,), "p": (4,), "one": (1,)}


def with_rules(q, k, v, sinks, causal, window, softcap, padded, real):
    """One formula for all: documents at their offsets, rules as data."""
    token = jnp.arange(q.shape[2])
    sequence = (token[:, None] >= padded[None, 1:]).sum(1)
    position = token - padded[sequence]
    width = jnp.where(window[0] > 0, window[0] + 2, len(token))
    seen = seen_pairs(sequence, position, position < jnp.diff(real)[sequence], causal[0] > 0, width)
    return attention(q, k, v, seen, SCALE, softcap, sinks)


def of_documents(q, k, v, sinks, causal, window, softcap):
    return with_rules(q, k, v, sinks, causal, window, softcap, jnp.array(DOCUMENTS), jnp.array(WRITTEN))


def of_one_sequence(q, k, v, sinks, causal, window, softcap):
    ends = jnp.array([0, q.shape[2]])
    return with_rules(q, k, v, sinks, causal, window, softcap, ends, ends)


def specs(cut, axes):
    tensors = {"q": f"b h {cut} p", "k": f"b g {cut} p", "v": f"b g {cut} p", "sinks": f"h {axes}"}
    return dict(inputs={**tensors, "causal": "one", "window": "one"}, outputs=f"b h {cut} p")


def with_gradient_of_sinks(costs, c, axes):
    """An all_reduce more over each of `axes` in backward, of a number for each head."""
    reduced = {f"all_reduce/{axis}": (1, c.h * c.accumulator_itemsize) for axis in axes}
    by_rank = [costs] * c.cp if isinstance(costs, Cost) else costs
    return [Cost(each.forward, {**each.backward, **reduced}, each.products) for each in by_rank]


def cost_over_two_axes(c, causal, window):
    return with_gradient_of_sinks(usp_cost(c, causal, window), c, ("ring", "heads") if c.heads > 1 else ("ring",))


def cost_of_documents(c, causal, window):
    keys = exchange_cost(c, contiguous(c.s, c.cp), limits(causal, window), DOCUMENTS, WRITTEN)
    return with_gradient_of_sinks(keys, c, ("cp",))


def padded_queries(case, inputs):
    """The padding of documents, whose output is 0 whatever its cotangent is."""
    rows = np.arange(SIZE)
    document = np.searchsorted(DOCUMENTS[1:], rows, side="right")
    is_padding = rows - DOCUMENTS[document] >= np.diff(WRITTEN)[document]
    return np.broadcast_to(is_padding, (case.b, case.h, SIZE))


@scheme(
    contract=context_parallel_attention,
    reference=of_documents,
    nan_cotangents={"out": padded_queries},
    mesh={"cp": (1, 2, 4)},
    **specs("s/cp", "cp=I"),
    dims=DIMS,
    rank_options={"exchange": ("ring", "all_gather", "ulysses")},
    cost=cost_of_documents,
    **DRAWN,
)
@pytest.mark.cases(5, engine="gloo")
def attention_with_sinks(mesh, q, k, v, sinks, causal, window, softcap, exchange):
    rank = dict(cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"), kind="contiguous")
    layout = TokenLayout.packed(DOCUMENTS.tolist(), WRITTEN.tolist(), **rank)
    logits = dict(sinks=sinks, softcap=softcap, **rules(causal, window))
    return context_parallel_attention(q, k, v, group=mesh["cp"], layout=layout, exchange=exchange, **logits)


@scheme(
    contract=context_parallel_attention,
    reference=of_one_sequence,
    mesh={"ring": (1, 2), "heads": (1, 2)},
    **specs("s/ring:dual_chunk_swap/heads:dual_chunk_swap", "ring=I heads=I"),
    dims=DIMS,
    cost=cost_over_two_axes,
    **DRAWN,
)
def attention_with_sinks_over_two_axes(mesh, q, k, v, sinks, causal, window, softcap):
    logits = dict(layout="dual_chunk_swap", sinks=sinks, softcap=softcap, **rules(causal, window))
    return context_parallel_attention(q, k, v, mesh=mesh.device_mesh, exchange="usp", **logits)


SCHEMES = (attention_with_sinks, attention_with_sinks_over_two_axes)
test_parity = parity(SCHEMES, lockstep=30)


def alone(body):
    """The results of a single rank."""
    (result,) = run(body, CaseSpec(scheme="logits", mesh={"cp": 1})).results
    return result


def test_a_sink_far_below_all_logits_and_a_cap_far_above_change_nothing():
    def body(mesh, case):
        q = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        call = dict(group=mesh["cp"], layout="contiguous")
        plain = context_parallel_attention(q, q, q, **call)
        with_sinks = context_parallel_attention(q, q, q, sinks=torch.full((2,), -1e9), **call)
        capped = context_parallel_attention(q.float(), q.float(), q.float(), softcap=1e30, **call)
        return torch.equal(plain, with_sinks), bool(capped.isfinite().all())

    assert alone(body) == (True, True)


def test_sinks_keep_the_digits_that_queries_lack():
    """bfloat16 rounds a sink of 10.03 to 10, which makes its share 3% smaller, and the output larger."""

    def body(mesh, case):
        call, zeros = dict(group=mesh["cp"], layout="contiguous"), torch.zeros(1, 2, 8, 4)
        in_float32, narrow = (
            context_parallel_attention(q, q, torch.ones_like(q), sinks=torch.full((2,), 10.03), **call)
            for q in (zeros, zeros.bfloat16())
        )
        return torch.equal(narrow, in_float32.bfloat16())

    assert alone(body)


def test_padding_reaches_no_sink_whatever_its_cotangent():
    def body(mesh, case):
        q = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
        layout = TokenLayout.dense("contiguous", 8, cp_size=1, cp_rank=0, real_length=5)
        gradients = []
        for padding in (0.0, torch.nan):
            sinks = torch.zeros(2, requires_grad=True)
            out = context_parallel_attention(q, q, q, group=mesh["cp"], layout=layout, sinks=sinks)
            cotangent = torch.ones_like(q)
            cotangent[:, :, 5:] = padding
            gradients.append(torch.autograd.grad(out, sinks, cotangent)[0])
        return torch.equal(*gradients), bool(gradients[0].all())

    assert alone(body) == (True, True)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"softcap": 0.0}, ValueError, "softcap=0.0 must be positive"),
        ({"sinks": [0.0]}, TypeError, "sinks is a list; pass a Tensor"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks is [3] but q has h=2: h differs, 3 and 2"),
        ({"sinks": torch.zeros(2, device="meta")}, ValueError, "sinks is on meta but q on cpu; pass one device"),
    ],
)
def test_rejections(options, kind, message):
    def call(mesh):
        q = torch.zeros(1, 2, 8, 4)
        return context_parallel_attention(q, q, q, group=mesh["cp"], layout="contiguous", **options)

    check_rejection({"cp": 1}, "attention", call, f"context_parallel.context_parallel_attention: {message}", kind)
