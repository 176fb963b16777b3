"""One call of `shardproof verify`: every scheme in turn, its report, the summary and the exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from shardproof.cli import expected
from shardproof.cli.ended_early import add_earlier, declared_again, end_early, of_death, remembered, substituted
from shardproof.declare import discover, scheme_index
from shardproof.declare.case import DTYPES, ENGINES
from shardproof.declare.counted import counted
from shardproof.declare.declared import Declared
from shardproof.declare.failed_declaration import FailedDeclaration, FailedImport
from shardproof.draw import profiles, size_choices
from shardproof.endings import journal, signals
from shardproof.endings.earlier_files import NOT_ENDED
from shardproof.endings.exit_status import EQUAL, INTERNAL, RANK_FAILED, NotJudged
from shardproof.endings.raised import pass_interrupt
from shardproof.engines import supervised
from shardproof.engines.engines import limited
from shardproof.engines.failure import NotRun, RankFailure
from shardproof.engines.processes.rank_warnings import without_repeats
from shardproof.engines.speed_advice import without_advice
from shardproof.implementation.offered import NotApplicable, module_of
from shardproof.implementation.substitution import NotOffered
from shardproof.judge import bridge
from shardproof.line_types.opinion import INSTALL, is_installed, with_types
from shardproof.places import ROOT
from shardproof.report import summary
from shardproof.report.guard import (
    complain,
    own_output,
    print_traceback,
    prints_on_stderr,
    sentence_of,
    uninterrupted,
    without_hiding,
)
from shardproof.report.html_page import page
from shardproof.report.out_path import check_folder, check_writable, write_texts
from shardproof.report.report import Report
from shardproof.report.sentence import Sentence
from shardproof.report.summary import Expected, Outcome, Place, VerifyOptions
from shardproof.verification import Progress as Progressed
from shardproof.verification import verify as verify_scheme
from shardproof.verification import with_replay_file

LONG_S = 60.0
Keep = Callable[[str, Report], None]  # takes the key of a scheme and its first failing report
BAR_AND_TIMES = 52  # columns of a bar, counts of four digits, and the times


def verify(
    targets: list[str],
    options: VerifyOptions,
    first: Collection[str] = (),
    *,
    fails: Callable[[Report], object] = id,
    judged: Callable[[Outcome], object] = id,
) -> int:
    """Verify every scheme of the targets and print the reports; returns the exit status.

    Schemes whose keys are in `first` come first. `fails` is called with each scheme's first failing report, before its
    cause is looked for, and `judged` with the outcome, before the reports are printed.
    """
    _check_options(options, targets)
    # A user's code may change the working folder: files are written where the command was started.
    paths = {option: path if path in (None, "-") else os.path.abspath(path) for option, path in options.files.items()}
    folder, cache = os.path.abspath(options.replay_dir or "."), options.jax_cache and os.path.abspath(options.jax_cache)
    if options.engine == "torchrun":
        from shardproof.engines.processes import launch

        if not launch.is_rank_zero():
            return launch.serve()
    text_to_stderr = "-" in options.files.values()  # standard output is for machines
    if journal.current is not None and any(paths.values()):
        journal.current.will_write()
    _replace_earlier(targets, paths)
    outcome = Outcome()
    try:
        with prints_on_stderr() if text_to_stderr else contextlib.nullcontext(), own_output():
            declarations = declared_again(targets, outcome)
            if declarations is not None:
                declarations.sort(key=lambda each: each.key not in first)
                run(declarations, replace(options, replay_dir=folder, jax_cache=cache, **paths), outcome, fails)
            add_earlier(outcome)
            if declarations is None and supervised.is_over:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        _publish_after_interrupt(outcome, options, paths)
        raise
    outcome.reports = [_with_path_as_given(report, options.replay_dir or "") for report in outcome.reports]
    judged(outcome)
    outcome.not_run |= {} if targets else discover.left_out()
    with without_hiding(outcome.status):
        _publish(outcome, options, paths)
    if options.engine == "torchrun":
        from shardproof.engines.processes import launch

        launch.finish(outcome.status)
    if outcome.is_one_unusable_scheme:
        raise NotJudged(next(iter(outcome.not_judged.values())), outcome.status)
    return outcome.status


def _publish_after_interrupt(outcome: Outcome, options: VerifyOptions, paths: Mapping[str, str | None]) -> None:
    """After an interrupt: print the reports and write all files, with the status of a command that has not ended."""
    with uninterrupted():
        outcome.ended_by = signals.asked or signal.SIGINT
        outcome.reports = [_with_path_as_given(report, options.replay_dir or "") for report in outcome.reports]
        try:
            if outcome.keys:
                _publish(outcome, options, paths)
            else:
                _write_files(outcome, paths)
            sys.stdout.flush()
        except OSError as error:  # the sentence on the interrupt is still to be printed
            complain(sentence_of(error)[1])


def _publish(outcome: Outcome, options: VerifyOptions, paths: Mapping[str, str | None]) -> None:
    """Write all files and print the reports; if a file cannot be written, write the others. Errors: OSError."""
    console = Console(stderr="-" in paths.values())
    try:  # files first: a reader of standard output may take nothing for ever
        with uninterrupted():  # an interrupt in between would leave one new file beside an earlier command's
            _write_files(outcome, paths)
    finally:
        if not outcome.is_one_unusable_scheme:
            summary.show(console, outcome, options)
    if options.html and options.html != "-" and not options.quiet:
        console.print(Sentence(f"page: {options.html}"), soft_wrap=True)  # keep a path in one piece


def _replace_earlier(targets: Sequence[str], paths: Mapping[str, str | None]) -> None:
    """Overwrite files of an earlier command: they say that this one has not ended, in case a SIGKILL ends it."""
    unfinished = Outcome(ended_by=signal.SIGKILL)
    unfinished.reject(" ".join(targets) or "all schemes", NOT_ENDED)
    with contextlib.suppress(OSError):  # reported at the end, after all verdicts
        _write_files(unfinished, {option: path for option, path in paths.items() if path and os.path.isfile(path)})


def _write_files(outcome: Outcome, paths: Mapping[str, str | None]) -> None:
    texts = {
        paths.get("json"): partial(summary.as_json, outcome),
        paths.get("junit"): partial(summary.as_junit, outcome),
        paths.get("html"): partial(
            page, outcome.reports, summary.closing(outcome), summary.without_report(outcome), outcome.titles
        ),
    }
    write_texts({path: text for path, text in texts.items() if path})


def _with_path_as_given(report: Report, folder: str) -> Report:
    """The report, with its replay file in the folder that the command line names."""
    return replace(report, replay=os.path.join(folder, os.path.basename(report.replay))) if report.replay else report


@without_advice()
def run(
    declarations: Sequence[Declared | FailedDeclaration | FailedImport],
    options: VerifyOptions,
    outcome: Outcome | None = None,
    fails: Callable[[Report], object] = id,
) -> Outcome:
    """Verify schemes in turn, with a progress bar on standard error: of schemes, or of a single scheme's examples.

    A caller who gives an empty `outcome` has the verdicts so far after an interrupt. `fails` is as for `verify`.
    """
    bridge.start(options.jax_cache)
    outcome = Outcome() if outcome is None else outcome
    outcome.expected = _expected_of(declarations, options)
    outcome.places = {each.key: Place(each.name, each.file, each.line) for each in declarations}
    for each in declarations:
        if isinstance(each, FailedDeclaration | FailedImport):
            outcome.reject(each.key, each.sentence, each.status)
    schemes = [each for each in declarations if isinstance(each, Declared)]
    several = len(declarations) > 1
    if schemes and not several:
        _check_flags(schemes[0], options)
    if supervised.words is not None and options.timeout is not None:
        supervised.words.limit_runs(options.timeout)
    found: dict[str, Report] = {}

    def keep(key: str, report: Report) -> None:
        found[key] = report
        if journal.current is not None:
            journal.current.found(key, report)
        fails(report)

    try:
        with profiles.in_force(options.profile), limited(options.timeout), without_repeats():
            _judge_each(schemes, options, outcome, keep, several=several)
    except KeyboardInterrupt:
        with uninterrupted():
            end_early(outcome, schemes, found, options)
        raise
    return outcome


def _judge_each(
    schemes: Sequence[Declared], options: VerifyOptions, outcome: Outcome, keep: Keep, *, several: bool
) -> None:
    """Add the outcome of each scheme; `keep` is called with a failing report as soon as there is one."""
    with progress_bar(options.quiet) as bar:
        task = bar.add_task("", total=len(schemes))
        keep = partial(_keep_without_bar, bar, keep)
        for number, scheme in enumerate(schemes, start=1):
            bar.update(task, description=scheme.name, has_failed=False)
            progress = partial(_show_examples, bar, task, scheme.name, is_counted=len(schemes) == 1)
            judged = partial(_one, scheme, options, progress, keep, several=several)
            named = _name_if_long(f"{scheme.name}, scheme {number} of {len(schemes)}", bar)
            with named, _publish_if_ended(outcome, schemes[number - 1 :], options):
                outcome.add(remembered(scheme, judged, options))
            bar.advance(task, int(several))
            if options.fail_fast and outcome.status != EQUAL and outcome.reports:
                break


def _keep_without_bar(bar: Progress, keep: Keep, key: str, report: Report) -> None:
    """Call `keep`, which may print lines where the bar stands."""
    if bar.disable:
        keep(key, report)
        return
    bar.stop()
    try:
        keep(key, report)
    finally:
        bar.start()


def _publish_if_ended(
    outcome: Outcome, rest: Sequence[Declared], options: VerifyOptions
) -> contextlib.AbstractContextManager[None]:
    """A block that judges the first of these schemes. If torchrun ends the job in it, publish the verdicts so far."""
    if options.engine != "torchrun":
        return contextlib.nullcontext()
    from shardproof.engines.processes import launch

    def tell(sentence: str, failure: RankFailure | None) -> None:
        first, *others = rest
        known = None if failure is None or failure.case is None else (failure, failure.case.json)
        report = of_death(substituted(first, options), known)
        if report is None:
            outcome.reject(first.key, f"scheme '{first.name}': {sentence}", RANK_FAILED)
        else:
            outcome.reports.append(with_replay_file(first, report, options.replay_dir or "."))
        outcome.not_run |= {scheme.key: "the job has ended" for scheme in others}
        _publish(outcome, options, options.files)
        sys.stdout.flush()
        if journal.current is not None:
            journal.current.done(first.key)

    return launch.telling(tell)


@contextlib.contextmanager
def _name_if_long(what: str, bar: Progress) -> Iterator[None]:
    """Name on standard error a scheme that has run for LONG_S seconds, if no progress bar shows it."""

    def name() -> None:
        complain(f"{what}, has run for {LONG_S:g} s; --limit SECONDS ends it after a case")

    timer = threading.Timer(LONG_S, name)
    timer.daemon = True
    if bar.disable:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _show_examples(
    bar: Progress, task: TaskID, scheme: str, done: int, total: int, state: str, *, is_counted: bool
) -> None:
    """Show a scheme's state, and if `is_counted` how many examples are done."""
    if is_counted:
        bar.update(task, completed=done, total=total)
    # The state comes first: a narrow terminal cuts the end.
    bar.update(task, description=f"{state} {scheme}".lstrip(), has_failed=bool(state))


