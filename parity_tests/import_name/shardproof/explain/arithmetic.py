"""Clues from numbers: a constant factor, the opposite sign, an added constant or input; sums in a narrow dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, islice

import numpy as np

from shardproof.explain.evidence import Evidence
from shardproof.explain.named_numbers import NamedNumber, named_numbers, number_text
from shardproof.explain.note import ACROSS_MESHES, ACROSS_SIZES, ROUNDING, Note

ADDED_BEFORE = "each rank adds it before the sum"
COUNTED = "{} is counted {} times"  # the claim of such a note, of an input and an axis
MAX_LISTED = 8
MOST_DIMS = 3
MEANING_OF_NAMED_FACTOR = "a reduction is missing or repeated, or a mean divides by a local count"
MEANING_OF_SIZE = "a sum is in place of a mean, or a mean in place of a sum"
MEANING_OF_ROOT = "a count or a sum under a root is of each rank alone, or repeated by each"
MEANING_OF_SHARE = "a mean divides by all elements, by ignored ones too"
MEANING_OF_INVERSE_SHARE = "a mean divides by the elements that count, where the reference divides by all"
_FACTOR, _CONSTANT = "a constant factor", "an added constant"
_SOME_FACTOR, _SOME_CONSTANT = "off by some factor", "off by some constant"
MEANING_ON_EACH_RANK = {
    _FACTOR: "a local count or sum is in place of the global one",
    _CONSTANT: "a local statistic is in place of the global one",
}
MEANING_AT_EACH_INDEX = {
    _FACTOR: "a count, a sum or a weight there is not the reference's",
    _CONSTANT: "a statistic there is of other elements than the reference's",
}
IS_ZERO = " is zero: "
_MEANING_OF_ZERO = {"gradient": "backward does not reach this input", "output": "nothing was written to it"}


def named_change(evidence: Evidence) -> Iterator[Note]:
    """The simplest change that fits every element and has a named number, such as a mesh size."""
    notes = (clue(evidence) for clue in (_zero, _named_factor, _opposite_sign, _named_constant))
    yield from islice(filter(None, notes), 1)


def fitted_change(evidence: Evidence) -> Iterator[Note]:
    """A change by a fitted number, if no named one fits: one for the tensor, one per rank, or one per index.

    Zeros have their own clue, and an input that is added too often looks like a constant at each index of its dims.
    """
    if evidence.got.any() and not any(
        chain(named_change(evidence), elements_that_count(evidence), miscounted_input(evidence))
    ):
        for_all = (clue(evidence) for clue in (_fitted_factor_note, _fitted_constant_note))
        yield from islice(filter(None, chain(for_all, _change_of_each_part(evidence))), 1)


def elements_that_count(evidence: Evidence) -> Iterator[Note]:
    """The factor is the share or the number of a mask's elements that count, as of a mean that divides otherwise."""
    shares = {f"the share of {name} that counts": share for name, share in evidence.shares.items()}
    counts = {f"the number of {name} that count": float(n) for name, n in evidence.counts.items() if n > 1}
    for values, meaning in (
        (shares, MEANING_OF_SHARE),
        (_inverses(shares), MEANING_OF_INVERSE_SHARE),
        (counts | _inverses(counts), MEANING_OF_SIZE),
    ):
        fitting = {name: value for name, value in values.items() if _fits(evidence, _times, value)}
        if fitting:
            claims = {name: name for name in fitting}
            number = number_text(next(iter(fitting.values())))
            text = f"off by the constant factor {number} (= {' or '.join(claims)}): {meaning}{evidence.caveat}"
            yield Note(text, ACROSS_MESHES, claims, {_SOME_FACTOR, *_claims_of_parts(evidence, _FACTOR)})


def _inverses(values: Mapping[str, float]) -> dict[str, float]:
    return {f"1/({name})" if "*" in name else f"1/{name}": 1 / value for name, value in values.items()}


