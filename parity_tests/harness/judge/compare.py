"""The value oracle: compare every element of what the ranks returned with its computed budget.

The numbers of one element, under the names that `element_budgets` gives them:

    error         = | got - want |                 want: of the reference, in float64
    scale         = max( |want| , spread / u )     the size of the terms that were summed into the element
    last_rounding = u_out * |want|                 of the result; of a sum over ranks u_out * sum of |rank's term|
    summation     = C * u_accumulator * sqrt(terms) * scale + last_rounding
    budget        = max( summation , K * sqrt(roundings) * spread ) + terms * lost_below

u is the unit roundoff of the tested dtype, u_accumulator that of float32 or of a wider tested dtype, u_out that of the
output, but no more than u: a narrower output was not declared. `spread` is the root mean square of the changes of the
element under random rounding, but at least the median over the tensor: rounding of inputs and cotangents to the tested
dtype, and of every operation of the reference to the dtype that intermediates have (see rounding.py). A scheme of `sums="float32"` rounds neither inputs nor intermediates to
a narrower dtype, so `spread` and u in `scale` are then of float32. `lost_below` is
what underflow takes of one term at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.conditions import has_gradients
from parity_tests.harness.declare.declared import Argument, Declared
from parity_tests.harness.declare.spec import size_of
from parity_tests.harness.judge.reference import UNIT_ROUNDOFF, Reference, accumulator_roundoff, unit_of_inputs
from parity_tests.harness.run.program import RankResult
from parity_tests.harness.run.stitch import Stitched, gradient_shards, owners, stitch

# The two constants of every budget. They change only together with the figures of false alarms and of injected bugs.
C = 4.0
K = 8.0
# The dtype that a sum may have been accumulated in by mistake.
COARSER = {"float64": "float32", "float32": "bfloat16", "bfloat16": "bfloat16", "float16": "float16"}


@dataclass(frozen=True)
class TensorComparison:
    """One output or gradient of one case beside its reference: errors, budgets, and whether it is within them."""

    name: str
    role: str  # output | gradient
    argument: Argument
    dtype: str
    error: float  # of the worst element, as are the next three
    budget: float
    ratio: float
    where: tuple[int, ...]
    copy: int  # the number of the stitched copy with the worst element
    stitched: Stitched
    want: np.ndarray
    element_budgets: np.ndarray
    coarse_budgets_of: Callable[[], np.ndarray]
    owners_of: Callable[[], Mapping[str, np.ndarray]]
    gradient_is_none: np.ndarray | None = None  # where no rank returned a gradient of this copy

    # Evidence on a wrong tensor, computed on first use.

    @cached_property
    def coarse_budgets(self) -> np.ndarray:
        """The budgets if sums had been accumulated in COARSER[tested dtype]."""
        return self.coarse_budgets_of()

    @cached_property
    def owners(self) -> Mapping[str, np.ndarray]:
        """For each axis that shards the tensor: which coordinate holds each element."""
        return self.owners_of()

    def __getstate__(self) -> dict[str, Any]:
        """Pickled with the arrays that the two functions return, since a user's layout in them may be a lambda."""
        arrays = {
            "coarse_budgets_of": partial(np.asarray, self.coarse_budgets),
            "owners_of": partial(dict, self.owners),
        }
        return {**self.__dict__, **arrays}

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0

    @property
    def got(self) -> np.ndarray:
        return self.stitched.copies[self.copy]

    @property
    def label(self) -> str:
        if self.role == "gradient":
            return f"d/d {self.name}"
        return f"{self.name} after" if self.argument.modified else self.name


def index_text(index: tuple[int, ...]) -> str:
    """The place of an element as reports write it: `(0,3)`."""
    return f"({','.join(map(str, index))})"


