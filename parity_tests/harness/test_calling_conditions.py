"""Each calling condition finds a function that is wrong only under it, and is named in the report."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed._functional_collectives as functional

from parity_tests.harness.recomputation import CALLS, of_one_forward_for_each_backward
from shardproof import check, integers, scheme, values, verify_one_case
from shardproof.declare.case import CaseSpec
from shardproof.declare.conditions import (
    CONDITIONS,
    NOT_ALWAYS_PROMISED,
    OTHER_CALLS,
    record_of,
    with_one_less,
)
from shardproof.draw.calling_conditions import STORAGE
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.verify_one_case import verify_case
from torch_impl.collectives import all_reduce

EXAMPLES = 80  # without the condition
MANY = 400  # until it is drawn for the one tensor that matters


class Doubled(torch.autograd.Function):
    """2 a and 2 b, with one mistake for each subclass."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        return 2 * a, 2 * b

    @staticmethod
    def backward(ctx, of_a, of_b):
        return None if of_a is None else 2 * of_a, None if of_b is None else 2 * of_b


class OfBothOrNone(Doubled):
    @staticmethod
    def backward(ctx, of_a, of_b):
        return (None, None) if of_a is None or of_b is None else (2 * of_a, 2 * of_b)


class OfFirstThatIsNeeded(Doubled):
    @staticmethod
    def backward(ctx, of_a, of_b):
        return (2 * of_a, 2 * of_b) if all(ctx.needs_input_grad) else (of_a, of_b)


class OfItsRows(Doubled):
    @staticmethod
    def backward(ctx, of_a, of_b):
        rows = None if of_a is None else of_a.as_strided(of_a.shape, (of_a.shape[1], 1))
        return None if rows is None else 2 * rows, None if of_b is None else 2 * of_b


class InOneBuffer(Doubled):
    @staticmethod
    def forward(ctx, a, b):
        ctx.factor = torch.full((), 2.0)
        return 2 * a, 2 * b

    @staticmethod
    def backward(ctx, of_a, of_b):
        gradients = ctx.factor * of_a, ctx.factor * of_b
        ctx.factor.zero_()
        return gradients


SIZES = {}  # of each rank: rows of its first call
FACTORS = {}  # of each rank, from its last call


class OfTheLastCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, rank):
        ctx.rank, FACTORS[rank] = rank, a.detach()
        ctx.save_for_backward(a)
        return 2 * a, 2 * b

    @staticmethod
    def backward(ctx, of_a, of_b):
        (a,) = ctx.saved_tensors
        is_last = FACTORS[ctx.rank].data_ptr() == a.data_ptr()
        return 2 * of_a if is_last else 3 * of_a, 2 * of_b, None


def rows_of_the_first_call(mesh, a, b):
    return 2 * a if SIZES.setdefault(mesh.rank("tp"), a.shape[0]) == a.shape[0] else 3 * a, 2 * b


BUFFERS = {}  # per rank and shape, from the last call with that shape
FIRST = {}  # per rank and shape, from the first call with that shape


class InABufferOfItsShape(torch.autograd.Function):
    """Saves a for its backward in a static buffer, which the next microbatch of that shape overwrites."""

    @staticmethod
    def forward(ctx, a, b, rank):
        ctx.buffer = BUFFERS.setdefault((rank, a.shape), torch.empty_like(a)).copy_(a)
        return a * a, 2 * b

    @staticmethod
    def backward(ctx, of_a, of_b):
        return 2 * ctx.buffer * of_a, 2 * of_b, None


def in_a_buffer_of_its_shape(mesh, a, b):
    return InABufferOfItsShape.apply(a, b, mesh.rank("tp"))


def cached_by_shape(mesh, a, b):
    """Where a is above 0, as the first call of this shape had it."""
    above = FIRST.setdefault((mesh.rank("tp"), a.shape), a.detach() > 0)
    return torch.where(above, a, -a), b * 2


def of_its_storage(mesh, a, b):
    flat = b.new_empty(0).set_(b.untyped_storage())[: b.numel()]
    return 2 * a, 2 * (b + (flat.view(b.shape) - b).detach())


def of_its_rows(mesh, a, b):
    return 2 * a.as_strided(a.shape, (a.shape[1], 1)), 2 * b


def cached_by_address(mesh, a, b):
    doubled = {x.data_ptr(): 2 * x for x in (a, b)}
    return doubled[a.data_ptr()] if a.numel() else 2 * a, doubled[b.data_ptr()] if b.numel() else 2 * b


