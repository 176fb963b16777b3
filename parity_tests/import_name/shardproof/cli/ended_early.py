"""Add outcomes of schemes after the command was interrupted, or after an earlier process of the command died."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardproof.declare import discover
from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.declare.failed_declaration import FailedDeclaration, FailedImport
from shardproof.endings import journal, signals
from shardproof.endings.exit_status import RANK_FAILED
from shardproof.endings.raised import pass_interrupt
from shardproof.engines import supervised
from shardproof.engines.failure import RankFailure
from shardproof.experiments.notes import from_one_case
from shardproof.implementation.substitution import narrowed, on_implementation
from shardproof.report import summary
from shardproof.report.report import Report
from shardproof.report.summary import Outcome, VerifyOptions
from shardproof.verification import with_replay_file
from shardproof.verify_one_case import of_failed_rank


def declared_again(targets: list[str], outcome: Outcome) -> list[Declared | FailedDeclaration | FailedImport] | None:
    """The declarations of the targets; None if this process only prints the verdicts of an earlier one.

    A file may have been edited since the earlier process imported it. If it cannot be imported now, `outcome` says so.
    """
    has_earlier = journal.current is not None and any(journal.current.of_earlier())
    if supervised.is_over and not (supervised.may_import and has_earlier):
        return None
    try:
        return discover.find_declarations(targets)
    except discover.UnusableTarget as error:
        if not has_earlier:
            raise
        outcome.reject(" ".join(targets), str(error))
        return None


def add_earlier(outcome: Outcome) -> None:
    """Add the outcomes that earlier processes have left for schemes without an outcome in this process."""
    if journal.current is None:
        return
    outcomes, found, lost = journal.current.of_earlier()
    for earlier in outcomes:
        if outcome.keys.isdisjoint(earlier.keys):
            outcome.add(earlier)
    for key, report in found.items():
        if key not in outcome.keys:
            outcome.reports.append(from_one_case(replace(report, unfinished=lost.get(key, "the process has ended"))))
    for key, sentence in lost.items():
        if key not in outcome.keys:
            outcome.reject(key, f"{key.rpartition(':')[2]}: {sentence}", RANK_FAILED)


def end_early(
    outcome: Outcome, schemes: Sequence[Declared], found: Mapping[str, Report], options: VerifyOptions
) -> None:
    """Add an outcome for each scheme that an interrupt left without one; the first may have a failing case already."""
    rest = [scheme for scheme in schemes if scheme.key not in outcome.keys]
    if not rest:
        return
    first, *others = rest
    how = "interrupted" if signals.asked in (None, signal.SIGINT) else f"ended by {signals.signal_name(signals.asked)}"
    earlier = None if journal.current is None else journal.current.report(first.key)
    report = found.get(first.key, earlier)
    if report is not None:
        report = from_one_case(replace(report, unfinished=how))
        outcome.reports.append(with_replay_file(substituted(first, options), report, options.replay_dir or "."))
    else:
        outcome.reject(first.key, f"scheme '{first.name}': {how} before it was judged")
    outcome.not_run |= {scheme.key: summary.ENDED_BEFORE for scheme in others}


def remembered(scheme: Declared, judged: Callable[[], Outcome], options: VerifyOptions) -> Outcome:
    """The outcome of a scheme: from an earlier process of this command that has died, else from `judged()`.

    If the process died while it judged this scheme, the outcome has the failing case that it had found, or the death.
    """
    record = journal.current
    if record is None:
        return judged()
    sentence = record.sentence(scheme.key)
    if sentence is None:
        outcome = record.outcome(scheme.key)
        if outcome is None:
            if supervised.is_over:
                raise KeyboardInterrupt
            record.begin(scheme.key)
            outcome = judged()
            record.done(scheme.key, outcome)
        return outcome
    outcome = Outcome()
    report, failure = record.report(scheme.key), record.failure(scheme.key)
    if report is not None or failure is not None:  # else the implementation's own import may have ended the process
        scheme = substituted(scheme, options)
    report = of_death(scheme, failure) if report is None else from_one_case(replace(report, unfinished=sentence))
    if report is None:
        outcome.reject(scheme.key, f"scheme '{scheme.name}': {sentence}", RANK_FAILED)
    else:
        outcome.reports.append(with_replay_file(scheme, report, options.replay_dir or "."))
    return outcome


def of_death(scheme: Declared, known: tuple[RankFailure, str] | None) -> Report | None:
    """The report of a failed rank that ended an earlier process; None if the process died of another cause."""
    if known is None:
        return None
    failure, text = known
    try:
        return of_failed_rank(scheme, CaseSpec.from_json(text), failure)
    except BaseException as error:  # the case was too long to be kept, or a user's draw raised
        pass_interrupt(error)
        return None


def substituted(scheme: Declared, options: VerifyOptions) -> Declared:
    """The scheme on the implementation that the options name, if they name one. Errors: NotOffered, NotApplicable."""
    if options.implementation is None:
        return scheme
    return narrowed(on_implementation(scheme, options.implementation), options.fixed)
