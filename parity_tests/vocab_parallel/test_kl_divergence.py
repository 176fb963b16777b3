"""Parity of vocab_parallel.kl_divergence: forward and reverse, far from the teacher and almost there."""

import jax
import pytest
import torch

from jax_ref.vocab_parallel import kl_divergence
from parity_tests.parity import parity
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.saved import NOTHING_SAVED, saved_in_inference
from parity_tests.vocab_parallel.shard import wants_no_gradient
from shardproof import CaseSpec, Cost, check, scheme, values
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp

DECLARED = dict(
    mesh={"tp": (1, 2, 3, 4)},
    outputs="b s tp=I",
    dtypes=("float32", "float64", "bfloat16", "float16"),
    sums="float32",
    reduction=("v",),
    roundings=3,  # log total, mean difference, gradient
    rank_options={"chunk_size": (None, 1, 2, 5)},
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 6 * c.b * c.s))),
)
OFTEN_MASKED = values("normal", "neg_inf_mask", "large", "peaked", "huge", "ties", "tiny", "neg_inf_mask", "large")
# Together often: a student without a column whose probability underflows in the teacher.
MASKED_STUDENT = values("neg_inf_mask", "normal", "neg_inf_mask", "large", "neg_inf_mask", "ties")
FAR_TEACHER = values("large", "normal", "large", "peaked", "large", "neg_inf_mask", "huge", "tiny")
NEVER_MASKED = values("normal", "large", "peaked", "ties", "tiny")
BOTH = {"student_logits": "b s v/tp:ragged", "teacher_logits": "b s v/tp:ragged"}


OF_BOTH = {
    **DECLARED,
    "rank_options": {**DECLARED["rank_options"], "is_cut": (False, True)},
    "wider_inputs": tuple(BOTH),
}


def cut(logits, is_cut):
    """The logits as all but the last of more positions: rows of a batch are apart in memory, the teacher's are not."""
    return torch.cat([logits, logits[:, :1]], 1)[:, :-1] if is_cut else logits


def from_teacher(student_logits, teacher_logits, temperature):
    return kl_divergence(student_logits, teacher_logits, False, temperature)


def from_student(student_logits, teacher_logits, temperature):
    return kl_divergence(student_logits, teacher_logits, True, temperature)


@scheme(
    reference=from_teacher,
    contract=vp.vocab_parallel_kl,
    inputs=BOTH,
    draw={"student_logits": MASKED_STUDENT, "teacher_logits": FAR_TEACHER},
    nograd=("teacher_logits",),
    options={"temperature": (1.0, 0.5, 2.0)},
    **OF_BOTH,
)
def forward_kl(mesh, student_logits, teacher_logits, temperature, chunk_size, is_cut):
    return vp.vocab_parallel_kl(
        cut(student_logits, is_cut),
        teacher_logits,
        mesh["tp"],
        temperature=temperature,
        chunk_size=chunk_size,
        inference_only=wants_no_gradient(),
    )


@scheme(
    reference=from_student,
    contract=vp.vocab_parallel_kl,
    inputs=BOTH,
    draw={"student_logits": OFTEN_MASKED, "teacher_logits": NEVER_MASKED},  # else +inf, and no gradient to compare
    nograd=("teacher_logits",),
    options={"temperature": (1.0, 0.5, 2.0)},
    **OF_BOTH,
)
def reverse_kl(mesh, student_logits, teacher_logits, temperature, chunk_size, is_cut):
    return vp.vocab_parallel_kl(
        cut(student_logits, is_cut),
        teacher_logits,
        mesh["tp"],
        reverse=True,
        temperature=temperature,
        chunk_size=chunk_size,
        inference_only=wants_no_gradient(),
    )


def kl_from_a_sharper_self(logits, reverse):
    return kl_divergence(logits, jax.lax.stop_gradient(2 * logits), reverse)


@scheme(
    reference=kl_from_a_sharper_self,
    inputs={"logits": "b s v/tp:ragged"},
    options={"reverse": (False, True)},
    **DECLARED,
)
def kl_near_its_end(mesh, logits, reverse, chunk_size):
    """A student that has learnt its teacher all but for the temperature: certain of the same, with the same masks."""
    return vp.vocab_parallel_kl(logits, 2 * logits.detach(), mesh["tp"], reverse=reverse, chunk_size=chunk_size)


test_parity = parity([forward_kl, reverse_kl, kl_near_its_end], lockstep=40, gloo=5)


@pytest.mark.parametrize("tp", [1, 2])
def test_reverse_gradient_of_a_student_that_is_almost_certain(tp):
    case = CaseSpec(
        reverse_kl.key,
        {"tp": tp},
        {"b": 3, "s": 6, "v": 2},
        layouts={"v/tp": {"lengths": [2 // tp] * tp, "name": "ragged"}},
        values={"student_logits": {"kind": "large"}, "teacher_logits": {"kind": "normal"}},
        options={"chunk_size": None, "is_cut": False, "temperature": 1.0},
    )
    check(case)


def on_ranks(tp, body):
    return run(lambda mesh, case: body(mesh["tp"]), CaseSpec(scheme="kl", mesh={"tp": tp})).results


@pytest.mark.parametrize("reverse", [False, True])
def test_of_itself_it_is_zero_and_so_is_its_gradient(reverse):
    def body(group):
        logits = torch.linspace(-3, 3, 8).view(2, 4).requires_grad_()
        kl = vp.vocab_parallel_kl(logits, logits.detach(), group, reverse=reverse)
        return kl.tolist(), torch.autograd.grad(kl.sum(), logits)[0].abs().max().item()

    assert on_ranks(2, body) == (([0.0, 0.0], 0.0),) * 2


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("student", "teacher", "result"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_the_sums_run_in_the_wider_dtype(student, teacher, result, reverse):
    """Whole numbers, which every dtype has: the divergence is the wider dtype's, to the bit."""
    of_student = torch.arange(8.0).view(1, 8)
    of_teacher = of_student.flip(1).remainder(5)

    def body(group):
        def kl(logits, dtype):
            return vp.vocab_parallel_kl(logits, of_teacher.to(dtype), group, reverse=reverse)

        leaf = of_student.to(student).requires_grad_()
        y, wide = kl(leaf, teacher), kl(of_student.to(result), result)
        return y.dtype == result, torch.equal(y, wide), torch.autograd.grad(y.sum(), leaf)[0].dtype == student

    assert on_ranks(2, body) == ((True, True, True),) * 2


def test_inference_only_saves_nothing():
    def body(group):
        logits = torch.zeros(1, 2, 4, requires_grad=True)
        return saved_in_inference(
            lambda: vp.vocab_parallel_kl(logits, torch.zeros(1, 2, 4), group, inference_only=True)
        )

    assert on_ranks(1, body) == (NOTHING_SAVED,)