def _zero(evidence: Evidence) -> Note | None:
    misses_gradient = evidence.misses_gradient
    is_none_throughout = misses_gradient.any() and np.array_equal(misses_gradient, evidence.want != 0.0)
    if evidence.got.any() or is_none_throughout:  # None has its own clue, `missing_gradient`
        return None
    if any(extra_roundings(evidence)):  # terms that cancel: the result is as near to zero as rounding comes
        return None
    zero = f"{evidence.role}{IS_ZERO}"
    return Note(
        f"{zero}{_MEANING_OF_ZERO[evidence.role]}{evidence.caveat if evidence.got.size == 1 else ''}",
        ACROSS_MESHES,
        zero,
    )


def _named_factor(evidence: Evidence) -> Note | None:
    best = _best_fit(
        evidence, [(number, sign * number.value) for number in _named_sizes(evidence) for sign in (1, -1)], _times
    )
    if best is None:
        return None
    number, value = best
    names = {f"factor {name}": f"-{name}" if value < 0 else name for name in number.names}
    meaning = f"the sign is opposite, and {MEANING_OF_NAMED_FACTOR}" if value < 0 else MEANING_OF_NAMED_FACTOR
    text = (
        f"off by the constant factor {number_text(value)} (= {' or '.join(names.values())}): {meaning}{evidence.caveat}"
    )
    # 1/dp may be 1/sqrt(tp) here; where another mesh says so, this one agrees.
    roots = {f"factor {name}" for name, root in _roots(evidence).items() if root == value}
    return Note(text, ACROSS_MESHES, names, {_SOME_FACTOR, *roots, *_claims_of_parts(evidence, _FACTOR)})


def _opposite_sign(evidence: Evidence) -> Note | None:
    if not evidence.fits(-evidence.want):
        return None
    return Note("opposite sign" + evidence.caveat, ACROSS_MESHES, "opposite sign", {_SOME_FACTOR})


def _named_constant(evidence: Evidence) -> Note | None:
    above_one = [number for number in _named_sizes(evidence) if number.value > 1]
    best = _best_fit(evidence, [(n, sign * math.log(n.value)) for n in above_one for sign in (1, -1)], _plus)
    if best is None:
        return None
    number, value = best
    sign = "-" if value < 0 else ""
    logs = {
        f"constant {sign}log {name}": f"{sign}log({name})" if "*" in name or "/" in name else f"{sign}log {name}"
        for name in number.names
    }
    constant = f"{sign}log {number_text(number.value)} (= {' or '.join(logs.values())})"
    text = f"off by the added constant {constant}{evidence.caveat}"
    return Note(text, ACROSS_MESHES, logs, {_SOME_CONSTANT, *_claims_of_parts(evidence, _CONSTANT)})


def _fitted_factor_note(evidence: Evidence) -> Note | None:
    factor = fitted_factor(evidence)
    if factor is None:
        return None
    values = _products({dim: size for dim, size in evidence.sizes.items() if size > 1})
    sizes = [name for name, value in (values | _inverses(values)).items() if _fits(evidence, _times, value)]
    text, weaker = f"off by the constant factor {number_text(factor)}", _claims_of_parts(evidence, _FACTOR)
    of_ranks = {f"factor {name}": name for name, root in _roots(evidence).items() if _is_root(evidence, factor, root)}
    claims = {f"factor size {name}": name for name in sizes} | of_ranks
    if claims:
        of_dims = "" if of_ranks else f", the size of {'dims' if any('*' in name for name in sizes) else 'a dim'}"
        meaning = " or ".join(each for each, holds in ((MEANING_OF_SIZE, sizes), (MEANING_OF_ROOT, of_ranks)) if holds)
        text = f"{text} (= {' or '.join(claims.values())}{of_dims}): {meaning}"
        return Note(text, ACROSS_MESHES, claims, {_SOME_FACTOR, *weaker})
    return Note(f"{text}: a scale is missing or wrong", ACROSS_MESHES, _SOME_FACTOR, weaker)


def _products(sizes: Mapping[str, int]) -> dict[str, float]:
    """The products of up to MOST_DIMS sizes, as the number of elements that a mean divides by."""
    chosen = chain(*(combinations(sizes, count) for count in range(1, 1 + MOST_DIMS)))
    return {"*".join(dims): float(math.prod(sizes[dim] for dim in dims)) for dims in chosen}