def half_of_the_second_derivative(mesh, a, b):
    doubled = 2 * a
    if doubled.requires_grad:
        doubled.register_hook(lambda cotangent: (cotangent + cotangent.detach()) / 2)
    return doubled, 2 * b


# For each condition: the function, other conditions that would find it, and the clause of the report.
WRONG = {
    "strided": (of_its_rows, ("expanded",), "a is a "),
    "expanded": (
        lambda mesh, a, b: OfItsRows.apply(a, b), ("strided",), "the cotangent of out[0] is an expanded view",
    ),
    "frozen": (lambda mesh, a, b: OfFirstThatIsNeeded.apply(a, b), ("unused",), " requires no gradient"),
    "unused": (lambda mesh, a, b: OfBothOrNone.apply(a, b), (), " has no cotangent"),
    "call_before": (rows_of_the_first_call, ("call_between",), "the function was called with other sizes before"),
    "call_between": (
        lambda mesh, a, b: OfTheLastCall.apply(a, b, mesh.rank("tp")), (),
        "the function is called again with other ",
    ),
    "second_backward": (lambda mesh, a, b: InOneBuffer.apply(a, b), (), "backward runs a second time"),
    "one_storage": (of_its_storage, ("strided", "expanded"), "the inputs are views of one buffer"),
    "same_tensor": (cached_by_address, (), "a and b are the same tensor"),
    "no_grad": (
        lambda mesh, a, b: (a * (2 if torch.is_grad_enabled() else 3), 2 * b), ("inference_mode",),
        "it is called under torch.no_grad()",
    ),
    "inference_mode": (
        lambda mesh, a, b: (a * (3 if torch.is_inference_mode_enabled() else 2), 2 * b), (),
        "it is called under torch.inference_mode()",
    ),
    "overwritten": (lambda mesh, a, b: (a.mul(2), b), (), "the caller overwrites its inputs afterwards"),
    "nan_cotangents": (
        lambda mesh, a, b: (2 * a * ~(torch.arange(len(a))[:, None] == 0), 2 * b), (),
        "the cotangent of out[0] is NaN in rows that are not read",
    ),
    "wider_inputs": (lambda mesh, a, b: (2 * a, (2 if b.dtype == a.dtype else 3) * b), (), "b is float32"),
    "int32": (
        lambda mesh, a, b: (2 * a, 2 * (b.clone().fill_(2**32) // 2**32 * b).to(a)), (), "b is int32",
    ),
    "autocast": (
        lambda mesh, a, b: (a @ (2.0 * torch.eye(a.shape[-1])), 2 * b), (),
        "it is called under torch.autocast to bfloat16",
    ),
    "recomputed": (
        of_one_forward_for_each_backward, ("call_before", "call_between", "second_derivative"),
        "backward computes it again, under torch.utils.checkpoint",
    ),
    "second_derivative": (half_of_the_second_derivative, (), "its gradient is differentiated again"),
}  # fmt: skip


def first_row(case, inputs):
    return np.broadcast_to(np.arange(case.b)[:, None] == 0, inputs["a"].shape)


REFERENCES = {
    "overwritten": lambda a, b: (2.0 * a, b),
    "int32": lambda a, b: (2.0 * a, 2.0 * b.astype(a.dtype)),
    "nan_cotangents": lambda a, b: (jnp.where(jnp.arange(len(a))[:, None] == 0, 0.0, 2.0 * a), 2.0 * b),
}


def declared(name, *excluded):
    function, others, _ = WRONG[name]

    def wrong(mesh, a, b):
        return function(mesh, a, b)

    wrong.__name__ = f"wrong_{name}"
    floats = values("normal", "ones")
    return scheme(
        reference=REFERENCES.get(name, lambda a, b: (2.0 * a, 2.0 * b)),
        mesh={"tp": (1, 2)}, inputs={"a": "b v/tp", "b": "b v/tp"}, outputs=("b v/tp", "b v/tp"),
        draw={"a": floats, "b": integers(1, 9) if name == "int32" else floats},
        **({"dtypes": ("bfloat16",), "wider_inputs": ("b",)} if name == "wider_inputs" else {"dtypes": ("float32",)}),
        engines=("lockstep",), excluded_conditions=(*others, *excluded),
        nan_cotangents={"out[0]": first_row} if name == "nan_cotangents" else None,
    )(wrong)  # fmt: skip


# Wrong if another call has the same shapes, right if it has other sizes: function, reference, excluded.
OF_THE_SAME_SHAPES = {
    "call_between": (in_a_buffer_of_its_shape, lambda a, b: (a * a, 2.0 * b), "same_tensor"),
    "call_before": (cached_by_shape, lambda a, b: (jnp.abs(a), 2.0 * b), "call_between"),
}


def of_the_same_shapes(name):
    function, reference, excluded = OF_THE_SAME_SHAPES[name]
    return scheme(
        reference=reference, mesh={"tp": (1, 2)}, inputs={"a": "b v/tp", "b": "b v/tp"}, outputs=("b v/tp", "b v/tp"),
        draw={"a": values("normal"), "b": values("normal")}, dtypes=("float32",), engines=("lockstep",),
        excluded_conditions=("inference_mode", "overwritten", excluded),
    )(function)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """No state is left from one case to the next, as where each runs in processes of its own."""
    run = verify_one_case.run

    def run_afresh(*arguments, **more):
        for state in (SIZES, BUFFERS, FIRST, CALLS):
            state.clear()
        return run(*arguments, **more)

    monkeypatch.setattr(verify_one_case, "run", run_afresh)


def test_there_is_one_for_each_condition():
    assert tuple(WRONG) == CONDITIONS


@pytest.mark.usefixtures("unexplained")
@pytest.mark.fast_values(4)
@pytest.mark.parametrize("name", WRONG)
def test_each_condition_finds_its_own_mistake(name):
    report = declared(name).verify(examples=MANY)
    assert list(report.case.conditions) == [name], str(report)
    assert "\n  only when " in str(report) and WRONG[name][2] in str(report), str(report)
    may_be_meant = name in NOT_ALWAYS_PROMISED or report.verdict == "raised"
    advice = f"declare excluded_conditions={(*report.excluded_conditions, name)!r}"
    assert (advice in " ".join(str(report).split())) == may_be_meant, str(report)  # a long sentence has line breaks


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_SAME_SHAPES)
def test_a_call_with_equal_shapes_finds_state_indexed_by_shape(name):
    report = of_the_same_shapes(name).verify(examples=MANY)
    assert list(report.case.conditions) == [name], str(report)
    assert report.case.conditions[name]["dims"] == report.case.dims, str(report)
    assert report.smallest and dict(report.case.dims) == {"b": 1, "v": 1}
    when = {"call_before": "was called with other values before", "call_between": "is called again with other values"}
    assert f"\n  only when the function {when[name]}" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_SAME_SHAPES)
