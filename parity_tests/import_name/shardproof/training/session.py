"""One call of `shardproof train`: run each mesh in turn, judge every step, and return the exit status."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from shardproof.declare.case import ENGINES, CaseSpec
from shardproof.declare.counted import counted
from shardproof.endings.exit_status import EQUAL, MISMATCH, RANK_FAILED
from shardproof.engines.engines import run as on_ranks
from shardproof.engines.failure import RankFailure
from shardproof.judge import bridge
from shardproof.report.out_path import check_writable, naming, write_text
from shardproof.report.sentence import Sentence, is_broken
from shardproof.training import checkpoint, page, show
from shardproof.training.body import train as body
from shardproof.training.figure import figure
from shardproof.training.follow import Follower, ReferenceSteps
from shardproof.training.judged import Judged
from shardproof.training.run import Run


@dataclass(frozen=True)
class TrainOptions:
    """The command's options, except the settings of the runs."""

    engine: str = "gloo"
    figure: str | None = None
    json: str | None = None
    page: str | None = None
    quiet: bool = False


def train(runs: Sequence[Run], options: TrainOptions) -> int:
    """Run all runs in turn, and return the worst exit status."""
    if options.engine not in ENGINES:
        raise ValueError(f"--engine {options.engine!r} is not one of {', '.join(ENGINES)}")
    check_writable(json=options.json, figure=options.figure, page=options.page)
    if len(runs) > 1 and runs[0].checkpoint is not None:
        raise ValueError(f"--checkpoint {runs[0].checkpoint}: each mesh is a run of its own; give one --mesh")
    if options.engine == "torchrun":
        from shardproof.engines.processes import launch

        if not launch.is_rank_zero():
            return launch.serve()
        _check_world(runs, launch.world_size())
    status = _all(runs, options)
    if options.engine == "torchrun":
        from shardproof.engines.processes import launch

        launch.finish(status)
    return status


def _check_world(runs: Sequence[Run], world: int) -> None:
    """Errors: ValueError unless each mesh has as many ranks as the job."""
    for run in runs:
        ranks = math.prod(run.full_mesh.values())
        if ranks != world:
            mesh = ",".join(f"{axis}={size}" for axis, size in run.mesh.items()) or "one rank"
            raise ValueError(f"--mesh {mesh} has {ranks} ranks, but the job has {world}; give a mesh of {world}")


def _all(runs: Sequence[Run], options: TrainOptions) -> int:
    text_to_stderr = options.json == "-"  # standard output is for JSON alone
    console = Console(stderr=text_to_stderr, width=None if is_broken(Console(stderr=text_to_stderr)) else show.WIDTH)
    reference_steps, status, done, reports = ReferenceSteps(), EQUAL, [], []
    for run in runs:
        try:
            steps = followed(run, reference_steps, options.engine, options.quiet)
        except RankFailure as failure:
            console.print(Sentence(f"{show.named(run)}: {failure}", "red"), soft_wrap=True)
            status = RANK_FAILED
            reports.append((run, failure))
            continue
        done.append((run, steps))
        reports.append((run, steps))
        if not options.quiet:
            console.print(show.table(steps))
        console.print(Sentence(show.closing(run, steps), "bold"), soft_wrap=True)
        status = max(status, EQUAL if all(step.ok for step in steps) else MISMATCH)
    if options.json:
        write_text(options.json, show.as_json(reports))
    _write(done, options)
    return status


def followed(run: Run, reference_steps: ReferenceSteps, engine: str = "gloo", quiet: bool = True) -> list[Judged]:
    """Run the ranks, and judge each step while they run.

    Errors: RankFailure, one subclass per cause, also if the ranks end before the last step; ValueError for a resumed
            run without a checkpoint, or a folder that another run writes to or has written to.
    """
    bridge.start()
    with checkpoint.locked(run):
        return _followed(run, reference_steps, engine, quiet)


def _followed(run: Run, reference_steps: ReferenceSteps, engine: str, quiet: bool) -> list[Judged]:
    checkpoint.check_unused(run)
    first = checkpoint.newest(run) if run.resume else 0
    if first == run.steps:
        raise ValueError(f"--resume: all {run.steps} steps are done; pass --steps above {first}")
    with tempfile.TemporaryDirectory() as folder, show.LiveTable(run, first, quiet) as live:
        options = run.options(folder=folder)
        case = CaseSpec(scheme="train", mesh=run.full_mesh, dtype=run.dtype, options=options, engine=engine)
        follower = Follower(run, reference_steps, folder, first, live.add)
        follower.start()
        try:
            on_ranks(body, case, engine)
        except KeyboardInterrupt:
            follower.leave()
            raise
        except BaseException:
            follower.end()
            raise
        follower.end()
        steps = follower.judged()
    if len(steps) < run.steps - first:
        text = f"the ranks ended after {first + len(steps)} of {counted(run.steps, 'step')}; run it again"
        raise RankFailure(text, rank=0, case=case)
    return steps


def _write(done: Sequence[tuple[Run, Sequence[Judged]]], options: TrainOptions) -> None:
    if options.page and done:
        with naming(options.page):
            page.write(done, options.page)
    if options.figure and done:
        run, steps = done[-1]
        with naming(options.figure):
            figure(steps, show.named(run)).savefig(options.figure, dpi=130, metadata={"Software": None})
