"""Verify a scheme: many drawn cases, the worst result of each tensor, and the smallest failing case.

From a drawn case to the lines under a red row of the report:

1. `verify_one_case.verify_case` evaluates the reference, runs the ranks and compares every tensor. For each wrong one,
   `explain.clues` makes notes from its numbers, each with its scope: the cases that could refute it.
2. `undecided.mark_undecided` replaces the mismatch by the verdict `undecided` if the reference is discontinuous within
   the rounding of its inputs. `verify_or_undecided` is steps 1 and 2.
3. `simplest_choices.SimplestCase` replaces drawn choices by the simplest ones with the same failure, and
   `smallest.shrink` replaces the sizes by the smallest.
4. `special_values.name_values_to_avoid` verifies the case with normal values, to name the inputs whose ties or zeros
   the failure needs.
5. `second_opinion` verifies it on gloo, in fresh processes.
6. `notes.check_notes` verifies other cases and keeps the notes that hold in every one that fails.
7. `repaired_lines.name_lines` adds the line of a collective whose repair makes every gradient right, and
   `edited_programs.name_edits` the small edit of the function that makes every tensor right. If no note names a cause,
   `edited_lines.name_edited_line` adds the line that makes them right once it reads otherwise,
   `unused_inputs.name_unused_inputs` the inputs that change no output, and `wrong_backwards.name_wrong_backwards` the
   hand-written backward that is not the derivative of its forward.
8. A replay file is written, and the report prints the notes that remain, the best explanation first.

`check` is the body of a parity test: steps 1, 2 and 8 for one case, and it raises on failure. Hypothesis draws its
cases and shrinks failures, and its notes are not tested on other cases.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardproof.compared import check_compared, has_compared
from shardproof.declare.case import ENGINES, LARGEST_WORLD, CaseSpec
from shardproof.declare.conditions import LARGER_WORLD
from shardproof.declare.declared import Declared
from shardproof.declare.discover import lookup
from shardproof.declare.draws import Chooser
from shardproof.declare.keywords import rejects_unknown_keywords
from shardproof.draw import size_choices
from shardproof.draw.arguments import check_arguments
from shardproof.draw.choosers import Choice, RecordingChooser, even_chooser, seeded_chooser
from shardproof.draw.coverage import pairs_not_drawn, plan
from shardproof.draw.drawing import draw_case, fitting_meshes, meshes_left_out
from shardproof.draw.long_case import long_case
from shardproof.draw.profiles import EXAMPLES, SHAPES, few, profile
from shardproof.endings import exits
from shardproof.endings.raised import pass_interrupt
from shardproof.engines.collector import collecting_rarely
from shardproof.engines.failure import Stalled
from shardproof.engines.modes import outside_modes
from shardproof.engines.processes import pool
from shardproof.experiments.notes import check_notes, from_one_case
from shardproof.experiments.simplest_choices import SimplestCase
from shardproof.experiments.smallest import shrink
from shardproof.experiments.special_values import name_values_to_avoid
from shardproof.experiments.undecided import verify_or_undecided
from shardproof.judge import kept_traces
from shardproof.judge.reference import CLOCK
from shardproof.replays import write_replay
from shardproof.report.guard import sentence_of
from shardproof.report.merging import merge_reports
from shardproof.report.report import OF_ALL_EXAMPLES, Report, mesh_text
from shardproof.second_opinion import VERIFIED, second_opinion

Progress = Callable[[int, int, str], None]
# The steps after a failure, short enough for the progress bar of a narrow terminal.
SMALLER, CONFIRMED, CAUSE = "fails; making it smaller:", "fails; confirming on gloo:", "fails; finding the cause:"
VALUE_EXAMPLES = 8  # least number of examples if all sizes are given
MOST_PLANNED = 100  # examples that the pairs of a scheme may take by default


@dataclass(frozen=True)
class Search:
    """Reports of drawn cases; after a failure, the last is the simplest case with the same failure.

    `shrinking_steps` counts the runs that looked for it; `as_drawn` is the case that failed first.
    """

    reports: Sequence[Report]
    shrinking_steps: int = 0
    as_drawn: CaseSpec | None = None


@rejects_unknown_keywords
@exits.raised()
@outside_modes()
@collecting_rarely()
def verify(
    scheme: Declared,
    engine: str = "lockstep",
    examples: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    *,
    world: int | None = None,
    inside_subgroup: bool | None = None,
    progress: Progress | None = None,
    found: Callable[[Report], object] | None = None,
    replay_folder: str = ".",
    limit_s: float | None = None,
) -> Report:
    """See Scheme.verify; `fixed` gives mesh axes, dims and options, `world` the number of ranks.

    After `limit_s` seconds no further case is drawn, and the report says how many were not.

    `found` is called with the first failing report, before other cases are tried for a smaller one.

    `progress(done, total, state)` is called after each example of the search, not after the first cases, which are all
    cases if only values are drawn. `state` is empty until an example fails, and then names each step that follows.
    """
    fixed = dict(fixed or {})
    if engine not in ENGINES:
        raise ValueError(f"scheme '{scheme.name}': engine {engine!r} is not one of {', '.join(ENGINES)}")
    if engine not in scheme.engines:
        raise ValueError(f"scheme '{scheme.name}': is declared for {', '.join(scheme.engines)} only, not {engine}")
    check_arguments(scheme.name, examples=examples, seed=seed, inside_subgroup=inside_subgroup)
    seed = int(seed)  # a NumPy integer cannot be written as JSON
    VERIFIED.add(scheme.key)
    kept_traces.forget_if_changed(scheme.reference)
    draw_options = {"dtype": dtype, "engine": engine, "world": world, "inside_subgroup": inside_subgroup}
    trace_seconds_before, start = CLOCK.seconds, time.perf_counter()
    # 1. Verify the cases that need no search. Make the search long enough for each pair of a size and a mesh.
    first_cases, total = _first_cases(scheme, fixed, draw_options, seed, examples)
    choices = {"dtype": dtype, "world": world, "limit": SHAPES[profile()]}
    first_choices = plan(scheme, fixed, examples or MOST_PLANNED, seed, **choices)
    long = _long_cases(scheme, fixed, draw_options, seed, examples) if total > len(first_cases) else []
    if examples is None and total > len(first_cases):
        total = max(total, len(first_cases) + len(first_choices) + len(long))
    reports = _until_one_fails(scheme, first_cases)
    # 2. The rest is drawn, and a failure is reduced to the simplest case.
    search = Search(reports, as_drawn=next((report.case for report in reports if _ends(report)), None))
    if found and search.as_drawn is not None:
        found(merge_reports(reports))
    is_short = total > len(reports) or (_is_open(scheme, fixed) and not has_compared(scheme, reports))
    if is_short and search.as_drawn is None:
        until = math.inf if limit_s is None else start + limit_s
        drawn = max(total - len(reports) - len(long), 1)
        search = _search(scheme, fixed, draw_options, seed, drawn, progress, found, first_choices, until)
        reports += search.reports
        if not _ends(reports[-1]) and time.perf_counter() <= until:
            reports += _until_one_fails(scheme, long)
            search = replace(search, as_drawn=reports[-1].case if _ends(reports[-1]) else None)
            if found and search.as_drawn is not None:
                found(merge_reports(reports))
    # 3. One report: the worst of each tensor, or the smallest failure with its replay file.
    equal = [report for report in reports if report.ok or report.only_unwaited]
    if equal and not any(_ends(report) for report in reports):
        check_compared(scheme, equal)
    left_out = {mesh_text(mesh): reason for mesh, reason in meshes_left_out(scheme, fixed, world, SHAPES[profile()])}
    trace_seconds = CLOCK.seconds - trace_seconds_before
    report = replace(
        merge_reports(reports), left_out=left_out, trace_seconds=trace_seconds, shrinking_steps=search.shrinking_steps
    )
    if report.ok:
        not_drawn = pairs_not_drawn(scheme, fixed, [report.case for report in reports], **choices)
        if len(reports) < total:
            not_drawn = [f"{total - len(reports)} of {total} examples, at the limit of {limit_s:g} s", *not_drawn]
        return replace(report, not_drawn=tuple(not_drawn))
    begins = partial(progress, len(reports), total) if progress else id
    return with_replay_file(scheme, _with_explanation(scheme, report, fixed, search.as_drawn, begins), replay_folder)


def _with_explanation(
    scheme: Declared,
    report: Report,
    fixed: Mapping[str, Any],
    as_drawn: CaseSpec | None,
    begins: Callable[[str], object],
) -> Report:
    """The report with its smallest case, a second opinion, and notes that were tested on other cases.

    `begins` is called with the name of each step.
    """
    if report.is_undecided:
        return _after_step(report, lambda found: name_values_to_avoid(scheme, found))
    if report.only_unwaited:
        return _after_step(report, lambda found: second_opinion(scheme, found))
    begins(SMALLER)
    report = _after_step(report, lambda found: _with_smallest_case(scheme, found, fixed))
    report = _after_step(report, lambda found: name_values_to_avoid(scheme, found))
    begins(CONFIRMED)
    report = _after_step(report, lambda found: second_opinion(scheme, found, as_drawn))
    begins(CAUSE)
    return _after_step(report, lambda found: check_notes(scheme, found))


def _after_step(report: Report, step: Callable[[Report], Report]) -> Report:
    """`step(report)`; if the step raises, the report itself and a sentence, so that no failure is lost."""
    try:
        return step(report)
    except BaseException as error:
        pass_interrupt(error)
        return replace(report, unfinished=sentence_of(error)[1])


def _with_smallest_case(scheme: Declared, report: Report, fixed: Mapping[str, Any]) -> Report:
    """The report of the smallest case in place of the failing one, with the counts of all examples."""
    small = shrink(scheme, report, fixed)
    meshes = (mesh_text(small.case.mesh),)
    rest = {name: getattr(report, name) for name in OF_ALL_EXAMPLES}
    return replace(small, **rest, meshes=meshes, case_of_tensor={tensor.label: small.case for tensor in small.tensors})


def _is_open(scheme: Declared, fixed: Mapping[str, Any]) -> bool:
    """Whether a dim, a mesh axis or an option is drawn, rather than values only."""
    chosen = {**scheme.mesh, **scheme.options, **scheme.rank_options}
    return not _has_all_dims(scheme, fixed) or any(
        len(choices) > 1 and name not in fixed for name, choices in chosen.items()
    )


def _has_all_dims(scheme: Declared, fixed: Mapping[str, Any]) -> bool:
    return all(dim in fixed for dim in size_choices.free_dims(scheme))


def _first_cases(
    scheme: Declared, fixed: Mapping[str, Any], draw_options: Mapping[str, Any], seed: int, examples: int | None
) -> tuple[list[CaseSpec], int]:
    """The cases that are not drawn, and the total number of examples to draw up to.

    A single example is the seed's case, on several ranks if a mesh has them: one rank shards nothing. If all dims are
    given, there is one case for each mesh and dtype and, on lockstep if the caller gave neither a number of examples
    nor `inside_subgroup`, one inside a larger world. If only values are left to draw, there are at least
    VALUE_EXAMPLES, because some mistakes with masks, ids or lengths show only for a few values.
    """
    default_options = {**draw_options, "inside_subgroup": bool(draw_options["inside_subgroup"])}
    seeded_case = draw_case(scheme, seeded_chooser(seed), fixed, seed=seed, **default_options)
    cases = _case_of_each_mesh_and_dtype(scheme, fixed, default_options, seed)
    total = examples or (EXAMPLES[profile()] if _is_open(scheme, fixed) else len(cases))
    if examples == 1:
        several = _meshes_of_several_ranks(scheme, fixed, draw_options["world"])
        if several and seeded_case.scheme_mesh not in several:
            mesh = several[seed % len(several)]
            seeded_case = draw_case(scheme, seeded_chooser(seed), {**fixed, **mesh}, seed=seed, **default_options)
        return [seeded_case], total
    if total < len(cases):
        return [], total
    is_inside_drawn = draw_options["inside_subgroup"] is None and LARGER_WORLD not in scheme.excluded_conditions
    if cases and examples is None and is_inside_drawn and draw_options["engine"] == "lockstep":
        inside = {**draw_options, "inside_subgroup": True}
        case = draw_case(scheme, seeded_chooser(seed), fixed, seed=seed, **inside)
        cases += [case] if case.world <= LARGEST_WORLD else []
    if examples is None and not _is_open(scheme, fixed):
        choosers = (even_chooser(number, seed) for number in range(len(cases), VALUE_EXAMPLES))
        cases += [draw_case(scheme, choose, fixed, **default_options) for choose in choosers]
    return cases, total


def _meshes_of_several_ranks(scheme: Declared, fixed: Mapping[str, Any], world: int | None) -> list[dict[str, int]]:
    return [mesh for mesh in fitting_meshes(scheme, fixed, world) if math.prod(mesh.values()) > 1]


def _long_cases(
    scheme: Declared, fixed: Mapping[str, Any], draw_options: Mapping[str, Any], seed: int, examples: int | None
) -> list[CaseSpec]:
    """The scheme's long case, which replaces the last drawn example, if the caller gives no choice that excludes it."""
    is_free = examples is None and draw_options["dtype"] is None and draw_options["world"] is None
    if not is_free or draw_options["engine"] != "lockstep" or draw_options["inside_subgroup"]:
        return []
    case = long_case(scheme, fixed, seed)
    return [] if case is None else [case]