def _expected_of(
    schemes: Sequence[Declared | FailedDeclaration | FailedImport], options: VerifyOptions
) -> dict[str, Expected]:
    """The expected failures of these schemes; the file may also name other built-in schemes."""
    if options.expected_failures is None:
        return {}
    places = {each.key: Place(each.name, each.file, each.line) for each in schemes}
    others = {each.key: Place(each.name, str(ROOT / each.file), each.line) for each in scheme_index.entries()}
    return expected.read(options.expected_failures, places, others)


def _check_flags(scheme: Declared, options: VerifyOptions) -> None:
    """ValueError for a dim or an unknown name given by --mesh, or a mesh axis given by --dim."""
    dims = [*size_choices.free_dims(scheme), *scheme.dims]
    for flag, other, names, wrong, what in (
        ("--mesh", "--dim", options.mesh_names, dims, "dim"),
        ("--dim", "--mesh", options.dim_names, scheme.mesh, "mesh axis"),
    ):
        for name in names:
            if name in wrong:
                text = f"{name}={options.fixed[name]}"
                raise ValueError(f"scheme '{scheme.name}': {flag} {text}: {name!r} is a {what}; write {other} {text}")
    for name in options.mesh_names:
        if name not in scheme.mesh:
            of_scheme = f"a mesh axis ({', '.join(scheme.mesh)})"
            raise ValueError(
                f"scheme '{scheme.name}': --mesh {name}={options.fixed[name]}: {name!r} is not {of_scheme}"
            )


