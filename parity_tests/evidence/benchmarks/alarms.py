"""False alarms over the built-in schemes, bytes against closed forms, share of tracing."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator

from parity_tests.evidence.benchmarks.figure import Figure
from parity_tests.evidence.injected_bugs.runner import NOT_TRIED
from shardproof.declare import discover
from shardproof.declare.declared import Declared
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.judge import bridge
from shardproof.judge.reference import CLOCK
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

DTYPES = ("float32", "bfloat16")
SECONDS = 100.0
SHAPES = 2  # of each scheme: time goes into examples, not into tracing references
CACHE = ".jax_cache"


def figures(seconds: float = SECONDS) -> Iterator[Figure]:
    yield from false_alarms(seconds)


def schemes() -> list[Declared]:
    return [scheme for scheme in discover.built_in() if scheme.name not in NOT_TRIED]


def false_alarms(seconds: float) -> Iterator[Figure]:
    """Judge drawn healthy examples of all schemes in turn until the time is up."""
    bridge.start(CACHE)
    counts: Counter[str] = Counter()
    alarms: list[str] = []
    worst: dict[str, float] = dict.fromkeys(DTYPES, 0.0)
    priced = mispriced = 0
    traced, start = CLOCK.seconds, time.perf_counter()
    tried = [scheme for scheme in schemes() if set(DTYPES) & set(scheme.dtypes)]
    for seed, scheme in ((seed, scheme) for seed in itertools.count() for scheme in tried):
        if time.perf_counter() - start > seconds:
            break
        for dtype in sorted(set(DTYPES) & set(scheme.dtypes)):
            case = draw_case(
                scheme, seeded_chooser(seed), {}, dtype=dtype, seed=seed, limit=SHAPES, with_conditions=True
            )
            report = verify_case(scheme, case)
            counts[dtype] += 1
            worst[dtype] = max([worst[dtype], *(tensor.ratio for tensor in report.tensors)])
            priced += scheme.cost is not None
            mispriced += bool(report.cost)
            if not report.ok:
                alarms.append(_said(report))
    took = time.perf_counter() - start
    total = counts.total()
    yield Figure(
        "false alarms, float32 and bfloat16",
        "0 in 100,000 examples",
        f"{len(alarms)} in {total} examples ({', '.join(f'{n} {d}' for d, n in counts.items())}); greatest error "
        + ", ".join(f"{ratio:.2g} budgets in {dtype}" for dtype, ratio in worst.items()),
        not alarms if total >= 100_000 or alarms else None,
        f"{len(tried)} schemes in turn, {took:.0f} s, nothing extrapolated"
        + "".join(f"; {alarm}" for alarm in alarms[:8]),
    )
    yield Figure(
        "measured bytes less closed form",
        "0, forward and backward",
        f"0 in {priced - mispriced} of {priced} examples",
        priced > 0 and not mispriced,
        "every rank and both phases of each of these examples whose scheme declares a cost",
    )
    share = (CLOCK.seconds - traced) / took
    yield Figure(
        "share of tracing references",
        "<= 30 % (of the merge-gate suite)",
        f"{share:.0%} of these examples; the suite itself is not run here",
        None,
        f"{total / took:.0f} judged examples/s, {SHAPES} shapes of each scheme, compilations kept in {CACHE}",
    )


def _said(report: Report) -> str:
    tensor = max(report.tensors, key=lambda tensor: tensor.ratio, default=None)
    ratio = f" {tensor.label} at {tensor.ratio:.2g} budgets" if tensor else ""
    return f"{report.scheme.rpartition(':')[2]} {report.case.id} {report.verdict}{ratio}"
