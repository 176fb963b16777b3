"""Callers that evaluate first, that write into gradients, and whose rows are in another order in memory."""

import pytest
import torch

from shardproof import scheme, values, verify_one_case
from shardproof.declare.conditions import record_of
from shardproof.draw.calling_conditions import STRIDES
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.verify_one_case import verify_case

pytestmark = pytest.mark.usefixtures("unexplained")


class OfKeptGradients(torch.autograd.Function):
    """Returns the gradient of its first backward again in a second one."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.kept = None
        return 2 * a, 2 * b

    @staticmethod
    def backward(ctx, of_a, of_b):
        ctx.kept = 2 * of_a if ctx.kept is None else ctx.kept
        return ctx.kept, 2 * of_b


DOUBLED = {}  # per rank


def kept_by_an_evaluation(mesh, a, b):
    """Has another factor for ever if its first call is an evaluation."""
    factor = DOUBLED.setdefault(mesh.rank("tp"), 2.0 if torch.is_grad_enabled() else 3.0)
    return factor * a, 2 * b


class OfMergedRows(torch.autograd.Function):
    """Takes rows whose elements lie side by side to lie side by side themselves."""

    @staticmethod
    def forward(ctx, a):
        dense = a if a.stride(-1) == 1 else a.contiguous()
        rows = dense.as_strided((a.shape[0] * a.shape[1], a.shape[2]), (dense.stride(1), 1))
        return (2 * rows).view(a.shape)

    @staticmethod
    def backward(ctx, of_a):
        return 2 * of_a


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """No state is left from one case to the next."""
    run = verify_one_case.run

    def run_afresh(*arguments, **more):
        DOUBLED.clear()
        return run(*arguments, **more)

    monkeypatch.setattr(verify_one_case, "run", run_afresh)


def frozen(mesh, a, b):
    a.requires_grad_(False)
    return 2 * a, 2 * b


def with_a_backward_of_its_own(mesh, a, b):
    if a.requires_grad:
        (3 * a).sum().backward()
    return 2 * a, 2 * b


def doubles(leaf):
    leaf.grad.mul_(2)


def doubled_as_it_is_accumulated(mesh, a, b):
    if a.requires_grad:
        a.register_post_accumulate_grad_hook(doubles)
    return 2 * a, 2 * b


def with_two_inputs(function, *excluded):
    return scheme(
        reference=lambda a, b: (2.0 * a, 2.0 * b), mesh={"tp": (1, 2)}, inputs={"a": "b v/tp", "b": "b v/tp"},
        outputs=("b v/tp", "b v/tp"), dtypes=("float32",), engines=("lockstep",),
        draw={"a": values("normal"), "b": values("normal")}, excluded_conditions=excluded,
    )(function)  # fmt: skip


def test_an_evaluation_may_come_first():
    declaration = with_two_inputs(kept_by_an_evaluation, "inference_mode", "call_between")
    case = declaration.case(b=2, v=4, tp=2)
    evaluation = {"conditions": {"no_grad": True}}
    before = record_of(case.replace(seed=case.seed + 1))
    assert verify_case(declaration, case.replace(conditions={"call_before": before})).ok
    report = verify_case(declaration, case.replace(conditions={"call_before": before | evaluation}))
    assert report.failed and "with other values under torch.no_grad() before" in " ".join(str(report).split())
    drawn = [draw_case(declaration, seeded_chooser(n), {}, seed=n, with_conditions=True).conditions for n in range(100)]
    records = [each["call_before"] for each in drawn if "call_before" in each]
    assert 0 < sum("conditions" in each for each in records) < len(records)


def test_a_caller_may_write_into_the_gradients_of_a_first_backward():
    declaration = with_two_inputs(lambda mesh, a, b: OfKeptGradients.apply(a, b))
    case = declaration.case(b=2, v=4, tp=2)
    assert verify_case(declaration, case.replace(conditions={"second_backward": True})).ok
    report = verify_case(declaration, case.replace(conditions={"second_backward": True, "overwritten": True}))
    assert [tensor.label for tensor in report.tensors if not tensor.ok] == ["d/d a"], str(report)


@pytest.mark.parametrize("function", [frozen, doubled_as_it_is_accumulated])
@pytest.mark.parametrize("conditions", [{}, {"second_backward": True}, {"unused": ("out[0]",)}])
def test_a_function_may_not_edit_how_its_inputs_get_their_gradients(function, conditions):
    declaration = with_two_inputs(function)
    report = verify_case(declaration, declaration.case(b=2, v=4, tp=2).replace(conditions=conditions))
    wrong = [] if "unused" in conditions else ["d/d a"]
    assert [tensor.label for tensor in report.tensors if not tensor.ok] == wrong, str(report)


def test_a_function_may_not_leave_a_gradient_to_which_its_caller_adds():
    declaration = with_two_inputs(with_a_backward_of_its_own)
    report = verify_case(declaration, declaration.case(b=2, v=4, tp=2))
    assert report.verdict == "hygiene" and "input 'a' was left with a gradient of its own in .grad" in str(report)


def test_rows_may_be_in_another_order():
    declaration = scheme(
        reference=lambda a: 2.0 * a, mesh={"tp": (1, 2)}, inputs={"a": "b s v/tp"}, outputs="b s v/tp",
        dtypes=("float32",), engines=("lockstep",), draw={"a": values("normal")},
    )(lambda mesh, a: OfMergedRows.apply(a))  # fmt: skip
    case = declaration.case(b=2, s=3, v=4, tp=2)
    for kind in STRIDES:
        report = verify_case(declaration, case.replace(conditions={"strided": {"a": kind}}))
        assert report.failed == (kind == "swapped"), str(report)
    assert "a is a view with two dims swapped in memory" in " ".join(str(report).split())
