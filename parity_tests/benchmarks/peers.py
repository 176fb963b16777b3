"""Log-probability with the vocabulary cut over two gloo ranks, beside whole-vocabulary torch and DTensor."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity_tests.benchmarks.figure import Figure, spread
from parity_tests.harness import bridge, compare, inputs, oracle
from parity_tests.harness.drawing import draw_case, seeded_chooser
from parity_tests.harness.engines.run import run
from parity_tests.harness.table import lookup

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"b": 1, "s": 128, "v": 16384}
DTYPES = ("float32", "bfloat16")
SCHEME = "parity_tests.vocab_parallel.test_logprob:distributed_logprob"


def figures() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _draw(folder)
        ranks = [
            subprocess.Popen([sys.executable, "-m", "parity_tests.benchmarks.arms", str(rank), name], cwd=ROOT)
            for rank in range(2)
        ]
        if any(rank.wait(timeout=300) for rank in ranks):
            raise RuntimeError("benchmarks: a rank of the peers failed")
        found = [json.loads((folder / f"found_{rank}.json").read_text()) for rank in range(2)]
    for dtype in DTYPES:
        yield from _compared(dtype, [of_rank[dtype] for of_rank in found])


def _compared(dtype: str, ranks: list[Mapping[str, Any]]) -> Iterator[Figure]:
    """One figure for each arm: its error in budgets, its collectives, and its time over ours, round by round."""
    ours = _slowest(ranks, "ours")
    shape = " ".join(f"{name}={size}" for name, size in SIZES.items())
    for name in ranks[0]:
        ratio = max(value for rank in ranks for value in rank[name]["ratios"].values())
        seconds = _slowest(ranks, name)
        counts = Counter(ranks[0][name]["collectives"])
        called = ", ".join(f"{count} {op}" for op, count in counts.items()) or "no collective"
        sent = f"{called}, {ranks[0][name]['bytes']} bytes per rank"
        times = spread([1000 * value for value in seconds])
        over = spread([theirs / own for theirs, own in zip(seconds, ours, strict=True)])
        yield Figure(
            f"{name}, {dtype}",
            "error <= 1 budget" if name == "ours" else "-",
            f"error {ratio:.2g} budgets; {sent}; {times} ms" + ("" if name == "ours" else f"; {over} times ours"),
            ratio <= 1 if name == "ours" else None,
            f"{shape}, two gloo ranks of one thread, forward and backward, {len(ours)} rounds in turn, slower rank; "
            "median (least to greatest)",
        )


def _slowest(ranks: list[Mapping[str, Any]], name: str) -> list[float]:
    return [max(pair) for pair in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)]


def _draw(folder: Path) -> None:
    """Draw logits, targets and cotangents, evaluate the reference in float64, and write them with the budgets."""
    bridge.start()
    made = lookup(SCHEME)
    arrays: dict[str, np.ndarray] = {}
    for dtype in DTYPES:
        case = draw_case(made, seeded_chooser(0), {"tp": 2, "temperature": 1.0, **SIZES}, dtype=dtype, seed=0)
        half = SIZES["v"] // 2
        anywhere = {"kind": "ids", "dim": "v", "picks": [[0, "anywhere"]]}
        case = case.replace(
            values={"logits": {"kind": "normal"}, "target": anywhere},
            layouts={"v/tp": {"name": "ragged", "lengths": [half, half]}},
        )
        program = made.program()
        reference = oracle.evaluate(made, program, case)
        out, gradient = compare.compare(made, case, run(program, case, "lockstep").results, reference)
        drawn = {arg.name: inputs.whole(arg, made.draws[arg.name], case) for arg in made.inputs}
        arrays |= {
            f"{dtype} logits": drawn["logits"],
            f"{dtype} cotangent": inputs.cotangent(made.outputs[0], case),
            "target": drawn["target"],
            f"{dtype} out": out.want,
            f"{dtype} out budget": out.budgets,
            f"{dtype} gradient": gradient.want,
            f"{dtype} gradient budget": gradient.budgets,
        }
    np.savez(folder / "drawn.npz", allow_pickle=False, **arrays)
