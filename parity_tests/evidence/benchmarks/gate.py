"""The gate's time, from the record of its last run here: `.ci/run` writes the seconds of each step, `make test` the
seconds of each test. The page does not run it anew: it takes longer than all other measurements together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from parity_tests.evidence.benchmarks.figure import Figure
from shardproof.declare.counted import counted

BUILD = Path("build")
STEPS, TESTS = "gate.tsv", "tests.xml"
MOST_SECONDS = {"the tests, `make test`": 360, "the gate, `.ci/run`, in all": 720}
LONG = 2.0  # seconds; a test that takes longer has a reason
LONGEST, FOLDERS = 80, 8


@dataclass(frozen=True)
class Timed:
    """A test and its seconds, with its fixtures."""

    file: str  # the module, with dots
    name: str
    seconds: float

    @property
    def folder(self) -> str:
        """The folder below `parity_tests`, or the file itself if it stands there."""
        return self.file.split(".")[1]


def figures(build: Path = BUILD) -> Iterator[Figure]:
    """The two promises of the gate, each with where the time goes."""
    try:
        steps, tests = steps_of((build / STEPS).read_text()), tests_of((build / TESTS).read_text())
    except OSError as error:
        for title, most in MOST_SECONDS.items():
            yield Figure(title, f"<= {most} s", "not run", None, f"no {error.filename}: `.ci/run` writes it")
        return
    by_step = ", ".join(f"{name} not run" if taken is None else f"{name} {taken} s" for name, taken in steps.items())
    of_titles = ([steps["tests"]], profile(tests)), (list(steps.values()), by_step)
    for (title, most), (seconds, how) in zip(MOST_SECONDS.items(), of_titles, strict=True):
        taken = sum(each or 0 for each in seconds)
        is_met = False if taken > most else None if None in seconds else True  # not whole: missed perhaps, never kept
        yield Figure(title, f"<= {most} s", f"{taken} s of wall-clock time", is_met, how)


def steps_of(record: str) -> dict[str, int | None]:
    """Seconds of each step, None for one that the machine lacks something for. Errors: ValueError if one failed."""
    rows = [line.split("\t") for line in record.splitlines()]
    if others := [name for _, outcome, name in rows if outcome not in ("passed", "NOT RUN")]:
        raise ValueError(f"benchmarks: the gate did not pass: {', '.join(others)}; run .ci/run again")
    return {name: int(seconds) if outcome == "passed" else None for seconds, outcome, name in rows}


def tests_of(report: str) -> list[Timed]:
    """The tests of a JUnit report; a file that was skipped as a whole is one, by its name alone."""
    return [
        Timed(case.get("classname") or case.get("name", ""), case.get("name", ""), float(case.get("time", "0")))
        for case in ElementTree.fromstring(report).iter("testcase")
    ]


def profile(tests: list[Timed]) -> str:
    """Where the seconds of the tests go, and how many would be left without the longest."""
    total = sum(test.seconds for test in tests)
    by_seconds = sorted(tests, key=lambda test: -test.seconds)
    longer = [test for test in tests if test.seconds > LONG]
    # A test without the prefix is a scheme's.
    parity = sum(test.seconds for test in tests if "parity" in test.name or not test.name.startswith("test_"))
    folders: dict[str, float] = {}
    for test in tests:
        folders[test.folder] = folders.get(test.folder, 0.0) + test.seconds
    left = total - sum(test.seconds for test in by_seconds[:LONGEST])
    return (
        f"{counted(len(tests), 'test')} in {total:.0f} s of all processes together; {_shares(folders, total)}; parity "
        f"tests {parity / total:.0%}, without them {total - parity:.0f} s; "
        f"{counted(len(longer), 'test')} of more than {LONG:g} s "
        f"{sum(test.seconds for test in longer) / total:.0%}; all but the {LONGEST} longest take {left:.0f} s"
    )


def _shares(seconds: Mapping[str, float], total: float) -> str:
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:FOLDERS]
    return ", ".join(f"{name} {value / total:.0%}" for name, value in largest)
