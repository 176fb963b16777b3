"""Budgets on examples computed by hand; non-finite and missing values; errors to catch and errors to accept."""

import math

import numpy as np
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from shardproof import scheme, values
from shardproof.declare.case import DTYPES
from shardproof.engines.program import Program, RankResult
from shardproof.judge import compare
from shardproof.judge.compare import C, K
from shardproof.judge.reference import UNIT_ROUNDOFF, evaluate
from shardproof.verify_one_case import verify_case

U32, U16 = 2.0**-24, 2.0**-8


def test_constants():
    assert (C, K) == (4.0, 8.0)
    assert UNIT_ROUNDOFF == {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
    for dtype in DTYPES:
        assert UNIT_ROUNDOFF[dtype] == torch.finfo(getattr(torch, dtype)).eps / 2


def one_budget(want, spread, terms=1, dtype="float32", out_dtype=None, roundings=1):
    narrow = min(UNIT_ROUNDOFF[dtype], U32)
    arrays = np.array([want]), np.array([spread])
    return float(compare.element_budgets(*arrays, terms, dtype, out_dtype or dtype, roundings, narrow)[0])


TINY = {"float32": 2.0**-126, "bfloat16": 2.0**-126}


def test_budget_by_hand():
    """One element: c u_acc sqrt(n) max(|ref|, D/u) + u |ref|, or k D, whichever is more; and n tiny."""
    # Nothing moves it: the terms are as large as the result. 4 u 3 + u 3.
    assert one_budget(3.0, 0.0) == 15 * U32 + TINY["float32"]
    # Sixteen terms: 4 u sqrt(16) 3 + u 3.
    assert one_budget(3.0, 0.0, terms=16) == 51 * U32 + 16 * TINY["float32"]
    # Terms of size 100 cancelled to 3: 4 u 100 + u 3 is less than 8 u 100.
    assert one_budget(3.0, 100 * U32) == 800 * U32 + TINY["float32"]
    assert one_budget(3.0, 100 * U32, terms=16) == 1603 * U32 + 16 * TINY["float32"]
    # Four roundings in between: 8 sqrt(4) D.
    assert one_budget(3.0, 100 * U32, roundings=4) == 1600 * U32 + TINY["float32"]
    # bfloat16 is summed in float32 and rounded once at the end.
    assert one_budget(3.0, 0.0, dtype="bfloat16") == 12 * U32 + 3 * U16 + TINY["bfloat16"]
    assert one_budget(3.0, 0.0, dtype="bfloat16", out_dtype="float32") == 15 * U32 + TINY["bfloat16"]
    # An output narrower than the tested dtype gets no more for it.
    assert one_budget(3.0, 0.0, out_dtype="bfloat16") == one_budget(3.0, 0.0)


def test_float16_loses_to_underflow_its_subnormal_spacing_alone():
    assert one_budget(0.0, 0.0, terms=66, dtype="float16") == 66 * 2.0**-24
    assert one_budget(0.0, 0.0, terms=66, dtype="bfloat16") == 66 * TINY["bfloat16"]


def test_a_small_float16_sum_without_one_shard_is_caught():
    def first_of_two(mesh, x):
        y = x.float().sum(-1)
        return (y if mesh.rank("tp") == 0 else y * 0).to(x.dtype)

    declaration = scheme(
        reference=lambda x: x.sum(-1), mesh={"tp": (2,)}, inputs={"x": "b v/tp"}, outputs="b tp=P", nograd=("x",)
    )(first_of_two)
    report = verify_case(
        declaration, declaration.case(b=1, v=66, dtype="float16"), arrays={"x": np.full((1, 66), 2.0**-14)}
    )
    assert not report.ok and report.tensors[0].error == 33 * 2.0**-14


def test_a_lucky_direction_cannot_tighten_one_element():
    spread = np.array([100 * U32, 100 * U32, 0.0])
    allowed = compare.element_budgets(np.full(3, 3.0), spread, 1, "float32", "float32", 1, U32)
    assert len(set(allowed.tolist())) == 1


def test_infinite_references_have_a_finite_budget():
    allowed = compare.element_budgets(np.array([np.inf, -np.inf, np.nan]), np.zeros(3), 1, "float32", "float32", 1, U32)
    assert allowed.tolist() == [TINY["float32"]] * 3
    assert compare.element_budgets(np.zeros((0, 3)), np.zeros((0, 3)), 1, "float32", "float32", 1, U32).shape == (0, 3)


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        (1.5, 1.0, 0.5),
        (math.inf, math.inf, 0.0),
        (-math.inf, -math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.inf, 1.0, math.inf),
        (1.0, math.inf, math.inf),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.nan, math.inf, math.inf),
        (math.nan, math.nan, 0.0),
        (0.0, -0.0, 0.0),
        # A value that overflows the dtype may be infinite, with the same sign.
        (math.inf, 1e39, 0.0),
        (-math.inf, -1e39, 0.0),
        (-math.inf, 1e39, math.inf),
        (math.inf, 3e38, math.inf),
        (math.nan, 1e39, math.inf),
    ],
)
def test_errors_at_non_finite_values(got, want, error):
    assert compare.errors(np.array([got]), np.array([want]), "float32").tolist() == [error]