def _one(scheme: Declared, options: VerifyOptions, progress: Progressed, keep: Keep, *, several: bool) -> Outcome:
    """The outcome of one scheme. If one of several raises, only its own verdict is lost."""
    outcome = Outcome()
    try:
        reason = _not_applicable(scheme, options) if several else None
        if reason:
            outcome.not_run[scheme.key] = reason
        else:
            _judge(scheme, options, outcome, progress, keep)
    except BaseException as error:
        pass_interrupt(error)
        status, sentence = sentence_of(error)
        if status == INTERNAL:
            print_traceback(error)
        title = f"scheme '{scheme.name}': "
        outcome.reject(scheme.key, title + sentence.removeprefix(title), status)
    return outcome


def _judge(scheme: Declared, options: VerifyOptions, outcome: Outcome, progress: Progressed, keep: Keep) -> None:
    start = time.perf_counter()
    try:
        scheme = substituted(scheme, options)
        report = verify_scheme(
            scheme,
            options.engine,
            options.examples,
            options.seed,
            options.dtype,
            options.fixed,
            world=_fixed_world(options.engine),
            inside_subgroup=options.inside_subgroup,
            progress=progress,
            found=partial(keep, scheme.key),
            replay_folder=options.replay_dir or ".",
            limit_s=options.limit,
        )
    except NotOffered as reason:
        outcome.not_offered[scheme.key] = str(reason)
        return
    except NotApplicable as reason:
        outcome.not_run[scheme.key] = f"not applicable: {reason}"
        return
    except NotRun as reason:
        outcome.not_run[scheme.key] = str(reason)
        return
    outcome.reports.append(with_types(scheme, report, asked=options.types))
    outcome.seconds[scheme.key] = time.perf_counter() - start