def compare(
    scheme: Declared,
    case: CaseSpec,
    results: Sequence[RankResult],
    reference: Reference,
    undefined: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> list[TensorComparison]:
    """A comparison of each output and of each gradient, whose `undefined` elements may be anything."""
    tensors = []
    for arg in scheme.outputs:
        shards = [result.outputs[arg.name] for result in results]
        stitched = stitch(arg, shards, case, scheme.layouts, "output")
        want = reference.outputs[arg.name]
        if arg.is_integer:
            tensors.append(_exact(arg, stitched, want, partial(owners, arg, case, scheme.layouts)))
            continue
        spread = reference.output_spread[arg.name]
        count = _terms(scheme, case, arg, "output") * stitched.summed_ranks
        dtype = results[0].dtypes[arg.name]
        tensors.append(_compare_elements(scheme, case, arg, "output", stitched, want, spread, count, dtype))
    for arg in scheme.inputs:
        if not arg.differentiable or not has_gradients(case, arg.name):
            continue
        shards = gradient_shards(scheme, arg, case, results)
        stitched = stitch(arg, shards, case, scheme.layouts, "gradient")
        count = _terms(scheme, case, arg, "gradient") * stitched.summed_ranks
        want, spread = reference.gradients[arg.name], reference.gradient_spread[arg.name]
        # Without a cotangent of some output no path may lead back to an input: None is then as good as zeros.
        gradient_is_none = None
        if "unused" not in case.conditions and any(result.gradients[arg.name] is None for result in results):
            is_there = [
                np.full(shard.shape, float(result.gradients[arg.name] is not None))
                for shard, result in zip(shards, results, strict=True)
            ]
            gradient_is_none = stitch(arg, is_there, case, scheme.layouts, "gradient").copies == 0.0
        comparison = _compare_elements(
            scheme,
            case,
            arg,
            "gradient",
            stitched,
            want,
            spread,
            count,
            case.dtype,
            gradient_is_none=gradient_is_none,
            undefined=undefined.get(arg.name),
        )
        tensors.append(comparison)
    return tensors


def element_budgets(
    want: np.ndarray,
    spread: np.ndarray,
    terms: int,
    dtype: str,
    out_dtype: str,
    roundings: int,
    u_accumulator: float,
    rounded: np.ndarray | float = 0.0,
    u_spread: float | None = None,
) -> np.ndarray:
    """The largest error each element may have, from dtype, number of terms and conditioning, by the formula above.

    `rounded` is the size of what is rounded last, where that is more than the element: the terms of a sum over ranks.
    `u_spread` is the rounding that `spread` follows from, if not of the tested dtype.
    """
    u = UNIT_ROUNDOFF[dtype]
    size = np.where(np.isfinite(want), np.abs(want), 0.0)
    spread = np.maximum(spread, float(np.median(spread)) if spread.size else 0.0)
    scale = np.maximum(size, spread / (u_spread or u))
    # An output wider than the tested dtype has less to round; a narrower one was not declared and gets no more.
    last_rounding = min(UNIT_ROUNDOFF[out_dtype], max(u, u_accumulator)) * np.maximum(size, rounded)
    summation = C * u_accumulator * math.sqrt(max(terms, 1)) * scale + last_rounding
    return np.maximum(summation, K * math.sqrt(roundings) * spread) + max(terms, 1) * lost_below(dtype)


def element_budgets_at(
    scheme: Declared, case: CaseSpec, tensor: TensorComparison, want: np.ndarray, spread: np.ndarray
) -> np.ndarray:
    """The budgets of a tensor if its reference had these values, as at other inputs."""
    count = _terms(scheme, case, tensor.argument, tensor.role) * tensor.stitched.summed_ranks
    u_accumulator = accumulator_roundoff(case.dtype)
    return element_budgets(
        want, spread, count, case.dtype, tensor.dtype, scheme.roundings, u_accumulator,
        u_spread=unit_of_inputs(scheme, case),
    )  # fmt: skip


def lost_below(dtype: str) -> float:
    """The most that underflow takes of one term.

    float32 and its like may be flushed to zero below the least normal number, bfloat16 too, which is computed in it.
    float16 keeps its subnormal numbers wherever it is computed, and their spacing is what a term is rounded to.
    """
    info = torch.finfo(getattr(torch, dtype))
    return info.tiny * info.eps if dtype == "float16" else info.tiny


def max_finite(dtype: str) -> float:
    """The largest finite number of a dtype; infinity for integers and booleans, of which none overflows."""
    return torch.finfo(getattr(torch, dtype)).max if "float" in dtype else np.inf


def errors(got: np.ndarray, want: np.ndarray, dtype: str) -> np.ndarray:
    """|got - want|; infinities and NaN must be in the same places, and what overflows the dtype may be infinite."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(got - want)
    difference = np.where(np.isnan(difference), np.inf, difference)
    return np.where(same_number(got, want, max_finite(dtype)), 0.0, difference)


def same_number(got: np.ndarray, want: np.ndarray | float, max_finite: float = np.inf) -> np.ndarray:
    """Where two are equal, both NaN, or `got` is the infinity that a `want` beyond `max_finite` overflows to."""
    with np.errstate(invalid="ignore"):
        overflowed = np.isinf(got) & (np.abs(want) > max_finite) & (np.sign(got) == np.sign(want))
    return (got == want) | (np.isnan(got) & np.isnan(want)) | overflowed


def beyond_budget(tensor: TensorComparison, values: np.ndarray) -> np.ndarray:
    """Where these values, or any of these copies, are further from the reference than the budget allows."""
    if tensor.argument.is_integer:
        return np.not_equal(values, tensor.want)
    return np.greater(errors(values, tensor.want, tensor.dtype), tensor.element_budgets)


def wrong_elements(tensor: TensorComparison) -> np.ndarray:
    """Where some copy is beyond its budget, or the worst copy lacks a gradient that is not 0; nowhere if it is `ok`."""
    wrong = np.logical_or.reduce(beyond_budget(tensor, tensor.stitched.copies), axis=0)
    return wrong if tensor.gradient_is_none is None else wrong | (tensor.gradient_is_none & (tensor.want != 0.0))


def _compare_elements(
    scheme: Declared,
    case: CaseSpec,
    arg: Argument,
    role: str,
    stitched: Stitched,
    want: np.ndarray,
    spread: np.ndarray,
    terms: int,
    out_dtype: str,
    gradient_is_none: np.ndarray | None = None,  # where no rank returned a gradient
    undefined: np.ndarray | None = None,  # where any gradient is as good as another
) -> TensorComparison:
    """Compare every element with its budget. A gradient that no rank returned is right only where zero is exact."""
    # 1. The budget of each element, and the arguments of that of sums in a coarser dtype, for the evidence.
    u, u_accumulator = unit_of_inputs(scheme, case), accumulator_roundoff(case.dtype)
    rounded = stitched.size_of_terms
    budgets = element_budgets(want, spread, terms, case.dtype, out_dtype, scheme.roundings, u_accumulator, rounded, u)
    if undefined is not None:
        budgets = np.where(undefined, np.inf, budgets)
    coarse = COARSER[case.dtype]
    u_coarse = UNIT_ROUNDOFF[coarse]
    in_coarse = spread * (u_coarse / u), terms, coarse, coarse, max(scheme.roundings, 1), u_coarse
    # 2. Errors in budgets, of every copy.
    all_errors = errors(stitched.copies, want[None], out_dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # a ratio that overflows is infinite
        ratios = np.where(np.isinf(budgets[None]), 0.0, all_errors / budgets[None])
    if gradient_is_none is not None:  # zeros may be within the budget, but None is wrong where the gradient is not 0
        ratios = np.where(gradient_is_none & (want[None] != 0.0) & (ratios <= 1.0), np.inf, ratios)
    # 3. The worst element of all copies decides.
    copy, where, ratio, error, budget = 0, (), 0.0, 0.0, float(budgets.max(initial=0.0))
    if ratios.size:
        worst = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
        copy, where = int(worst[0]), tuple(int(i) for i in worst[1:])
        ratio, error, budget = float(ratios[worst]), float(all_errors[worst]), float(budgets[where])
    return TensorComparison(
        name=arg.name,
        role=role,
        argument=arg,
        dtype=out_dtype,
        error=error,
        budget=budget,
        ratio=ratio,
        where=where,
        copy=copy,
        stitched=stitched,
        want=want,
        element_budgets=budgets,
        coarse_budgets_of=partial(element_budgets, want, *in_coarse),
        owners_of=partial(owners, arg, case, scheme.layouts),
        gradient_is_none=None if gradient_is_none is None else gradient_is_none[copy],
    )


def _exact(
    arg: Argument, stitched: Stitched, want: np.ndarray, owners_of: Callable[[], Mapping[str, np.ndarray]]
) -> TensorComparison:
    """Integers and booleans: equal or not."""
    wrong = (stitched.copies != want[None]).astype(np.float64)
    worst = np.unravel_index(int(np.argmax(wrong)), wrong.shape) if wrong.size else (0,)
    ratio = math.inf if wrong.any() else 0.0
    where = tuple(int(i) for i in worst[1:])
    error = np.abs(stitched.copies[worst].astype(np.float64) - float(want[where])) if wrong.any() else 0.0
    # Unequal integers differ by 1 or more, so that clues, which compare with `<=`, take 0.5 as "equal".
    budgets = np.full(want.shape, 0.5)
    floats = replace(stitched, copies=stitched.copies.astype(np.float64), parts=stitched.parts.astype(np.float64))
    return TensorComparison(
        name=arg.name,
        role="output",
        argument=arg,
        dtype=str(want.dtype),
        error=float(error),
        budget=0.0,
        ratio=ratio,
        where=where,
        copy=int(worst[0]),
        stitched=floats,
        want=want.astype(np.float64),
        element_budgets=budgets,
        coarse_budgets_of=partial(np.asarray, budgets),
        owners_of=owners_of,
    )


def _terms(scheme: Declared, case: CaseSpec, arg: Argument, role: str) -> int:
    """How many terms are summed into one element: of an output the declared reduction, else what the shapes allow.

    That is all dims that this tensor lacks, or one that it has, summed over and put back, as in a softmax; both of a
    gradient, if the one that it has is declared: that of values adds up the rows, and the heads that share them.
    """
    if scheme.reduction is not None and role == "output":
        return math.prod(size_of(name, case.dims) for name in scheme.reduction)
    tensors = scheme.inputs if role == "output" else (*scheme.inputs, *scheme.outputs)
    names = {name for other in tensors for name in other.spec.dim_names}
    names |= set(scheme.reduction or ())
    lacking = math.prod(size_of(name, case.dims) for name in names - set(arg.spec.dim_names))
    own = names & set(arg.spec.dim_names)
    put_back = max([1, *(size_of(name, case.dims) for name in own & set(scheme.reduction or ()))])
    return max([lacking * put_back, *(size_of(name, case.dims) for name in own)])