def test_overflow_depends_on_the_dtype():
    got, want = np.array([np.inf]), np.array([7e4])
    assert compare.errors(got, want, "float16").tolist() == [0.0]
    assert compare.errors(got, want, "bfloat16").tolist() == [np.inf]


# All tensors, from the ranks' results


@scheme(
    reference=lambda x, w: (x * w, x.sum(-1)),
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "b v/tp", "w": "b v/tp"},
    outputs=("b v/tp", "b tp=P"),
    draw={"x": values("normal"), "w": values("normal")},
)
def product_and_sum(mesh, x, w):
    return x * w, (x if x.dtype == torch.float64 else x.float()).sum(-1)


def tensors_of(declaration, case, spoil=None):
    """The comparisons of a case, or of the same results after `spoil(results)`."""
    program = Program.of(declaration)
    reference = evaluate(declaration, program, case)
    from shardproof.engines.engines import run

    results = list(run(program, case, "lockstep").results)
    if spoil:
        spoil(results)
    return {tensor.label: tensor for tensor in compare.compare(declaration, case, results, reference)}


CASE = product_and_sum.case(tp=4, b=3, v=8, dtype="float32")


def test_every_output_and_gradient_is_compared():
    tensors = tensors_of(product_and_sum, CASE)
    assert list(tensors) == ["out[0]", "out[1]", "d/d x", "d/d w"]
    assert all(tensor.ok for tensor in tensors.values())


