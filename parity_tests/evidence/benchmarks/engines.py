"""How fast the engines are: examples per second, hot start, failure to verdict, recovery."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.evidence.benchmarks.toy import FAILING, killed, toy, toy_case
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.failure import RankFailure
from shardproof.engines.processes import pool

PROMISED_RATES = {2: 250, 4: 150, 8: 80}
ROUNDS, EXAMPLES = 7, {"lockstep": 60, "gloo": 30}
STARTS = 5


def figures() -> Iterator[Figure]:
    yield from rates()
    yield hot_start()
    yield from verdicts()


def seconds_of(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def rates() -> Iterator[Figure]:
    """Examples per second of both engines in turn, so that the machine's load meets both."""
    for world, promised in PROMISED_RATES.items():
        by_engine: dict[str, list[float]] = {"lockstep": [], "gloo": []}
        for engine in by_engine:
            _repeat(engine, world, 3)
        for _ in range(ROUNDS):
            for engine, values in by_engine.items():
                count = EXAMPLES[engine]
                values.append(count / seconds_of(partial(_repeat, engine, world, count)))
        ratios = [a / b for a, b in zip(by_engine["lockstep"], by_engine["gloo"], strict=True)]
        middle = sorted(by_engine["lockstep"])[ROUNDS // 2]
        yield Figure(
            f"lockstep, world {world}, toy log-probability forward and backward",
            f"{promised} examples/s",
            f"{spread(by_engine['lockstep'])} examples/s; gloo {spread(by_engine['gloo'])}; ratio {spread(ratios)}",
            middle >= promised,
            f"{ROUNDS} rounds, {EXAMPLES['lockstep']} examples on lockstep and {EXAMPLES['gloo']} on gloo in turn; "
            "median (least to greatest)",
        )


def _repeat(engine: str, world: int, count: int) -> None:
    case = toy_case(world, engine)
    for i in range(count):
        run(toy, case.replace(seed=i), engine)


def hot_start() -> Figure:
    """The start of eight ranks once their server runs: fork, connect, first example."""
    cold, hot = [], []
    for _ in range(STARTS):
        pool.close()
        cold.append(seconds_of(lambda: run(toy, toy_case(1, "gloo"), "gloo")))
        hot.append(seconds_of(lambda: run(toy, toy_case(8, "gloo"), "gloo")))
    return Figure(
        "gloo pool, world 8, hot start to the first result",
        "<= 0.5 s",
        f"{spread(hot)} s; the server itself, once per session, {spread(cold)} s",
        sorted(hot)[STARTS // 2] <= 0.5,
        f"{STARTS} starts; median (least to greatest)",
    )


def verdicts() -> Iterator[Figure]:
    """Seconds from the start of a failing example to its named verdict, and of the next healthy one to its result."""
    worlds = (2, 4)
    limits = {"lockstep": 0.05, "gloo": 2.0}
    recoveries: dict[str, list[float]] = {"lockstep": [], "gloo": []}
    for engine, limit in limits.items():
        by_cause: dict[str, list[float]] = {}
        for name, job in FAILING.items():
            if job is killed and engine == "lockstep":
                continue
            for world in worlds:
                for _ in range(2):
                    case = toy_case(world, engine)
                    run(toy, case, engine)
                    by_cause.setdefault(name, []).append(seconds_of(partial(_failing, job, case)))
                    recoveries[engine].append(seconds_of(partial(run, toy, case, engine)))
        each = ", ".join(f"{name} {1000 * max(values):.0f} ms" for name, values in by_cause.items())
        worst = max(max(values) for values in by_cause.values())
        count = sum(map(len, by_cause.values()))
        yield Figure(
            f"failure to verdict, {engine}",
            f"<= {limit:g} s",
            f"{1000 * worst:.0f} ms at worst: {each}",
            worst <= limit,
            f"{count} failures at world 2 and 4; the greatest of each kind",
        )
    yield Figure(
        "recovery: the next healthy example after a failure",
        "<= 0.6 s",
        f"gloo {spread(recoveries['gloo'])} s; lockstep {spread([1000 * x for x in recoveries['lockstep']])} ms",
        max(recoveries["gloo"]) <= 0.6,
        f"after each of {sum(map(len, recoveries.values()))} failures; median (least to greatest)",
    )


def _failing(job: Callable[..., None], case: CaseSpec) -> None:
    try:
        run(job, case, case.engine)
    except RankFailure:
        return
    raise RuntimeError(f"benchmarks: {job.__name__} did not fail on {case.engine}")
