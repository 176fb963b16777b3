"""The value oracle: compare every element of the ranks' results with its computed budget.

The quantities for one element, named as in `element_budgets`:

    error         = | got - want |                 want: of the reference, in float64
    scale         = max( |want| , spread / u )     the size of the terms that were summed into the element
    last_rounding = u_out * |want|                 of the result; of a sum over ranks u_out * sum of |rank's term|
    summation     = C * u_accumulator * sqrt(terms) * scale + last_rounding
    budget        = max( summation , K * sqrt(roundings) * spread ) + terms * lost_below

u is the unit roundoff of the tested dtype, u_accumulator the unit roundoff of float32 or of a wider tested dtype, and
u_out the output's, but at most u, because a narrower output dtype was not declared. `spread` is the root mean
square change of the element under random rounding, but at least the median over the tensor: inputs and cotangents are
rounded to the tested dtype, and every operation of the reference to the dtype of intermediates (see rounding.py). With
`sums="float32"` inputs, cotangents and intermediates keep float32 precision, and u in `scale` is float32's.
`lost_below` is the most that underflow can take from one term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from shardproof.declare.case import CaseSpec
from shardproof.declare.conditions import has_gradients
from shardproof.declare.declared import Argument, Declared
from shardproof.declare.spec import size_of
from shardproof.engines.program import RankResult
from shardproof.engines.stitch import Stitched, gradient_shards, owners, stitch
from shardproof.judge.reference import UNIT_ROUNDOFF, Reference, accumulator_roundoff, unit_of_inputs
from shardproof.judge.storage import K

# C and K are in all budgets. Change them only together with the figures for false alarms and injected bugs.
C = 4.0
# The dtype that an implementation may have summed in by mistake.
COARSER = {"float64": "float32", "float32": "bfloat16", "bfloat16": "bfloat16", "float16": "float16"}


@dataclass(frozen=True)
class TensorComparison:
    """One output or gradient of one case and its reference: errors, budgets, and whether the errors are within them."""

    name: str
    role: str  # output | gradient
    argument: Argument
    dtype: str
    # The worst element: its error, budget, error over budget, index, and the number of its stitched copy.
    error: float
    budget: float
    ratio: float
    where: tuple[int, ...]
    copy: int
    stitched: Stitched
    want: np.ndarray
    element_budgets: np.ndarray
    coarse_budgets_of: Callable[[], np.ndarray]
    owners_of: Callable[[], Mapping[str, np.ndarray]]
    gradient_is_none: np.ndarray | None = None  # where no rank returned a gradient for this copy

    # Evidence about a wrong tensor, computed on first use.

    @cached_property
    def coarse_budgets(self) -> np.ndarray:
        """The budgets if sums had run in COARSER[tested dtype]."""
        return self.coarse_budgets_of()

    @cached_property
    def owners(self) -> Mapping[str, np.ndarray]:
        """For each axis that shards the tensor: the coordinate on it that holds each element."""
        return self.owners_of()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the arrays in place of the two functions, because a user's layout in them may be a lambda."""
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
    """The index of an element as reports write it: `(0,3)`."""
    return f"({','.join(map(str, index))})"


