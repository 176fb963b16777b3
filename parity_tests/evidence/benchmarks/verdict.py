"""The time to a verdict from the shell: the first one, one at each save, the table of schemes, many examples, the tour.

Each command runs in a process of its own, in an empty folder and without a cache of compiled references; CPU time
includes every process that it started.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parity_tests.evidence.benchmarks import saves
from parity_tests.evidence.benchmarks.figure import Figure, spread

ROOT = Path(__file__).resolve().parents[3]
ROUNDS = 5
SCHEMES, EXAMPLES = 20, 8
LIMITS = {"first verdict": 4.5, "list": 1.5, "draw": 1.5}  # seconds of CPU time
RATE = 10.0  # examples per second of CPU time
TOUR = 45.0  # seconds of wall-clock time


@dataclass(frozen=True)
class Run:
    """One command: its output, CPU seconds and wall-clock seconds."""

    output: str
    cpu: float
    wall: float


def figures(rounds: int = ROUNDS, schemes: int = SCHEMES) -> Iterator[Figure]:
    """The commands of a first day, each beside its promise."""
    yield from _commands(rounds)
    yield from saves.figures()
    yield _many_examples(schemes)
    yield _tour()


def shell(*arguments: str) -> Run:
    """Run `python` with these arguments; RuntimeError with its output unless it exits with 0."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "COLUMNS": "300"},  # no sentence breaks
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"benchmarks: python {' '.join(arguments)} ended with {process.returncode}:\n{output}")
    return Run(output, used.ru_utime + used.ru_stime, time.perf_counter() - start)


def _commands(rounds: int) -> Iterator[Figure]:
    """The commands in turn, and the import of torch and JAX that no verdict is without."""
    commands = {
        "first verdict": ("-m", "shardproof", "verify", str(ROOT / "docs/examples/my_scheme.py")),
        "list": ("-m", "shardproof", "list"),
        "draw": ("-m", "shardproof", "draw", "vocab_parallel_logprob", "--mesh", "tp=4"),
        "imports": ("-c", "import torch, torch.distributed.tensor, jax, jax.numpy"),
    }
    for arguments in commands.values():
        shell(*arguments)  # the first run writes byte code and the index of schemes
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, arguments in commands.items():
            seconds[name].append(shell(*arguments).cpu)
    imports = spread(seconds["imports"], " s")
    how = f"CPU time of a new process, {rounds} rounds in turn; torch and JAX alone take {imports} to import"
    for name, limit in LIMITS.items():
        middle = sorted(seconds[name])[rounds // 2]
        title = " ".join(["shardproof", *commands[name][2:]]).replace(f"{ROOT}/docs/examples/", "")
        yield Figure(f"{name}: `{title}`", f"<= {limit:g} s", spread(seconds[name], " s"), middle <= limit, how)


def _many_examples(count: int) -> Figure:
    """Examples of built-in schemes, evenly spaced over the table, without a cache of compiled references."""
    names = shell("-m", "shardproof", "list", "--quiet").output.split()
    chosen = [names[i * len(names) // count] for i in range(count)]
    done = shell("-m", "shardproof", "verify", *chosen, "--examples", str(EXAMPLES))
    timing = _timing(done.output)
    examples = int(timing.split()[0])
    rate = examples / done.cpu
    return Figure(
        "examples of built-in schemes, no cache",
        f">= {RATE:g} per second of CPU time",
        f"{rate:.3g}; {done.cpu:.3g} s for {examples} examples",
        rate >= RATE,
        f"{count} schemes, imports and gloo ranks counted; {timing}",
    )


def _tour() -> Figure:
    """The command that `make verify` runs, once everything is installed."""
    done = shell("-m", "shardproof", "tour")
    return Figure(
        "the tour of `make verify`",
        f"<= {TOUR:g} s",
        f"{done.wall:.3g} s of wall-clock time; {done.cpu:.3g} s of CPU time",
        done.wall <= TOUR,
        f"once, {os.cpu_count()} cores; {_timing(done.output)}",
    )


def _timing(output: str) -> str:
    """The sentence in which the command tells where its time went."""
    (sentence,) = re.findall(r"^\d+ examples? in .*$", output, re.MULTILINE)
    return sentence.strip()
