"""The verdict on every scheme of one file, and whether it is the expected one.

`python -m parity_tests.evidence.peers.outcome FILE ENGINE EXAMPLES JOURNAL` adds them to a journal. Each file runs in a
process of its own, so that one project leaves no traces in the process of another.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from parity_tests.evidence.journal import Journal
from parity_tests.evidence.peers.contracts import RIGHT
from parity_tests.evidence.peers.findings import expected, expected_verdict
from shardproof.declare.declared import Declared
from shardproof.declare.discover import schemes_of_file
from shardproof.draw.drawing import one_case
from shardproof.experiments.smallest import shrink
from shardproof.experiments.undecided import verify_or_undecided
from shardproof.report.report import Report, sizes
from shardproof.verification import verify

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    """One scheme on one engine: its verdict, the expected one, the smallest failing case, and its mistake."""

    scheme: str  # folder/file::name
    engine: str
    verdict: str
    expected_verdict: str
    smallest: str = ""
    wrong: tuple[str, ...] = ()

    @property
    def is_expected(self) -> bool:
        return self.verdict == self.expected_verdict

    @property
    def name(self) -> str:
        return self.scheme.partition("::")[2]


def identifier(file: Path, scheme: str) -> str:
    """`folder/file::name`, as findings name schemes."""
    return f"{file.parent.name}/{file.stem}::{scheme}"


def outcome(scheme: Declared, file: Path, engine: str, examples: int) -> Outcome:
    """The verdict on one scheme. If it cannot be judged, as when its reference raises, the verdict says so."""
    name = identifier(file, scheme.name)
    entry, wanted = expected(name), expected_verdict(name, engine)
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = (
                known_mistake(scheme, engine, examples)
                if entry
                else verify(scheme, engine, examples, replay_folder=folder)
            )
    except Exception as error:  # the table says so, and the run goes on with the next scheme
        return Outcome(name, engine, f"not judged: {type(error).__name__}: {error}", wanted)
    if report.ok:
        return Outcome(name, engine, RIGHT, wanted)
    wrong = tuple(tensor.label for tensor in report.tensors if not tensor.ok)
    return Outcome(
        name,
        engine,
        report.verdict,
        wanted,
        sizes(report.case).removesuffix(f" seed={report.case.seed}"),
        wrong,
    )


def known_mistake(scheme: Declared, engine: str, examples: int) -> Report:
    """The report of a known mistake: its first failing case, which lockstep also shrinks.

    Notes and second opinions are for new mistakes. If no such case fails, `verify` draws others, which
    cover pairs of sizes and meshes.
    """
    for seed in range(2 * examples):
        report = verify_or_undecided(scheme, one_case(scheme, seed=seed, engine=engine))
        if report.failed:
            return shrink(scheme, report, {}) if engine == "lockstep" else report
    with tempfile.TemporaryDirectory() as folder:
        return verify(scheme, engine, examples, replay_folder=folder)


def key(file: Path, engine: str) -> str:
    """The journal's key for the outcomes of a file."""
    return f"{file.parent.name}/{file.stem} {engine}"


def main(file: str, engine: str, examples: str, journal: str) -> None:
    path = Path(file).resolve()
    results = [outcome(scheme, path, engine, int(examples)) for scheme in schemes_of_file(str(path))]
    Journal(Path(journal)).add({"key": key(path, engine), "outcomes": [asdict(each) for each in results]})


if __name__ == "__main__":
    main(*sys.argv[1:])
