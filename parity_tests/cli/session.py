"""One call of `shardproof verify`: every scheme in turn, its report, the summary and the exit status."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from hypothesis import settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from parity_tests.harness.declare import discover
from parity_tests.harness.declare.case import DTYPES, ENGINES
from parity_tests.harness.declare.declared import Declared
from parity_tests.harness.draw import size_choices, strategy
from parity_tests.harness.judge import bridge
from parity_tests.harness.report import summary
from parity_tests.harness.report.out_path import refuse_no_folder, refuse_unwritable, write_text
from parity_tests.harness.report.report import PLAIN_WIDTH
from parity_tests.harness.report.summary import Outcome, Wanted
from parity_tests.harness.run.dtensor_advice import without_advice
from parity_tests.harness.run.exit_status import EQUAL
from parity_tests.harness.run.failure import NotRun
from parity_tests.harness.verify import verify as verify_scheme


def verify(targets: list[str], wanted: Wanted) -> int:
    """Verify every scheme of the targets and print; returns the exit status."""
    _check(wanted)
    if wanted.engine == "torchrun":
        from parity_tests.harness.run.processes import launch

        if not launch.is_rank_zero():
            return launch.serve()
    outcome = run(discover.find(targets), wanted)
    outcome.not_run |= {} if targets else discover.left_out()
    aside = wanted.json == "-" or wanted.junit == "-"  # standard output is for machines
    console = Console(stderr=aside, width=None if Console(stderr=aside).is_terminal else PLAIN_WIDTH)
    summary.show(console, outcome, wanted)
    if wanted.json:
        write_text(wanted.json, summary.as_json(outcome))
    if wanted.junit:
        write_text(wanted.junit, summary.as_junit(outcome))
    if wanted.engine == "torchrun":
        from parity_tests.harness.run.processes import launch

        launch.finish(outcome.status)
    return outcome.status


@without_advice()
def run(schemes: list[Declared], wanted: Wanted) -> Outcome:
    """Verify schemes in turn with a progress bar on standard error."""
    bridge.start(wanted.jax_cache)
    outcome = Outcome()
    several = len(schemes) > 1
    with _profile(wanted.profile), progress_bar(wanted.quiet) as bar:
        task = bar.add_task("", total=len(schemes))
        for made in schemes:
            bar.update(task, description=made.name)
            why = _not_applicable(made, wanted) if several else None
            if why:
                outcome.not_run[made.name] = why
            else:
                _one(made, wanted, outcome)
            bar.advance(task)
            if wanted.fail_fast and outcome.status != EQUAL and outcome.reports:
                break
    return outcome


@contextlib.contextmanager
def _profile(name: str) -> Iterator[None]:
    """A Hypothesis profile, for the time of a run."""
    before = settings.get_current_profile_name()
    strategy.register_profiles()
    settings.load_profile(name)
    try:
        yield
    finally:
        settings.load_profile(before)


def _one(made: Declared, wanted: Wanted, outcome: Outcome) -> None:
    start = time.perf_counter()
    try:
        report = verify_scheme(
            made,
            wanted.engine,
            wanted.examples or strategy.EXAMPLES[wanted.profile],
            wanted.seed,
            wanted.dtype,
            wanted.names,
            world=_fixed_world(wanted.engine),
        )
    except NotRun as reason:
        outcome.not_run[made.name] = str(reason)
        return
    outcome.reports.append(report)
    outcome.seconds[made.name] = time.perf_counter() - start


def _fixed_world(engine: str) -> int | None:
    if engine != "torchrun":
        return None
    from parity_tests.harness.run.processes import launch

    return launch.world_size()


def _not_applicable(made: Declared, wanted: Wanted) -> str | None:
    """Why a scheme is left out of a run of several: it lacks a name that was given, or the engine."""
    known = {*made.mesh, *size_choices.free_dims(made), *made.dims, *made.options, *made.rank_options}
    foreign = [name for name in wanted.names if name not in known]
    if foreign:
        return f"has no mesh axis, dim or option {foreign[0]!r}"
    if wanted.engine not in made.engines:
        return f"is declared for {', '.join(made.engines)} only"
    world = _fixed_world(wanted.engine)
    if world is not None and not size_choices.meshes(made, wanted.names, world):
        return f"has no mesh of {world} ranks"
    return None


def _check(wanted: Wanted) -> None:
    if wanted.engine not in ENGINES:
        raise ValueError(f"--engine {wanted.engine!r} is not one of {', '.join(ENGINES)}")
    if wanted.profile not in strategy.EXAMPLES:
        raise ValueError(f"--profile {wanted.profile!r} is not one of {', '.join(strategy.EXAMPLES)}")
    if wanted.dtype is not None and wanted.dtype not in DTYPES:
        raise ValueError(f"--dtype {wanted.dtype!r} is not one of {', '.join(DTYPES)}")
    refuse_unwritable(json=wanted.json, junit=wanted.junit)
    if wanted.json == wanted.junit == "-":
        raise ValueError("--json - --junit -: standard output takes one of them; give the other a file")
    refuse_no_folder(jax_cache=wanted.jax_cache)


def progress_bar(quiet: bool = False) -> Progress:
    """On standard error, and only on a terminal."""
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"))
    stderr = Console(stderr=True)
    return Progress(*columns, console=stderr, transient=True, disable=quiet or not stderr.is_terminal)