def compare(
    scheme: Declared,
    case: CaseSpec,
    results: Sequence[RankResult],
    reference: Reference,
    undefined: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> list[TensorComparison]:
    """Compare each output and each gradient; `undefined` elements of a gradient may have any value."""
    return list(compared(scheme, case, results, reference, undefined))


def compared(
    scheme: Declared,
    case: CaseSpec,
    results: Sequence[RankResult],
    reference: Reference,
    undefined: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Iterator[TensorComparison]:
    """The comparisons of `compare`, made one by one, so that a search for a wrong tensor can stop early."""
    for arg in scheme.outputs:
        shards = [result.outputs[arg.name] for result in results]
        stitched = stitch(arg, shards, case, scheme.layouts, "output")
        want = reference.outputs[arg.name]
        if arg.is_integer:
            yield _exact(arg, stitched, want, partial(owners, arg, case, scheme.layouts))
            continue
        spread = reference.output_spread[arg.name]
        count = _terms(scheme, case, arg, "output") * stitched.summed_ranks
        dtype = results[0].dtypes[arg.name]
        yield _compare_elements(scheme, case, arg, "output", stitched, want, spread, count, dtype)
    for arg in scheme.inputs:
        if not arg.differentiable or not has_gradients(case, arg.name):
            continue
        shards = gradient_shards(scheme, arg, case, results)
        stitched = stitch(arg, shards, case, scheme.layouts, "gradient")
        count = _terms(scheme, case, arg, "gradient") * stitched.summed_ranks
        want, spread = reference.gradients[arg.name], reference.gradient_spread[arg.name]
        # If an output has no cotangent, there may be no path back to an input: None is then as good as zeros.
        gradient_is_none = None
        if "unused" not in case.conditions and any(result.gradients[arg.name] is None for result in results):
            is_there = [
                np.full(shard.shape, float(result.gradients[arg.name] is not None))
                for shard, result in zip(shards, results, strict=True)
            ]
            gradient_is_none = stitch(arg, is_there, case, scheme.layouts, "gradient").copies == 0.0
        yield _compare_elements(
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
    """The largest error that each element may have, from dtype, number of terms and conditioning, by the formula above.

    `rounded` is the size of the number that is rounded last, if larger than the element: the terms of a sum over ranks.
    `u_spread` is the unit roundoff that `spread` was computed with, if it differs from the tested dtype's.
    """
    u = UNIT_ROUNDOFF[dtype]
    size = np.where(np.isfinite(want), np.abs(want), 0.0)
    spread = np.maximum(spread, float(np.median(spread)) if spread.size else 0.0)
    scale = np.maximum(size, spread / (u_spread or u))
    # An output wider than the tested dtype rounds less; a narrower one was not declared and gets no larger budget.
    last_rounding = min(UNIT_ROUNDOFF[out_dtype], max(u, u_accumulator)) * np.maximum(size, rounded)
    summation = C * u_accumulator * math.sqrt(max(terms, 1)) * scale + last_rounding
    return np.maximum(summation, K * math.sqrt(roundings) * spread) + max(terms, 1) * lost_below(dtype)


def element_budgets_at(
    scheme: Declared, case: CaseSpec, tensor: TensorComparison, want: np.ndarray, spread: np.ndarray
) -> np.ndarray:
    """The budgets of a tensor if its reference had these values, for example at other inputs."""
    count = _terms(scheme, case, tensor.argument, tensor.role) * tensor.stitched.summed_ranks
    u_accumulator = accumulator_roundoff(case.dtype)
    u = unit_of_inputs(scheme, case)
    return element_budgets(want, spread, count, case.dtype, tensor.dtype, scheme.roundings, u_accumulator, u_spread=u)


def lost_below(dtype: str) -> float:
    """The most that underflow can take from one term.

    float32 and float64 may be flushed to zero below the least normal number, and so may bfloat16, which is computed in
    float32. float16 always keeps its subnormal numbers, and a term is rounded to their spacing.
    """
    info = torch.finfo(getattr(torch, dtype))
    return info.tiny * info.eps if dtype == "float16" else info.tiny


def max_finite(dtype: str) -> float:
    """The largest finite number of a dtype; infinity for integers and booleans, which never overflow."""
    return torch.finfo(getattr(torch, dtype)).max if "float" in dtype else np.inf


def errors(got: np.ndarray, want: np.ndarray, dtype: str) -> np.ndarray:
    """|got - want|; infinities and NaN must be in the same places, but a value that overflows the dtype may be inf."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(got - want)
    difference = np.where(np.isnan(difference), np.inf, difference)
    return np.where(same_number(got, want, max_finite(dtype)), 0.0, difference)


def same_number(got: np.ndarray, want: np.ndarray | float, max_finite: float = np.inf) -> np.ndarray:
    """Where the two are equal, both NaN, or `got` is the infinity that `want` overflows to beyond `max_finite`."""
    with np.errstate(invalid="ignore"):
        overflowed = np.isinf(got) & (np.abs(want) > max_finite) & (np.sign(got) == np.sign(want))
    return (got == want) | (np.isnan(got) & np.isnan(want)) | overflowed


def beyond_budget(tensor: TensorComparison, values: np.ndarray) -> np.ndarray:
    """Where values, or copies of a tensor, are further from the reference than the budget allows."""
    if tensor.argument.is_integer:
        return np.not_equal(values, tensor.want)
    return np.greater(errors(values, tensor.want, tensor.dtype), tensor.element_budgets)


def wrong_elements(tensor: TensorComparison) -> np.ndarray:
    """Where a copy exceeds its budget, or the worst copy lacks a nonzero gradient; nowhere if the tensor is `ok`."""
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
    undefined: np.ndarray | None = None,  # where any gradient is accepted
) -> TensorComparison:
    """Compare every element with its budget.

    A gradient that no rank returned is right only if the reference is exactly zero.
    """
    # 1. The budget of each element, and the arguments for budgets of a coarser dtype, which serve as evidence.
    u, u_accumulator = unit_of_inputs(scheme, case), accumulator_roundoff(case.dtype)
    rounded = stitched.size_of_terms
    budgets = element_budgets(want, spread, terms, case.dtype, out_dtype, scheme.roundings, u_accumulator, rounded, u)
    if undefined is not None:
        budgets = np.where(undefined, np.inf, budgets)
    coarse = COARSER[case.dtype]
    u_coarse = UNIT_ROUNDOFF[coarse]
    in_coarse = spread * (u_coarse / u), terms, coarse, coarse, max(scheme.roundings, 1), u_coarse
    # 2. The error of every copy as a fraction of its budget.
    all_errors = errors(stitched.copies, want[None], out_dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # a ratio that overflows becomes infinite
        ratios = np.where(np.isinf(budgets[None]), 0.0, all_errors / budgets[None])
    if gradient_is_none is not None:  # zeros may be within the budget, but None is wrong if the gradient is not 0
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
    """Compare integers and booleans exactly."""
    wrong = (stitched.copies != want[None]).astype(np.float64)
    worst = np.unravel_index(int(np.argmax(wrong)), wrong.shape) if wrong.size else (0,)
    ratio = math.inf if wrong.any() else 0.0
    where = tuple(int(i) for i in worst[1:])
    error = np.abs(stitched.copies[worst].astype(np.float64) - float(want[where])) if wrong.any() else 0.0
    # Unequal integers differ by at least 1, so clues, which compare with `<=`, treat 0.5 as "equal".
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
    """Number of terms summed into one element: the declared reduction of an output, else the most that shapes allow.

    Shapes allow a sum over all dims that this tensor lacks, or over one of its own dims, as in a softmax. A gradient
    may sum over both if its own dim is declared: the gradient of attention's values sums over rows and over the heads
    that share them.
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