def _case_of_each_mesh_and_dtype(
    scheme: Declared, fixed: Mapping[str, Any], draw_options: Mapping[str, Any], seed: int
) -> list[CaseSpec]:
    """If all dims are given: one case on each mesh that can shard them, in each dtype.

    Mistakes on a single mesh or dtype are common, such as a sum in bfloat16.
    """
    if not _has_all_dims(scheme, fixed):
        return []
    dtypes = (draw_options["dtype"],) if draw_options["dtype"] else scheme.dtypes
    cases = []
    for mesh in fitting_meshes(scheme, fixed, draw_options["world"]):
        case = draw_case(scheme, seeded_chooser(seed), {**fixed, **mesh}, seed=seed, **draw_options)
        cases += [case.replace(dtype=dtype) for dtype in dtypes]
    return cases


def _ends(report: Report) -> bool:
    """Whether the search ends with this report. A call that was never waited for does not end it: no number changes."""
    return report.failed and not report.only_unwaited


def _until_one_fails(scheme: Declared, cases: Sequence[CaseSpec]) -> list[Report]:
    reports: list[Report] = []
    for case in cases:
        if not reports or not _ends(reports[-1]):
            reports.append(verify_or_undecided(scheme, case))
    return reports


def _search(
    scheme: Declared,
    fixed: Mapping[str, Any],
    draw_options: Mapping[str, Any],
    seed: int,
    total: int,
    progress: Progress | None,
    found: Callable[[Report], object] | None,
    first_choices: Sequence[Sequence[Choice]],
    until: float,
) -> Search:
    """Verify drawn cases until one fails, and simplify that one; `first_choices` are given for the first cases.

    After `until`, a time of `time.perf_counter`, the search goes on only until it has drawn one case, on several ranks
    if a mesh has them. If `total` cases compared nothing, as where all outputs are empty, more are drawn.
    """
    several = _meshes_of_several_ranks(scheme, fixed, draw_options["world"])

    def draw(choose: Chooser) -> CaseSpec:
        options = {**draw_options, "limit": SHAPES[profile()], "with_conditions": True}
        return draw_case(scheme, choose, fixed, **options)

    reports: list[Report] = []
    for number in range(max(total, EXAMPLES[profile()])):
        if number >= total and has_compared(scheme, reports):
            break
        planned = first_choices[number] if number < len(first_choices) else ()
        chooser = RecordingChooser(even_chooser(number, seed), planned)
        reports.append(verify_or_undecided(scheme, draw(chooser)))
        if progress:
            progress(len(reports), max(total, len(reports)), SMALLER if _ends(reports[-1]) else "")
        if _ends(reports[-1]):
            if found:
                found(merge_reports(reports))
            if "gloo" in scheme.engines:
                pool.start_ahead()  # ranks for the second opinion
            return _with_simplest(scheme, reports, draw, chooser)
        are_sharded = not several or any(report.case.scheme_mesh in several for report in reports)
        if are_sharded and time.perf_counter() > until:
            break
    return Search(reports)


