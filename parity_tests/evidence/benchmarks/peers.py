"""Vocab-parallel log-probabilities on two gloo ranks, beside full-vocabulary torch and other libraries on PyPI."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from parity_tests.evidence.benchmarks.arms import BOUND, DTYPES, ROUNDS, TIMED, WORLD
from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.evidence.benchmarks.passes import ALONE
from parity_tests.evidence.benchmarks.ranks import run_ranks
from shardproof.declare.case import CaseSpec
from shardproof.declare.discover import lookup
from shardproof.draw import inputs
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.engines.engines import run
from shardproof.engines.program import Program
from shardproof.judge import bridge, compare
from shardproof.judge.reference import evaluate

TESTS = "parity_tests.vocab_parallel"
# For each topic: the scheme whose reference and budgets judge every arm, the drawn sizes, and the sharded dim.
TOPICS: dict[str, tuple[str, dict[str, Any], str]] = {
    "logprob": (
        f"{TESTS}.test_logprob:distributed_logprob",
        {"b": 1, "s": 64, "v": 131072, "temperature": 1.0},
        "v/tp",
    ),
    "head": (f"{TESTS}.test_linear_logprob:linear_logprobs", {"b": 1, "s": 128, "d": 256, "v": 16384}, "v/tp"),
}
BOUNDS = {"logprob": "the copy bound", "head": "four products"}
TITLES = {"logprob": "logprob", "head": "hidden states to logprob"}
NOTES = {("logprob", "megatron-core"): "; it overwrites float32 logits"}
ON_CUDA = ("liger-kernel", "cut-cross-entropy, its kernels")


class Wanted(NamedTuple):
    """A promised ratio: the time of `arm` over the time of `over`, at most so much in each dtype."""

    topic: str
    work: str
    arm: str
    over: str
    at_most: tuple[float, float]  # in the order of DTYPES


WANTED = (
    Wanted("logprob", "log-probability, forward and backward", "ours", "megatron-core", (0.9, 0.9)),
    Wanted("logprob", "log-probability, gradient in place", "ours, gradient in place", "megatron-core", (0.9, 0.9)),
    Wanted("logprob", "log-probability, compiled", "ours, compiled", "megatron-core", (0.45, 0.45)),
    Wanted("logprob", "log-probability, compiled, in place", "ours, compiled, in place", "megatron-core", (0.45, 0.45)),
    Wanted("logprob", "log-probability, forward", "ours, forward only", "plain formula, forward only", (0.8, 0.8)),
    Wanted("logprob", "log-probability with entropy", "ours, with entropy", "ours", (1.15, 1.15)),
    Wanted("head", "hidden states to log-probability", "ours", BOUND, (1.05, 1.1)),
)


def figures() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bridge.start()
        for topic in TOPICS:
            for dtype in DTYPES:
                _draw(topic, dtype, folder / f"{topic}_{dtype}.npz")
        command = [sys.executable, "-m", "parity_tests.evidence.benchmarks.arms"]
        by_rank = run_ranks(command, WORLD, folder, topic="the peers", seconds=1800)
    for target in WANTED:
        for dtype in DTYPES:
            yield _promised(target, dtype, [of_rank[f"{target.topic} {dtype}"] for of_rank in by_rank])
    for topic in TOPICS:
        for dtype in DTYPES:
            yield from _compared(topic, dtype, [of_rank[f"{topic} {dtype}"] for of_rank in by_rank])
    reason = "not run: needs CUDA" if not torch.cuda.is_available() else "not run: no arm on CUDA yet"
    for name in ON_CUDA:
        yield Figure(name, "-", reason, None, "Triton kernels without a path of their own on a CPU")


def _promised(target: Wanted, dtype: str, ranks: list[Mapping[str, Any]]) -> Figure:
    """One ratio; if it is missed, with the bare passes over the logits and our arm's operations."""
    title = f"{target.work}, {dtype}, over {BOUNDS[target.topic] if target.over == BOUND else target.over}"
    promised = f"<= {target.at_most[DTYPES.index(dtype)]} times"
    for name in (target.arm, target.over):
        if "missing" in ranks[0][name]:
            return Figure(title, promised, ranks[0][name]["missing"], None, _sizes(target.topic, dtype))
    ours, theirs = (_slowest(ranks, name, "cpu") for name in (target.arm, target.over))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ours) / statistics.median(theirs)
    is_kept = ratio <= target.at_most[DTYPES.index(dtype)]
    measured = f"{ratio:.3g} times, by round {spread(ratios)}"
    for name, seconds in ((target.arm, ours), (target.over, theirs)):
        measured += f"; {name} {spread([1e3 * value for value in seconds])} ms"
    how = _sizes(target.topic, dtype) + "; CPU time, median over median"
    if not is_kept:
        for name in filter(ranks[0].__contains__, ALONE):
            how += f"; {name} alone {spread([1e3 * value for value in _slowest(ranks, name, 'cpu')])} ms"
        how += f"; {ranks[0][target.arm]['operations']}"
    return Figure(title, promised, measured, is_kept, how)


