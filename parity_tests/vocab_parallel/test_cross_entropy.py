"""Parity of vocab_parallel.cross_entropy."""

import jax
import numpy as np
import pytest
import torch

from jax_ref.vocab_parallel import cross_entropy
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.saved import NOTHING_SAVED, saved_beside, saved_in_inference
from parity_tests.vocab_parallel.shard import wants_no_gradient
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl import vocab_parallel as vp

DECLARED = dict(
    mesh={"tp": (1, 2, 3, 4)},
    outputs="b s tp=I",
    dtypes=("float32", "float64", "bfloat16", "float16"),
    sums="float32",
    reduction=("v",),
    roundings=3,  # log total, mean shifted logit, gradient
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 5 * c.b * c.s))),
)
# Masks and underflow matter where they meet: a column that the student masks and of which the target is almost 0.
OFTEN_MASKED = values("neg_inf_mask", "normal", "neg_inf_mask", "large", "peaked", "neg_inf_mask", "tiny")
OFTEN_SPREAD = values("large", "normal", "large", "neg_inf_mask", "large", "peaked", "huge", "ties")


@scheme(
    reference=cross_entropy,
    contract=vp.DistributedCrossEntropy,
    inputs={"student_logits": "b s v/tp:ragged", "target_logits": "b s v/tp:ragged"},
    draw={"student_logits": OFTEN_MASKED, "target_logits": OFTEN_SPREAD},
    nograd=("target_logits",),
    wider_inputs=("student_logits", "target_logits"),
    **DECLARED,
)
@pytest.mark.cases(5, engine="gloo")
@pytest.mark.cases
def distributed_cross_entropy(mesh, student_logits, target_logits):
    return vp.DistributedCrossEntropy.apply(student_logits, target_logits, mesh["tp"], wants_no_gradient())


def cross_entropy_with_a_sharper_self(logits):
    return cross_entropy(logits, jax.lax.stop_gradient(2 * logits))


@scheme(reference=cross_entropy_with_a_sharper_self, inputs={"logits": "b s v/tp:ragged"}, **DECLARED)
@pytest.mark.cases
def cross_entropy_near_its_end(mesh, logits):
    """A student that has learnt its target all but for the temperature: both are certain of the same, both masked."""
    return vp.DistributedCrossEntropy.apply(logits, 2 * logits.detach(), mesh["tp"])


def normal(*shape, key=13):
    return np.random.Generator(np.random.Philox(key=[key, 0])).standard_normal(shape)


def judged(student, target, tp):
    b, s, v = student.shape
    case = distributed_cross_entropy.case(tp=tp, b=b, s=s, v=v, dtype="float32")
    return verify_case(distributed_cross_entropy, case, arrays={"student_logits": student, "target_logits": target})


def on_ranks(tp, body):
    """`body(mesh, mine)` on each rank; `mine` takes equal shards."""

    def on_rank(mesh, case):
        def mine(x):
            width = x.shape[-1] // tp
            return x[..., mesh.rank("tp") * width :][..., :width].clone()

        return body(mesh["tp"], mine)

    return run(on_rank, CaseSpec(scheme="cross_entropy", mesh={"tp": tp})).results