def _roots(evidence: Evidence) -> dict[str, float]:
    roots = {f"sqrt({axis})": ranks**0.5 for axis, ranks in evidence.axes.items() if ranks > 1}
    return roots | {f"1/{name}": 1 / value for name, value in roots.items()}


def _is_root(evidence: Evidence, factor: float, root: float) -> bool:
    """Whether a root is the fitted factor, or has its printed digits: an epsilon under the root changes the others."""
    return _fits(evidence, _times, root) or number_text(factor) == number_text(root)


def _fitted_constant_note(evidence: Evidence) -> Note | None:
    constant = fitted_constant(evidence)
    if constant is None:
        return None
    text = f"off by the added constant {number_text(constant)}"
    return Note(text, ACROSS_MESHES, _SOME_CONSTANT, _claims_of_parts(evidence, _CONSTANT))


def names_a_number(note: Note) -> bool:
    """Whether a note's claims hold on other meshes and say more than that there is some number."""
    return note.scope == ACROSS_MESHES and not note.claims.keys() <= {_SOME_FACTOR, _SOME_CONSTANT}


def _change_of_each_part(evidence: Evidence) -> Iterator[Note]:
    """One kind of change, with a different number on each rank of a sharding axis, or at each index of a dim."""
    for where, part_of, meaning in _parts(evidence):
        for what, fitted, neutral in ((_FACTOR, fitted_factor, 1.0), (_CONSTANT, fitted_constant, 0.0)):
            numbers = _numbers_of_parts(evidence, part_of(evidence), fitted, neutral)
            texts = [number_text(number) for number in numbers]
            if len(set(texts)) > 1:
                text_of_parts = ", ".join(texts[:MAX_LISTED]) + (", ..." if len(texts) > MAX_LISTED else "")
                # Counts are positive, and so are their quotients.
                are_counts = what != _FACTOR or all(number > 0 for number in numbers)
                meaning_text = f": {meaning[what]}" if are_counts else ""
                yield Note(
                    f"off by {what} {where} ({text_of_parts}){meaning_text}",
                    ACROSS_SIZES,
                    f"off by {what} {where}",
                    applies=partial(_has_values_of_parts, part_of=part_of),
                )
                return


def _claims_of_parts(evidence: Evidence, what: str) -> set[str]:
    """The weaker claims that a number for all elements implies: it fits each part too."""
    return {f"off by {what} {where}" for where, _, _ in _parts(evidence)}


def _has_values_of_parts(evidence: Evidence, part_of: PartOf) -> bool:
    """Whether several parts are wrong and each has two different values, which a fitted number needs."""
    owner = part_of(evidence)
    parts = [evidence.restricted_to(owner == value) for value in np.unique(owner)]
    wrong = [part for part in parts if part.wrong_count]
    return _are_parts_wrong(len(wrong), len(parts)) and all(map(_has_two_values, wrong))


def _are_parts_wrong(wrong: int, parts: int) -> bool:
    """Whether parts are wrong as a whole: more than one, and at least half of them."""
    return wrong > 1 and 2 * wrong >= parts


def _numbers_of_parts(
    evidence: Evidence, owner: np.ndarray, fitted: Callable[[Evidence], float | None], neutral: float
) -> list[float]:
    """The number fitted to each part; empty if a part has none, or if only one or few parts are wrong."""
    numbers, wrong = [], 0
    for value in np.unique(owner):
        part = evidence.restricted_to(owner == value)
        number = fitted(part) if part.wrong_count else neutral
        if number is None or (part.wrong_count and not _has_two_values(part)):
            return []
        numbers.append(number)
        wrong += part.wrong_count > 0
    return numbers if _are_parts_wrong(wrong, len(numbers)) else []


PartOf = Callable[[Evidence], np.ndarray]  # the part of each element