def _fixed_world(engine: str) -> int | None:
    if engine != "torchrun":
        return None
    from shardproof.engines.processes import launch

    return launch.world_size()


def _not_applicable(scheme: Declared, options: VerifyOptions) -> str | None:
    """Why a run of several schemes skips this one: it lacks a given name, or the engine."""
    names = {*scheme.mesh, *size_choices.free_dims(scheme), *scheme.dims, *scheme.options, *scheme.rank_options}
    foreign = [name for name in options.fixed if name not in names]
    if foreign:
        return f"has no mesh axis, dim or option {foreign[0]!r}"
    if options.engine not in scheme.engines:
        return f"is declared for {', '.join(scheme.engines)} only"
    world = _fixed_world(options.engine)
    if world is not None and not size_choices.meshes(scheme, options.fixed, world):
        return f"has no mesh of {counted(world, 'rank')}"
    return None


def _check_options(options: VerifyOptions, targets: Sequence[str]) -> None:
    if options.engine not in ENGINES:
        raise ValueError(f"--engine {options.engine!r} is not one of {', '.join(ENGINES)}")
    if options.profile not in profiles.EXAMPLES:
        raise ValueError(f"--profile {options.profile!r} is not one of {', '.join(profiles.EXAMPLES)}")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ValueError(f"--dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")
    if options.implementation is not None:
        module_of(options.implementation)
    if options.types and not is_installed():
        raise ValueError(f"--types needs spmd-types; {INSTALL}")
    inputs = {f"the target {target}": target.partition("::")[0] for target in targets}
    check_writable({"--expected-failures": options.expected_failures, **inputs}, **options.files)
    check_folder(jax_cache=options.jax_cache, replay_dir=options.replay_dir)


class TimeLeft(TimeRemainingColumn):
    """The time that the remaining examples will take; hidden after a failure, while its cause is searched."""

    def render(self, task: Task) -> Text:
        return Text() if task.fields.get("has_failed") else Text("left: ") + super().render(task)


def progress_bar(quiet: bool = False) -> Progress:
    """A progress bar on standard error, which is shown only on a terminal."""
    stderr = Console(stderr=True)
    # On a narrow terminal the name makes room for the times.
    name = Column(no_wrap=True, overflow="ellipsis", max_width=max(stderr.width - BAR_AND_TIMES, 1))
    columns = (
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeLeft(),
        TextColumn("{task.description}", table_column=name),
    )
    return Progress(*columns, console=stderr, transient=True, disable=quiet or not stderr.is_terminal)
