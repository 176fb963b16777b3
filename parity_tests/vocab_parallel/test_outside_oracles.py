"""Fixed cases against three oracles that are not ours: plain torch on one device, torch.nn.functional, and jax.nn.

Each states a function in its own words, in float64 and on full arrays. The ranks' values and gradients must be within
the budgets that the harness computed for the case.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from parity_tests.vocab_parallel.test_cross_entropy import distributed_cross_entropy
from parity_tests.vocab_parallel.test_distillation import distillation_over_tp_and_cp
from parity_tests.vocab_parallel.test_entropy import chunked_distributed_entropy
from parity_tests.vocab_parallel.test_gather_logprob import gathered_logprob
from parity_tests.vocab_parallel.test_topk import gathered_logits, vocab_topk
from shardproof.draw import inputs
from shardproof.verify_one_case import verify_case

LOWEST = -1e30  # exp(LOWEST - max) is 0; unlike -inf's, its derivative is no NaN where all are LOWEST


def zero_at_ignored(where, at):
    """`at(logits, ids)` with 0, without a gradient, for an id of -100 or beyond the vocabulary."""

    def function(logits, ids):
        is_valid = (ids >= 0) & (ids < logits.shape[-1])
        return where(is_valid, at(logits, where(is_valid, ids, 0)), 0.0)

    return function


GATHER_LOGPROB = {
    "torch": zero_at_ignored(
        torch.where, lambda logits, ids: (logits - logits.logsumexp(-1, keepdim=True)).gather(-1, ids)
    ),
    # cross_entropy has ignored ids of its own: its default is -100.
    "functional": lambda logits, ids: (
        -F.cross_entropy(
            logits.unsqueeze(-2).expand(*ids.shape, -1).movedim(-1, 1),
            ids.where((ids >= 0) & (ids < logits.shape[-1]), -100),
            reduction="none",
        )
    ),
    "jax": zero_at_ignored(jnp.where, lambda logits, ids: jnp.take_along_axis(jax.nn.log_softmax(logits), ids, -1)),
}
ENTROPY = {
    "torch": lambda logits: -torch.distributions.Categorical(logits=logits).entropy(),
    "functional": lambda logits: (F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1),
    "jax": lambda logits: -jax.scipy.special.entr(jax.nn.softmax(logits)).sum(-1),
}
CROSS_ENTROPY = {
    "torch": lambda student_logits, target_logits: (
        student_logits.logsumexp(-1) - (target_logits.softmax(-1) * student_logits).sum(-1)
    ),
    "functional": lambda student_logits, target_logits: F.cross_entropy(
        student_logits.movedim(-1, 1), F.softmax(target_logits, -1).movedim(-1, 1), reduction="none"
    ),
    "jax": lambda student_logits, target_logits: (
        -(jax.nn.softmax(target_logits) * jax.nn.log_softmax(student_logits)).sum(-1)
    ),
}
LOGITS_AT = {
    "torch": zero_at_ignored(torch.where, lambda logits, ids: logits.gather(-1, ids)),
    "functional": zero_at_ignored(
        torch.where,
        lambda logits, ids: torch.einsum("bskv,bsv->bsk", F.one_hot(ids, logits.shape[-1]).to(logits.dtype), logits),
    ),
    "jax": zero_at_ignored(jnp.where, lambda logits, ids: jnp.take_along_axis(logits, ids, -1)),
}
LOG_SOFTMAX = {
    "torch": lambda z: z - z.logsumexp(-1, keepdim=True),
    "functional": lambda z: F.log_softmax(z, -1),
    "jax": jax.nn.log_softmax,
}


def distilled(library):
    """Distillation in the words of one library."""
    log_softmax, at, entropy = LOG_SOFTMAX[library], LOGITS_AT[library], ENTROPY[library]

    def oracle(student, teacher, ids):
        z, teacher, ids = student[:, : ids.shape[1] - 1], teacher[:, :-1], ids[:, :-1]
        return at(log_softmax(z), ids), log_softmax(teacher), entropy(z)

    return oracle


def distilled_over_k(library):
    """The same over the teacher's ids alone; the sum leaves out ids outside the vocabulary."""
    log_softmax, at, where = LOG_SOFTMAX[library], LOGITS_AT[library], jnp.where if library == "jax" else torch.where

    def oracle(student, teacher, ids):
        z, teacher, ids = student[:, : ids.shape[1] - 1], teacher[:, :-1], ids[:, :-1]
        is_valid = (ids >= 0) & (ids < z.shape[-1])
        return where(is_valid, log_softmax(where(is_valid, at(z, ids), LOWEST)), 0.0), log_softmax(teacher)

    return oracle