def _parts(evidence: Evidence) -> Iterator[tuple[str, PartOf, Mapping[str, str]]]:
    """Ways to divide a tensor into parts: a name, the part of each element, and the meaning of different numbers."""
    for axis in evidence.owners:
        yield f"on each {axis} rank", partial(_owner_along, axis=axis), MEANING_ON_EACH_RANK
    for number, dim in enumerate(evidence.dims):
        yield f"at each index of {dim}", partial(_index_along, number=number), MEANING_AT_EACH_INDEX


# Values that differ by less, relative to the largest, count as one: the two gradients of a softmax of two elements
# differ by rounding and sign only.
SAME_VALUE = 2.0**-20


def _has_two_values(part: Evidence) -> bool:
    """Whether the part has two values that differ by more than rounding and sign; otherwise any error would fit."""
    values = np.abs(part.want[_informative(part)])
    return values.size > 1 and bool(np.ptp(values) > SAME_VALUE * values.max())


def _owner_along(evidence: Evidence, axis: str) -> np.ndarray:
    return evidence.owners[axis]


def _index_along(evidence: Evidence, number: int) -> np.ndarray:
    return np.indices(evidence.got.shape)[number]


def fitted_factor(evidence: Evidence) -> float | None:
    """f with got = f * want on every element; None without two different values to support it."""
    if not _has_two_values(evidence):
        return None
    informative = _informative(evidence)
    weight = _weights(evidence, informative)
    want, got = evidence.want[informative] * weight, evidence.got[informative] * weight
    largest = np.abs(want).max()
    factor = float((want / largest) @ (got / largest) / ((want / largest) @ (want / largest)))
    return factor if _explains(evidence, _times, factor) else None


def fitted_constant(evidence: Evidence) -> float | None:
    """c with got = want + c on every element; None without two different values to support it."""
    informative = _informative(evidence)
    if len(np.unique(evidence.want[informative])) < 2:
        return None
    weight = _weights(evidence, informative) ** 2
    constant = float(weight @ (evidence.got[informative] - evidence.want[informative]) / weight.sum())
    return constant if _explains(evidence, _plus, constant) else None


MIN_REDUCTION = 4.0  # a fitted number must reduce the largest error by this factor
Change = Callable[[np.ndarray, float], np.ndarray]  # applies a number to the right values: `_times` or `_plus`


def _times(want: np.ndarray, factor: float) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return want * factor


def _plus(want: np.ndarray, constant: float) -> np.ndarray:
    return want + constant


def _fits(evidence: Evidence, change: Change, number: float) -> bool:
    # A factor also multiplies the error.
    slack = max(1.0, abs(number)) if change is _times else 1.0
    return evidence.fits(change(evidence.want, number), slack)


def _explains(evidence: Evidence, change: Change, number: float) -> bool:
    """Whether a fitted number explains the error: any fit reduces it a little, this one by at least MIN_REDUCTION."""
    if not (math.isfinite(number) and _fits(evidence, change, number)):
        return False
    informative = _informative(evidence)
    budget, got, want = evidence.budgets[informative], evidence.got[informative], evidence.want[informative]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        before = np.nan_to_num(np.abs(got - want) / budget, posinf=np.inf).max(initial=0.0)
        after = np.nan_to_num(np.abs(got - change(want, number)) / budget, posinf=np.inf).max(initial=0.0)
    return bool(before >= MIN_REDUCTION * after) and before >= MIN_REDUCTION


def _best_fit(
    evidence: Evidence, tried: list[tuple[NamedNumber, float]], change: Change
) -> tuple[NamedNumber, float] | None:
    """The fitting number with the smallest remaining error; among equals, the simplest."""
    informative = _informative(evidence)
    if not informative.any():
        return None
    weight = _weights(evidence, informative)
    want, got = evidence.want[informative], evidence.got[informative]
    fitting = [(number, value) for number, value in tried if _fits(evidence, change, value)]
    with np.errstate(over="ignore"):
        residuals = [float(np.abs((got - change(want, value)) * weight).max()) for _, value in fitting]
    return fitting[int(np.argmin(residuals))] if fitting else None


def _named_sizes(evidence: Evidence) -> list[NamedNumber]:
    # A single element always fits some quotient of sizes, so only products and inverses are tried.
    return named_numbers(evidence.axes, mixed=evidence.wrong_count > 1)