def _with_simplest(
    scheme: Declared, reports: Sequence[Report], draw: Callable[[Chooser], CaseSpec], chooser: RecordingChooser
) -> Search:
    """The reports, with the simplest failing case as the last."""
    *passing, failing = reports
    # A search is too slow where each run starts processes, as on other engines, or waits for a stalled rank again.
    if failing.case.engine != "lockstep" or isinstance(failing.failure, Stalled):
        return Search(reports, as_drawn=failing.case)
    search = SimplestCase(draw, partial(verify_or_undecided, scheme), failing, chooser.choices)
    return Search([*passing, search.search()], search.runs, failing.case)


@exits.raised()
def check(case: CaseSpec) -> Report:
    """Verify one case and raise unless all four oracles pass; writes a replay file for a failing case."""
    from hypothesis import currently_in_test_context, reject

    scheme = lookup(case.scheme)
    if not currently_in_test_context():
        kept_traces.forget_if_changed(scheme.reference)
    report = verify_or_undecided(scheme, case)
    if report.is_undecided and currently_in_test_context():
        reject()  # Hypothesis draws another example; if there is none, the test does not pass
    if not report.ok:
        with_replay_file(scheme, from_one_case(report), ".").raise_if_failed()
    return report


def check_cases(scheme: Declared, examples: int | None = None, *, engine: str = "lockstep", **fixed: Any) -> None:
    """Draw cases of a scheme and `check` each: the body of a parity test for several schemes or engines.

    `examples` is their number, by default the active Hypothesis profile's; the profile `fast` draws a third of a given
    number, and plans them as `verify` does. `fixed` gives mesh axes, dims and options. Raises like `check`, for the
    smallest failing case.
    """

    from hypothesis import Phase, given, settings

    from shardproof.draw.reproducible import reproducible_draws
    from shardproof.draw.strategy import every_case

    check_arguments(scheme.name, examples=examples, inside_subgroup=fixed.get("inside_subgroup"))
    count = few(examples) if examples else settings().max_examples
    if profile() == "fast":  # a few planned examples meet more conditions than as many independent draws
        named = {name: fixed.pop(name) for name in ("dtype", "world", "inside_subgroup") if name in fixed}
        verify(scheme, engine, count, fixed=fixed, **named).raise_if_failed()
        return
    # Hypothesis's phase explain would call the test about 100 times more, and the report explains a failure already.
    phases = [phase for phase in settings().phases if phase is not Phase.explain]

    # No deadline: the first case of a shape traces the reference.
    @settings(max_examples=count, deadline=None, phases=phases)
    @given(every_case(scheme, engine=engine, **fixed))
    def each(case: CaseSpec) -> None:
        check(case)

    with reproducible_draws():
        try:
            each()
        except Exception as error:  # its message has the case; Hypothesis adds the example
            error.__notes__ = [note for note in getattr(error, "__notes__", ()) if "case=CaseSpec(" not in note]
            raise


def with_replay_file(scheme: Declared, report: Report, folder: str) -> Report:
    """The report with its replay file, or with the reason why it could not be written."""
    try:
        path, replaced = write_replay(scheme, report, folder)
        return replace(report, replay=path, replaced_replays=tuple(replaced))
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        return replace(report, replay_error=f"{reason}; shardproof verify --replay-dir DIR writes it elsewhere")
    except BaseException as error:  # an object that the function refers to may not be picklable
        pass_interrupt(error)
        return replace(report, replay_error=sentence_of(error)[1])