MASKS = {
    "first and last column of each shard": [0, 3, 4, 7],
    "a whole shard": [0, 1, 2, 3],
    "all but one column": [0, 1, 2, 3, 4, 6, 7],
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_columns_masked_in_both(mask, tp):
    student, target = normal(1, 3, 8), normal(1, 3, 8, key=14)
    student[..., MASKS[mask]] = target[..., MASKS[mask]] = -np.inf
    report = judged(student, target, tp)
    report.raise_if_failed()
    for tensor in report.tensors:
        assert np.isfinite(tensor.got).all()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_columns_masked_in_the_target_alone(mask, tp):
    student, target = normal(1, 3, 8), normal(1, 3, 8, key=14)
    target[..., MASKS[mask]] = -np.inf
    report = judged(student, target, tp)
    report.raise_if_failed()
    for tensor in report.tensors:
        assert np.isfinite(tensor.got).all()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_columns_masked_in_the_student_alone_are_infinitely_surprising(mask, tp):
    student, target = normal(1, 3, 8), normal(1, 3, 8, key=14)
    student[..., MASKS[mask]] = -np.inf
    target[:, 1, MASKS[mask]] -= 200.0  # so improbable that float32 takes it for 0
    report = judged(student, target, tp)
    report.raise_if_failed()
    for tensor in report.tensors:
        assert (tensor.got == np.inf).all() if tensor.role == "output" else np.isfinite(tensor.got).all()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_certain_student_under_a_certain_target(tp):
    """q - p where both are all but 1."""
    student, target = normal(1, 3, 8), normal(1, 3, 8, key=14)
    student[..., 6] += 24.0
    target[..., 6] += 27.0
    judged(student, target, tp).raise_if_failed()


def test_of_itself_it_is_the_entropy():
    logits = torch.from_numpy(normal(2, 3, 8)).float()

    def body(group, mine):
        z = mine(logits).requires_grad_()
        h = vp.DistributedCrossEntropy.apply(z, z.detach(), group)
        return torch.equal(h, -vp.ChunkedDistributedEntropy.apply(z, None, group)), torch.autograd.grad(h.sum(), z)[0]

    for same, gradient in on_ranks(2, lambda g, m: [x if isinstance(x, bool) else x.numpy() for x in body(g, m)]):
        assert same
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_gradients_of_a_row_cancel():
    report = judged(normal(2, 5, 8), normal(2, 5, 8, key=14), tp=4)
    report.raise_if_failed()
    gradient = next(tensor for tensor in report.tensors if tensor.role == "gradient")
    assert (np.abs(gradient.got.sum(-1)) <= gradient.element_budgets.sum(-1)).all()


def test_the_target_has_no_gradient():
    def body(group, mine):
        student, target = (mine(torch.from_numpy(normal(1, 2, 8, key=k))).requires_grad_() for k in (1, 2))
        vp.DistributedCrossEntropy.apply(student, target, group).sum().backward()
        return student.grad is not None, target.grad is None

    assert on_ranks(2, body) == ((True, True),) * 2


@pytest.mark.parametrize(
    ("student", "target", "result"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float16, torch.float64),
    ],
)
def test_the_sums_run_in_the_wider_dtype(student, target, result):
    """Small integers: every dtype has them exactly, so the value equals the wider dtype's to the bit."""
    z, t = torch.arange(8.0).view(1, 8), torch.arange(8.0).flip(0).view(1, 8).remainder(5)

    def body(group, mine):
        leaf = mine(z).to(student).requires_grad_()
        y = vp.DistributedCrossEntropy.apply(leaf, mine(t).to(target), group)
        same = torch.equal(y, vp.DistributedCrossEntropy.apply(mine(z).to(result), mine(t).to(result), group))
        y.sum().backward()
        return y.dtype == result and leaf.grad.dtype == student and same

    assert on_ranks(2, body) == (True, True)


def test_strides_change_nothing():
    def body(group, mine):
        wide, tall = (mine(torch.from_numpy(normal(3, 4, 8, key=k))) for k in (1, 2))
        plain = vp.DistributedCrossEntropy.apply(wide[:, :-1].contiguous(), tall[:, 1:].contiguous(), group)
        student = wide[:, :-1].requires_grad_()
        strided = vp.DistributedCrossEntropy.apply(student, tall.mT.contiguous().mT[:, 1:], group)
        (gradient,) = torch.autograd.grad(strided, student, torch.ones(1, 1).double().expand(3, 3))
        flat = vp.DistributedCrossEntropy.apply(wide[0, 0], tall[0, 1], group)
        return torch.equal(plain, strided), gradient.shape == student.shape, torch.equal(flat, plain[0, 0])

    assert on_ranks(2, body) == ((True, True, True),) * 2


def test_gradcheck():
    def body(group, mine):
        student, target = (torch.from_numpy(normal(2, 3, 5, key=k)) for k in (1, 2))
        return torch.autograd.gradcheck(
            lambda x: vp.DistributedCrossEntropy.apply(x, target, group), student.requires_grad_()
        )

    assert on_ranks(1, body) == (True,)


def test_saves_both_logits_by_reference_and_sixteen_bytes_per_token():
    def body(group, mine):
        z, t = torch.zeros(2, 3, 64, requires_grad=True), torch.zeros(2, 3, 64)
        return saved_beside((z, t), lambda: vp.DistributedCrossEntropy.apply(z, t, group))

    assert on_ranks(1, body) == ((2, 16 * 2 * 3),)


def test_inference_only_saves_nothing():
    def body(group, mine):
        z, t = torch.zeros(1, 2, 4, requires_grad=True), torch.zeros(1, 2, 4)
        return saved_in_inference(lambda: vp.DistributedCrossEntropy.apply(z, t, group, True))

    assert on_ranks(1, body) == (NOTHING_SAVED,)