def _informative(evidence: Evidence) -> np.ndarray:
    """The elements that can tell numbers apart: finite, and not lost in their budget."""
    finite = np.isfinite(evidence.got) & np.isfinite(evidence.want) & np.isfinite(evidence.budgets)
    return finite & (evidence.is_wrong | (np.abs(evidence.want) > evidence.budgets))


def _weights(evidence: Evidence, informative: np.ndarray) -> np.ndarray:
    """The weight of each informative element, at most 1: the smaller its budget, the larger."""
    budget = np.maximum(evidence.budgets[informative], np.finfo(np.float64).tiny)
    return budget.min() / budget


def extra_roundings(evidence: Evidence) -> Iterator[Note]:
    """The error is within the budgets for more intermediates stored in the tested dtype."""
    for count, budgets in sorted(evidence.budgets_by_roundings.items()):
        if replace(evidence, budgets=budgets).wrong_count == 0:
            roundings = f"{count} roundings to {evidence.coarse_dtype}"
            remedy = (
                "sums='float32' promises none" if evidence.wide_sums else f"declare roundings={count} if they are meant"
            )
            yield _of_rounding(f"{WITHIN_ROUNDING}{roundings} may do", roundings, f": {remedy}")
            return


WITHIN_ROUNDING = "within what "
SMALL = "a small error: "
SMALL_ERROR = "an error of rounding"
CANCELS = "a formula that cancels"


def _of_rounding(claim: str, cause: str, rest: str) -> Note:
    """What one case shows, its size, with the claim that a case in a wider dtype may confirm as its wording."""
    return Note(f"{SMALL}{cause} could do as much{rest}", ROUNDING, {claim: f"{claim}{rest}"})


SEPARATE = 16.0  # least ratio of the coarse budget to the budget that tells a coarser dtype from a cancelling formula


def narrow_sums(evidence: Evidence) -> Iterator[Note]:
    """The error is within the budgets for sums in a coarser dtype, and not far below them."""
    coarse = evidence.coarse_budgets
    if coarse is not None and replace(evidence, budgets=coarse).wrong_count == 0:
        cause = f"{evidence.coarse_dtype} accumulation"
        what = f"{WITHIN_ROUNDING}{cause} may do"
        with np.errstate(over="ignore", invalid="ignore"):
            error = np.abs(evidence.got - evidence.want)[evidence.is_wrong]
            between = np.sqrt(evidence.budgets * coarse)[evidence.is_wrong]
        is_far = not evidence.wide_sums and (coarse > SEPARATE * evidence.budgets).all() and (error < between).all()
        if is_far and not any(extra_roundings(evidence)):  # which need no formula that cancels
            what = f"{SMALL_ERROR}, far below {cause}: {CANCELS}"
            cause = f"{CANCELS}, far below {cause},"
        yield _of_rounding(what, cause, evidence.caveat if evidence.got.size == 1 else "")


def miscounted_input(evidence: Evidence) -> Iterator[Note]:
    """The result is right except for an input that was added too often or left out; a factor would say more."""
    if any(named_change(evidence)) or fitted_factor(evidence) is not None:
        return
    for name, x in evidence.inputs.items():
        if not x.any():
            continue
        for times, note in _input_counts(evidence, name):
            with np.errstate(invalid="ignore", over="ignore"):
                expected = evidence.want + times * x
            if evidence.fits(expected):
                yield note.extended(evidence.caveat)
                return


def _input_counts(evidence: Evidence, name: str) -> Iterator[tuple[int, Note]]:
    """Possible numbers of surplus additions of the input, each with its note."""
    for axis, ranks in evidence.axes.items():
        if ranks > 1 and (evidence.summed_axes is None or axis in evidence.summed_axes):
            text = f"{name} is counted {ranks} times (= {axis}): {ADDED_BEFORE}"
            yield ranks - 1, Note(text, ACROSS_MESHES, COUNTED.format(name, axis))
    for times, text in ((1, f"{name} is added once too often"), (-1, f"{name} is left out")):
        yield times, Note(text, ACROSS_MESHES, text)