@pytest.mark.fast_values(10)
@pytest.mark.parametrize("label", ["out[0]", "out[1]", "d/d x", "d/d w"])
@pytest.mark.parametrize("times", [1.5, 10.0, 1e6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_error_beyond_its_budget_is_caught_wherever_it_is(label, times, dtype):
    case = CASE.replace(dtype=dtype)
    clean = tensors_of(product_and_sum, case)[label]
    rng = np.random.default_rng(0)
    for _ in range(3):
        at = tuple(int(rng.integers(n)) for n in clean.want.shape)
        wrong = times * clean.element_budgets[at] + abs(clean.got[at] - clean.want[at])

        def spoil(results, at=at, wrong=wrong):
            row, column = at[0], (at[1] if len(at) > 1 else 0)
            rank, local = divmod(column, 2)
            name = clean.name
            table = results[rank].gradients if clean.role == "gradient" else results[rank].outputs
            table[name][(row, local)[: len(at)]] += wrong

        by_label = tensors_of(product_and_sum, case, spoil)
        assert not by_label[label].ok and by_label[label].where == at
        assert by_label[label].ratio > 0.9 * times
        assert all(tensor.ok for other, tensor in by_label.items() if other != label)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rank", range(4))
def test_one_number_that_is_not_finite_is_caught(value, rank):
    def spoil(results):
        results[rank].outputs["out[0]"][2, 1] = value

    tensor = tensors_of(product_and_sum, CASE, spoil)["out[0]"]
    assert tensor.ratio == np.inf and tensor.where == (2, 2 * rank + 1)


def test_an_overflowing_error_is_infinite_in_budgets():
    def spoil(results):
        results[0].outputs["out[0]"][0, 0] = 1e305

    tensor = tensors_of(product_and_sum, CASE, spoil)["out[0]"]
    assert tensor.ratio == np.inf and tensor.where == (0, 0)


def test_the_worst_copy_of_a_replicated_tensor_is_reported():
    @scheme(reference=lambda x: x * 2.0, mesh={"tp": (4,)}, inputs={"x": "b tp=I"}, outputs="b tp=I")
    def doubled(mesh, x):
        return x * 2

    def spoil(results):
        results[2].outputs["out"][1] += 1.0

    tensor = tensors_of(doubled, doubled.case(b=3), spoil)["out"]
    assert not tensor.ok
    assert (tensor.copy, tensor.where, tensor.stitched.coordinates[tensor.copy]) == (2, (1,), {"tp": 2})


# Gradients that are missing


def unused(mesh, x, y, w):
    return x * 1


def unused_scheme(reference, function=unused):
    return scheme(
        reference=reference, mesh={"tp": (2,)}, inputs={"x": "b tp=I", "y": "b/tp", "w": "b tp=R"}, outputs="b tp=I",
        draw={"x": values("normal"), "y": values("normal"), "w": values("normal")},
    )(function)  # fmt: skip


def test_none_is_zero_where_the_gradient_is_zero():
    tensors = tensors_of(
        *(lambda declaration: (declaration, declaration.case(b=4)))(unused_scheme(lambda x, y, w: x * 1.0))
    )
    assert all(tensor.ok for tensor in tensors.values()) and tensors["d/d y"].ratio == 0.0


def test_none_is_wrong_where_the_gradient_is_not_zero_however_small():
    declaration = unused_scheme(lambda x, y, w: x + 1e-42 * y + 1e-30 * w)
    tensors = tensors_of(declaration, declaration.case(b=4))
    assert tensors["out"].ok and tensors["d/d x"].ok and not tensors["d/d y"].ok and not tensors["d/d w"].ok
    assert (
        tensors["d/d y"].error < tensors["d/d y"].budget and tensors["d/d y"].ratio == np.inf
    )  # zeros would be near enough


def test_the_ratio_of_a_missing_gradient_is_its_error_over_its_budget():
    tensor = tensors_of(
        *(lambda declaration: (declaration, declaration.case(b=4)))(unused_scheme(lambda x, y, w: x + y + w))
    )["d/d w"]
    assert tensor.ratio == tensor.error / tensor.budget > 1


def test_one_rank_of_a_sum_may_have_no_gradient():
    def only_rank_0(mesh, x, y, w):
        return x + w if mesh.rank("tp") == 0 else x * 1

    def spoil(results):
        results[1].outputs["out"][:] = results[0].outputs["out"]

    declaration = unused_scheme(lambda x, y, w: x + w, only_rank_0)
    assert tensors_of(declaration, declaration.case(b=4), spoil)["d/d w"].ok


def test_one_shard_without_a_gradient_is_caught():
    def spoil(results):
        results[1].gradients["w"] = None

    tensor = tensors_of(product_and_sum, CASE, spoil)["d/d w"]
    assert tensor.ratio == tensor.error / tensor.budget > 1 and tensor.where[1] in (2, 3)


# Integers


def test_integers_are_equal_or_not():
    @scheme(reference=lambda x: x.argmax(-1), mesh={"tp": (2,)}, inputs={"x": "b v tp=I"}, outputs="b")
    def best(mesh, x) -> Int[Tensor, "b"]:
        return x.argmax(-1)

    case = best.case(b=3, v=5)
    assert tensors_of(best, case)["out"].ratio == 0.0

    def spoil(results: list[RankResult]) -> None:
        results[1].outputs["out"][2] += 1

    tensor = tensors_of(best, case, spoil)["out"]
    assert (tensor.ratio, tensor.error, tensor.where, tensor.copy) == (np.inf, 1.0, (2,), 1)


# Terms


def test_how_many_terms():
    @scheme(
        reference=lambda x, w: x @ w, mesh={"tp": (2,)}, inputs={"x": "b d/tp", "w": "d/tp f"}, outputs="b f tp=P",
        dims={"b": (3,), "d": (10,), "f": (5,)},
    )  # fmt: skip
    def matmul(mesh, x, w):
        return x @ w

    case = matmul.case()
    x, w = matmul.inputs
    assert compare._terms(matmul, case, matmul.outputs[0], "output") == 10
    assert compare._terms(matmul, case, x, "gradient") == 10  # 5 are summed; d, which stays, has 10
    assert compare._terms(matmul, case, w, "gradient") == 10
    object.__setattr__(matmul, "reduction", ("d",))
    assert compare._terms(matmul, case, matmul.outputs[0], "output") == 10
    assert compare._terms(matmul, case, x, "gradient") == 50  # as of a softmax over d: each of 5 is itself a sum of 10
    object.__setattr__(matmul, "reduction", ())
    assert compare._terms(matmul, case, matmul.outputs[0], "output") == 1