LIBRARIES = ("torch", "functional", "jax")
DISTILLATION = {library: distilled(library) for library in LIBRARIES}
OVER_K = {library: distilled_over_k(library) for library in LIBRARIES}
SIZES = dict(tp=2, b=2, v=12)
CASES = [
    (gathered_logprob, GATHER_LOGPROB, dict(**SIZES, s=5, k=4)),
    (chunked_distributed_entropy, ENTROPY, dict(**SIZES, s=5)),
    (distributed_cross_entropy, CROSS_ENTROPY, dict(**SIZES, s=5)),
    (gathered_logits, LOGITS_AT, dict(**SIZES, cp=2, s=8, e=0, k=4)),
    (
        distillation_over_tp_and_cp,
        DISTILLATION,
        dict(**SIZES, cp=2, s=8, e=0, k=4, zero_outside_topk=True, calculate_entropy=True),
    ),
    (
        distillation_over_tp_and_cp,
        OVER_K,
        dict(**SIZES, cp=2, s=8, e=0, k=4, zero_outside_topk=False, calculate_entropy=False),
    ),
]


def fixed(scheme, dtype, sizes):
    """One case of normal values and of ids from everywhere; half of them are ignored."""
    case = scheme.case(seed=6, dtype=dtype, **sizes)
    plain = {
        arg.name: {**case.values[arg.name], "kind": "ids", "picks": [[0, "anywhere"]], "ignored": "half"}
        if scheme.draws[arg.name].kind == "ids"
        else {"kind": "normal"}
        for arg in scheme.inputs
    }
    return case.replace(values=plain)


def with_torch(function, arrays, differentiable, cotangents):
    """Outputs, and gradients of the floating inputs for the first outputs' cotangents."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    leaves = [tensors[name].requires_grad_() for name in differentiable]
    outputs = function(**tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = torch.autograd.grad(outputs, leaves, [torch.from_numpy(c) for c in cotangents[: len(outputs)]])
    return [x.detach().numpy() for x in (*outputs, *gradients)]


def with_jax(function, arrays, differentiable, cotangents):
    fixed = {name: jnp.asarray(array) for name, array in arrays.items() if name not in differentiable}
    outputs, pullback = jax.vjp(
        lambda *leaves: function(**fixed, **dict(zip(differentiable, leaves, strict=True))),
        *(jnp.asarray(arrays[name]) for name in differentiable),
    )
    several = isinstance(outputs, tuple)
    jax_cotangents = [jnp.asarray(c) for c in cotangents]
    gradients = pullback(tuple(jax_cotangents[: len(outputs)]) if several else jax_cotangents[0])
    return [np.asarray(x) for x in (*(outputs if several else (outputs,)), *gradients)]


@pytest.mark.fast_values(3)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("scheme", "oracles", "sizes"), CASES, ids=[f"{s.name}-{i}" for i, (s, *_) in enumerate(CASES)]
)
def test_agrees_with(scheme, oracles, sizes, library, dtype):
    case = fixed(scheme, dtype, sizes)
    report = verify_case(scheme, case)
    report.raise_if_failed()
    arrays = {arg.name: inputs.full_array(arg, scheme.draws[arg.name], case) for arg in scheme.inputs}
    differentiable = [arg.name for arg in scheme.inputs if arg.differentiable]
    cotangents = [inputs.addends(arg, inputs.cotangent(arg, case), case, "cotangent").sum(0) for arg in scheme.outputs]
    evaluated = (with_jax if library == "jax" else with_torch)(oracles[library], arrays, differentiable, cotangents)
    outputs = [tensor for tensor in report.tensors if tensor.role == "output"][: len(evaluated) - len(differentiable)]
    gradients = [tensor for tensor in report.tensors if tensor.role == "gradient"]
    for row, want in zip([*outputs, *gradients], evaluated, strict=True):
        assert want.dtype == np.float64
        assert (np.abs(row.got - want) <= row.element_budgets).all(), (row.label, float(np.abs(row.got - want).max()))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_topk_agrees_to_the_bit(dtype):
    case = fixed(vocab_topk, dtype, dict(tp=2, b=2, s=5, k=3, e=9))
    values, ids = (tensor.got for tensor in verify_case(vocab_topk, case).tensors)
    logits = inputs.full_array(vocab_topk.inputs[0], vocab_topk.draws["logits"], case)
    if dtype == "float64":  # no ties, which torch.topk leaves open
        for got, want in zip((values, ids), torch.from_numpy(logits).topk(3), strict=True):
            np.testing.assert_array_equal(got, want.numpy())
    np.testing.assert_array_equal(values, torch.from_numpy(logits).topk(3).values.numpy())
    for got, want in zip((values, ids), jax.lax.top_k(jnp.asarray(logits), 3), strict=True):
        np.testing.assert_array_equal(got, np.asarray(want))
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[..., :3])
