"""The smallest mistake that is seen: in one element of a result, and in the code of one rank."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parity_tests.evidence.benchmarks.figure import Figure, spread
from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.declare.discover import lookup
from shardproof.draw import inputs
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.engines.engines import run
from shardproof.engines.program import Program, RankResult
from shardproof.judge import bridge, compare
from shardproof.judge.reference import UNIT_ROUNDOFF, evaluate
from shardproof.verify_one_case import verify_case

DTYPES = ("float32", "bfloat16")
HOME = "parity_tests.vocab_parallel.test_logprob"
TRIED = ("vocab_parallel_logprob", "logprob_with_entropy")
MULTIPLES = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
INJECTED_IN = 30
ROUNDINGS = (1, 2, 4, 8, 16, 32, 64, 128)
EXAMPLES = 40


def figures() -> Iterator[Figure]:
    bridge.start()
    yield in_one_element()
    yield in_one_rank()


def _tried() -> list[Declared]:
    return [lookup(f"{HOME}:{name}") for name in TRIED]


def in_one_rank() -> Figure:
    """Change the logits of one rank by a relative error of 1, 2, 4, ... unit roundoffs of float32."""
    scheme = _tried()[0]
    cases = [
        draw_case(scheme, seeded_chooser(seed), {"tp": 2 + seed % 3}, dtype="float32", seed=seed)
        for seed in range(EXAMPLES)
    ]
    references = [evaluate(scheme, Program.of(scheme), case) for case in cases]
    caught = {}
    for count in ROUNDINGS:
        wrong = replace(scheme, fn=_off_on_one_rank(scheme.fn, count * UNIT_ROUNDOFF["float32"]))
        reports = [
            verify_case(wrong, case, reference=reference) for case, reference in zip(cases, references, strict=True)
        ]
        caught[count] = sum(not report.ok for report in reports)
    smallest = min((count for count, seen in caught.items() if seen), default=None)
    return Figure(
        "smallest relative error of one rank's logits that is caught, float32",
        "-",
        f"{smallest} unit roundoffs (of 6e-8); caught: "
        + ", ".join(f"{count} u in {seen} of {EXAMPLES}" for count, seen in caught.items()),
        None,
        f"{scheme.name}, {EXAMPLES} drawn examples of 2 to 4 ranks; examples of zeros or masks hide it by nature",
    )


def _off_on_one_rank(fn: Callable[..., Any], error: float) -> Callable[..., Any]:
    def off(mesh: Any, **tensors: Any) -> Any:
        if mesh.rank("tp") == 1:
            tensors["logits"] = tensors["logits"] * (1.0 + error)
        return fn(mesh, **tensors)

    return off


def in_one_element() -> Figure:
    """Add an error of 0.5, 1, 1.5, ... budgets to one element of a healthy scheme's result."""
    tried = _tried()
    caught: Counter[float] = Counter()
    relative: list[float] = []
    injected = 0
    for scheme, seed in itertools.product(tried, range(INJECTED_IN)):
        case = draw_case(scheme, seeded_chooser(seed), {}, dtype=DTYPES[seed % 2], seed=seed)
        reference = evaluate(scheme, Program.of(scheme), case)
        results = run(Program.of(scheme), case, "lockstep").results
        for row in compare.compare(scheme, case, results, reference):
            place = _place(row, seed)
            if place is None:
                continue
            injected += 1
            relative.append(row.element_budgets[place] / abs(row.want[place]))
            for multiple in MULTIPLES:
                worse = _with_error(scheme, case, results, row, place, multiple * row.element_budgets[place])
                judged = compare.compare(scheme, case, worse, reference)
                caught[multiple] += not all(other.ok for other in judged)
    always = min((m for m in MULTIPLES if caught[m] == injected), default=float("inf"))
    each = ", ".join(f"{m:g} budgets {caught[m] / injected:.0%}" for m in MULTIPLES)
    return Figure(
        "smallest injected error that is always caught",
        "<= 10 budgets",
        f"{always:g} budgets; caught: {each}",
        always <= 10,
        f"{injected} elements of outputs and gradients of {len(tried)} schemes, float32 and bfloat16; "
        f"a budget is {spread(relative)} of its element",
    )


def _place(row: compare.TensorComparison, seed: int) -> tuple[int, ...] | None:
    """A random element that is finite and not zero."""
    places = np.argwhere(np.isfinite(row.want) & (row.want != 0))
    rng = np.random.Generator(np.random.Philox(key=[seed, 1]))
    return tuple(int(i) for i in places[rng.integers(len(places))]) if len(places) else None


def _with_error(
    scheme: Declared,
    case: CaseSpec,
    results: Sequence[RankResult],
    row: compare.TensorComparison,
    place: tuple[int, ...],
    error: float,
) -> list[RankResult]:
    """The results with `error` added to the element on every rank that holds it."""
    worse = []
    for at, result in zip(inputs.coordinates(case.mesh), results, strict=True):
        side = "outputs" if row.role == "output" else "gradients"
        local_positions = inputs.positions(row.argument, case, at, scheme.layouts)
        local = [np.flatnonzero(np.asarray(ids) == index) for ids, index in zip(local_positions, place, strict=True)]
        array = getattr(result, side)[row.name]
        if array is not None and all(len(indices) for indices in local):
            array = array.copy()
            array[tuple(int(indices[0]) for indices in local)] += error
            result = replace(result, **{side: {**getattr(result, side), row.name: array}})
        worse.append(result)
    return worse