def _sizes(topic: str, dtype: str) -> str:
    """The sizes and conditions of the timed runs."""
    sizes = " ".join(f"{name}={size}" for name, size in TIMED[topic].items())
    return f"b=1 {sizes}, {dtype}, two gloo ranks of one thread, {ROUNDS} rounds in turn, slower rank"


def _compared(topic: str, dtype: str, ranks: list[Mapping[str, Any]]) -> Iterator[Figure]:
    """One figure for each arm: its error in budgets, its collectives, memory and time, over ours round by round."""
    checked = " ".join(f"{name}={size}" for name, size in TOPICS[topic][1].items())
    how = (
        f"{_sizes(topic, dtype)}; median (least to greatest); error, collectives, bytes and memory at {checked}; "
        f"memory is live tensors beside the inputs, in parts of a rank's {'logits' if topic == 'logprob' else 'weight'}"
    )
    for name in ranks[0]:
        if name == BOUND or name in ALONE:
            continue
        title = f"{TITLES[topic]}, {dtype}: {name}"
        if "missing" in ranks[0][name]:
            yield Figure(title, "-", ranks[0][name]["missing"], None, how)
            continue
        ratio = max(rank[name]["ratio"] for rank in ranks)
        over = [a / b for a, b in zip(_slowest(ranks, name, "cpu"), _slowest(ranks, "ours", "cpu"), strict=True)]
        measured = f"error {ratio:.2g} budgets; {_sent(ranks[0][name])}; {_times(topic, ranks, name)}"
        measured += "" if name == "ours" else f"; {spread(over)} times ours"
        measured += NOTES.get((topic, name), "")
        promised, is_kept = "-", None
        if name.startswith("ours"):
            promised, is_kept = "error <= 1 budget", ratio <= 1
        yield Figure(title, promised, measured, is_kept, how)


def _sent(of_rank: Mapping[str, Any]) -> str:
    if "collectives" not in of_rank:
        return "collectives and memory not seen through torch.compile"
    counts = Counter(of_rank["collectives"])
    called = ", ".join(f"{count} {op}" for op, count in counts.items()) or "no collective"
    return f"{called}, {of_rank['bytes']} bytes per rank; memory {of_rank['memory'] / of_rank['part']:.3g}"


def _times(topic: str, ranks: list[Mapping[str, Any]], name: str) -> str:
    cpu, wall, bounds = _slowest(ranks, name, "cpu"), _slowest(ranks, name, "wall"), _slowest(ranks, BOUND, "cpu")
    texts = [
        f"{spread([1e3 * value for value in values])} ms {clock}" for clock, values in (("CPU", cpu), ("wall", wall))
    ]
    share = [bound / seconds for bound, seconds in zip(bounds, cpu, strict=True)]
    return f"{', '.join(texts)}; {spread(share, digits=2)} of {BOUNDS[topic]}"


def _slowest(ranks: list[Mapping[str, Any]], name: str, clock: str) -> list[float]:
    return [max(pair) for pair in zip(*(rank[name][clock] for rank in ranks), strict=True)]


def _draw(topic: str, dtype: str, path: Path) -> None:
    """Draw the inputs and the cotangent, evaluate the reference in float64, and write them with the budgets."""
    scheme, sizes, cut = TOPICS[topic]
    declared = lookup(scheme)
    case = _case(declared, sizes, cut, dtype)
    program = Program.of(declared)
    reference = evaluate(declared, program, case)
    rows = compare.compare(declared, case, run(program, case, "lockstep").results, reference)
    arrays = {arg.name: inputs.full_array(arg, declared.draws[arg.name], case) for arg in declared.inputs}
    arrays["cotangent"] = inputs.cotangent(declared.outputs[0], case)
    for i, row in enumerate(rows):
        arrays |= {f"want {i}": row.want, f"budget {i}": row.element_budgets}
    np.savez(path, allow_pickle=False, **arrays)


def _case(scheme: Any, sizes: Mapping[str, Any], cut: str, dtype: str) -> CaseSpec:
    case = draw_case(scheme, seeded_chooser(0), {"tp": WORLD, **sizes}, dtype=dtype, seed=0)
    anywhere = {"kind": "ids", "dim": "v", "picks": [[0, "anywhere"]]}
    values = {name: {"kind": "normal"} for name in case.values} | {"target": anywhere}
    half = sizes["v"] // WORLD
    return case.replace(values=values, layouts={cut: {"name": "ragged", "lengths": [half, half]}})