def test_it_is_missed_where_the_other_call_has_other_sizes(name):
    declaration = of_the_same_shapes(name)
    for seed in range(EXAMPLES):
        case = draw_case(declaration, seeded_chooser(seed), {}, seed=seed, with_conditions=True)
        if all(case.conditions[other]["dims"] != case.dims for other in OTHER_CALLS if other in case.conditions):
            assert verify_case(declaration, case).ok


def test_other_calls_have_the_same_shapes_or_other_sizes():
    declaration = declared("unused")
    same = []
    for seed in range(200):
        case = draw_case(declaration, seeded_chooser(seed), {}, seed=seed, with_conditions=True)
        records = [case.conditions[name] for name in OTHER_CALLS if name in case.conditions]
        assert all((record["seed"], record["values"]) != (case.seed, case.values) for record in records)
        same += [record["dims"] == case.dims for record in records]
    assert len(same) > 30 and 0.3 < sum(same) / len(same) < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_without_the_condition_it_is_missed(name):
    report = declared(name, name).verify(examples=EXAMPLES)
    assert report.ok, str(report)


def test_half_of_the_cases_have_no_condition_and_no_condition_is_rare():
    right = declared("unused")
    cases = [draw_case(right, seeded_chooser(seed), {}, seed=seed, with_conditions=True) for seed in range(400)]
    in_addition = {*STORAGE, "overwritten", "autocast", "second_derivative"}
    without_conditions = [case for case in cases if not set(case.conditions) - in_addition]
    assert 0.4 < len(without_conditions) / len(cases) < 0.6
    everywhere = set(CONDITIONS) - {"nan_cotangents", "wider_inputs", "int32"}
    counts = {name: sum(name in case.conditions for case in cases) for name in everywhere}
    assert min(counts.values()) > 8, counts
    assert 0.4 < sum(bool(set(STORAGE) & set(case.conditions)) for case in cases) / len(cases) < 0.6
    assert not any(draw_case(right, seeded_chooser(seed), {}, seed=seed).conditions for seed in range(20))


