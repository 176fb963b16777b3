"""Verify schemes in parallel, each in the next free process: most of the time is spent tracing references.

A worker imports the file that declares a scheme, verifies it like `shardproof verify --profile quick`, and returns its
outcome.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from shardproof.cli import session
from shardproof.declare import discover
from shardproof.declare.declared import Declared

MOST = 4  # processes; each holds torch and JAX


def verified(schemes: Sequence[Declared], examples: int) -> session.Outcome:
    """The outcomes of all schemes in the given order, with a progress bar on standard error."""
    count = max(min(MOST, os.cpu_count() or 1, len(schemes)), 1)
    by_key: dict[str, session.Outcome] = {}
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as workers, session.progress_bar() as bar:
        task = bar.add_task("", total=len(schemes))
        waiting = {workers.submit(_one, scheme.file, scheme.name, examples): scheme for scheme in schemes}
        for done in as_completed(waiting):
            by_key[waiting[done].key] = done.result()
            bar.update(task, advance=1, description=waiting[done].name)
    return _joined([by_key[scheme.key] for scheme in schemes], count)


def _one(file: str, name: str, examples: int) -> session.Outcome:
    scheme = next(candidate for candidate in discover.schemes_of_file(file) if candidate.name == name)
    return session.run([scheme], session.VerifyOptions(examples=examples, profile="quick", quiet=True))


def _joined(outcomes: Sequence[session.Outcome], processes: int) -> session.Outcome:
    total = session.Outcome(processes=processes)
    for outcome in outcomes:
        total.reports += outcome.reports
        total.not_run |= outcome.not_run
        total.not_judged |= outcome.not_judged
        total.seconds |= outcome.seconds
    return total
