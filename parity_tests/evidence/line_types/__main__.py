"""`python -m parity_tests.evidence.line_types`, or `make line-types`: count the injected bugs that types find.

First the types of every built-in scheme are followed: a clash there is a false alarm, and the exit status is 1. Then a
sample of the catalogue's bugs is injected. Each bug is judged by types and by values, in the schemes of its component
that run its lines. Answers are kept in build/line_types.jsonl; the run goes on where it was stopped.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import random
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import typer

from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.injected_bug import ROOT, InjectedBug
from parity_tests.evidence.injected_bugs.runner import NEAREST, NOT_TRIED, BugRunner, patched_schemes
from parity_tests.evidence.journal import Journal
from parity_tests.evidence.line_types.page import Located, text
from parity_tests.evidence.page import write
from shardproof.declare import discover
from shardproof.declare.declared import Declared
from shardproof.engines.processes import orphans
from shardproof.engines.program import Program
from shardproof.line_types.opinion import CLASHES, COULD_NOT, case_on_ranks

JOURNAL = ROOT / "build" / "line_types.jsonl"
TIMEOUT_S = 120.0  # for one scheme, on a machine that does other things too
TRACED = 1  # cases run of each scheme to learn which lines it runs


def type_sentence(scheme: Declared) -> str:
    """The sentence of `shardproof verify --types` about a scheme, with this process's modules, patched or not."""
    from torch import distributed

    from shardproof.line_types import body, rules

    case = case_on_ranks(scheme).replace(conditions={})
    distributed.init_process_group("fake", rank=0, world_size=case.world)
    rules.register()
    return body.checked(Program.of(scheme), case)


def run_forked(task: Callable[[], str]) -> str:
    """The result of a task in a forked process: the checker's patches of torch and a bug's modules die with it."""
    ours, theirs = get_context("fork").Pipe()
    parent = os.getpid()

    def answer(connection: Connection) -> None:
        orphans.tie(parent)
        try:
            connection.send(task())
        except Exception as error:  # a bug may break the import of its module, and that is not a clash
            connection.send(f"{COULD_NOT}: {type(error).__name__}: {error}")

    process = get_context("fork").Process(target=answer, args=(theirs,))
    process.start()
    result = ours.recv() if ours.poll(TIMEOUT_S) else f"{COULD_NOT}: it took longer than {TIMEOUT_S:.0f} s"
    process.kill()
    process.join()
    return result


def sentence_under(bug: InjectedBug, schemes: Sequence[Declared]) -> str:
    """The first clash in these schemes under a bug; without a clash, the sentence about the last scheme."""

    def task(scheme: Declared) -> str:
        modules, patched = patched_schemes(bug, [scheme])
        with modules:
            return type_sentence(patched[scheme.key])

    sentence = ""
    for scheme in schemes:
        sentence = run_forked(lambda scheme=scheme: task(scheme))
        if sentence.startswith(CLASHES):
            break
    return sentence


def built_in_sentences(journal: Journal) -> dict[str, str]:
    """Scheme name -> the sentence about its types, for each built-in scheme."""
    sentences = {}
    for scheme in discover.built_in():
        kept = journal.of(f"scheme {scheme.name}")
        if not kept:
            kept = {"key": f"scheme {scheme.name}", "sentence": run_forked(lambda scheme=scheme: type_sentence(scheme))}
            journal.add(kept)
        sentences[scheme.name] = kept["sentence"]
    return sentences


def sample_of_bugs(count: int, seed: int) -> list[InjectedBug]:
    """Random bugs of the catalogue; equivalent ones, which change nothing, are left out."""
    return random.Random(seed).sample([bug for bug in CATALOGUE if not bug.equivalent], count)


def locate(bug: InjectedBug, runners: dict[str, BugRunner], examples: int) -> Located:
    """The types' sentence about a bug, and whether values catch it, in its component's schemes that run its lines."""
    if bug.component not in runners:
        own = [each for each in discover.built_in() if f"parity_tests/{bug.component}/" in each.file]
        runners[bug.component] = BugRunner(
            examples, schemes=own, with_baseline=False, traced=TRACED, until_caught=True, cache=".jax_cache"
        )
    runner = runners[bug.component]
    nearest = [trials.scheme for trials in runner.affected(bug)[:NEAREST]]
    sentence = sentence_under(bug, nearest)
    outcome = runner.outcome(bug)
    first = outcome.catches[0].words.partition("\n")[0] if outcome.catches else ""
    return Located(bug.name, bug.component, bug.kind, sentence, outcome.caught, first)


def main(
    bugs: Annotated[int, typer.Option(min=1, help="Bugs of the catalogue that are injected.")] = 24,
    seed: Annotated[int, typer.Option(help="The seed that chooses the bugs.")] = 0,
    examples: Annotated[int, typer.Option(min=1, help="Drawn examples of each scheme.")] = 8,
    page: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("docs/line-types.md"),
) -> None:
    """Type the built-in schemes, inject a sample of the bugs, and write the page."""
    import_module("torch._dynamo")  # the checker needs it: imported once here, not in each forked process
    journal = Journal(JOURNAL)
    sentences = {name: each for name, each in built_in_sentences(journal).items() if name not in NOT_TRIED}
    alarms = {name: each for name, each in sentences.items() if each.startswith(CLASHES)}
    for name, each in alarms.items():
        print(f"false alarm: {name}: {each}", flush=True)
    runners: dict[str, BugRunner] = {}
    outcomes = []
    for bug in sample_of_bugs(bugs, seed):
        key = f"bug {bug.name} {examples}"
        kept = journal.of(key).get("located")
        if kept is None:
            kept = vars(locate(bug, runners, examples))
            journal.add({"key": key, "located": kept})
        outcomes.append(Located(**kept))
        print(f"{outcomes[-1].word:6}  {bug.name}: {outcomes[-1].sentence}", flush=True)
    write(text(sentences, outcomes, seed), page)
    sys.exit(int(bool(alarms)))


if __name__ == "__main__":
    typer.run(main)