def test_a_parameter_is_never_a_strided_view():
    """No module has one; by the argument `module`, or by its name."""
    spec = {"x": "b d tp=I", "weight": "d k tp=I", "scale": "d tp=I"}
    declaration = scheme(
        reference=lambda x, weight, scale: (x * scale) @ weight, mesh={"tp": (1,)}, inputs=spec, outputs="b k tp=I"
    )(lambda mesh, x, weight, scale: (x * scale) @ weight)
    viewed = set()
    for seed in range(200):
        case = draw_case(declaration, seeded_chooser(seed), {}, seed=seed, with_conditions=True)
        viewed |= {*case.conditions.get("strided", ()), *case.conditions.get("expanded", ())}
    assert {"x", "scale"} <= viewed
    assert "weight" not in viewed


def test_a_case_travels_with_its_conditions():
    declaration = declared("call_between")
    case = next(
        case
        for case in (draw_case(declaration, seeded_chooser(n), {}, seed=n, with_conditions=True) for n in range(400))
        if "call_between" in case.conditions
        and not {"frozen", "unused", "same_tensor"} & set(case.conditions)
        and case.dims != case.conditions["call_between"]["dims"]
    )
    assert CaseSpec.from_json(case.json) == case
    assert verify_case(declaration, CaseSpec.from_json(case.json)).verdict == "mismatch"
    without = case.replace(conditions={})
    assert '"conditions"' not in without.json and CaseSpec.from_json(without.json) == without
    assert verify_case(declaration, without).ok


def test_conditions_are_removed_one_at_a_time():
    case = declared("strided").case(b=3, tp=2).replace(
        conditions={"strided": {"a": "stepped", "b": "stepped"}, "second_backward": True}
    )  # fmt: skip
    assert [fewer.conditions for fewer in with_one_less(case)] == [
        {"second_backward": True},
        {"strided": {"a": "stepped", "b": "stepped"}},
        {"strided": {"b": "stepped"}, "second_backward": True},
        {"strided": {"a": "stepped"}, "second_backward": True},
    ]


def test_check_names_the_conditions_that_it_was_called_under():
    declaration = declared("second_backward")
    case = declaration.case(b=3, v=4, tp=2).replace(conditions={"second_backward": True, "expanded": ["a"]})
    with pytest.raises(AssertionError, match="seen when backward runs a second time and a is an expanded view"):
        check(case)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("condition", ["call_before", "call_between", "second_backward"])
def test_results_of_other_calls_are_waited_for(condition, engine):
    """A functional collective's result waits at its first use; results that are not compared have none."""

    older = "all_gather_tensor_autograd"  # its name before torch 2.13
    all_gather = getattr(functional, "all_gather_single_autograd", None) or getattr(functional, older)

    def gathered(mesh, x):
        return all_gather(x, 0, mesh["tp"])

    declaration = scheme(
        reference=lambda x: x, mesh={"tp": (2,)}, inputs={"x": "b/tp"}, outputs="b tp=R", dtypes=("float32",)
    )(gathered)  # fmt: skip
    case = declaration.case(b=4)
    conditions = {condition: True if condition == "second_backward" else record_of(case)}
    assert verify_case(declaration, case.replace(conditions=conditions, engine=engine)).ok


@pytest.mark.parametrize(
    ("excluded", "says"), [("strided", r"is the text 'strided'; write \('strided',\)"), (("strides",), "has 'strides'")]
)
def test_an_unknown_condition_is_rejected(excluded, says):
    with pytest.raises(ValueError, match=f"excluded_conditions {says}"):
        scheme(
            reference=lambda x: x, mesh={"tp": (2,)}, inputs={"x": "b/tp"}, outputs="b/tp", excluded_conditions=excluded
        )(lambda mesh, x: x)


@pytest.mark.slow
def test_a_scheme_may_exclude_a_larger_world():
    """Cases stand inside one by default, where a collective of the default group is a finding."""

    def total(mesh, x):
        return all_reduce(x, torch.distributed.group.WORLD)

    declare = partial(
        scheme, reference=lambda x: x, mesh={"tp": (2,)}, inputs={"x": "b tp=P"}, outputs="b tp=I", dtypes=("float32",)
    )  # fmt: skip
    assert declare()(total).verify(examples=20).verdict != "equal"
    assert declare(excluded_conditions=("larger_world",))(total).verify(examples=20).ok
