"""`python -m parity_tests.evidence.mutants.equivalents`: run all tests on a tree with all equivalents.

Changes that no test can see are unseen together too: one run of the tests judges all entries of `judged.toml`. If a
test fails, halving the mutants finds the one that it sees: that entry is wrong.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import pytest
import typer

from parity_tests.evidence.injected_bugs.injected_bug import ROOT
from parity_tests.evidence.mutants import page as pages
from parity_tests.evidence.mutants import places
from parity_tests.evidence.mutants.by_tests import tree_of
from parity_tests.evidence.mutants.judged import why_equivalent
from parity_tests.evidence.mutants.mutant import Mutant
from parity_tests.evidence.page import read, with_section, write
from shardproof.engines.processes import orphans

# These tests compare production's text with other text about it, which any change alters.
OF_THE_TEXT = ("parity_tests/evidence/injected_bugs", "parity_tests/evidence/mutants", "parity_tests/test_house.py")
IN_PARALLEL = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
EPILOG = """\b
Exit status:
    0  every test passes with all of them
    1  a test sees one of them, whose entry is wrong
    2  usage
"""


def main(
    page: Annotated[Path | None, typer.Option(help="Write the outcome into this page.")] = None,
) -> None:
    """Test all mutants at once that were judged to be equivalent, and name each one that a test sees."""
    mutants = [mutant for mutant in places.candidates() if why_equivalent(mutant)]
    everything = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "parity_tests").rglob("test_*.py"))]
    tests = [path for path in everything if not path.startswith(OF_THE_TEXT)]
    wrong, left = dict[Mutant, str](), layers(mutants)
    while left:
        layer = left.pop()
        by_itself, met = seen(layer, failing(layer, tests, IN_PARALLEL), lambda some, test: bool(failing(some, [test])))
        wrong |= by_itself
        left += [met] if met else []  # without those that they met
    for mutant, test in wrong.items():
        print(f"{mutant.file}:{mutant.first_line}: {mutant.change} is seen by {test}")
    line = pages.of_equivalents(len(mutants), len(wrong))
    print(line)
    if page:
        write(with_section(read(page), pages.TESTED_AT_ONCE, line), page)
    raise typer.Exit(int(bool(wrong)))


def layers(mutants: Sequence[Mutant]) -> list[list[Mutant]]:
    """Mutants that can be made together, as no two of a layer overlap."""
    result: list[list[Mutant]] = []
    for mutant in sorted(mutants, key=lambda each: (each.file, each.start)):
        for layer in result:
            if (layer[-1].file, layer[-1].stop) <= (mutant.file, mutant.start):
                layer.append(mutant)
                break
        else:
            result.append([mutant])
    return result


def failing(mutants: Sequence[Mutant], tests: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The names of the tests that fail on a tree with these changes, by pytest's own record of failures.

    Errors: RuntimeError if pytest did not run all tests, which says nothing about the changes.
    """
    with tree_of(*mutants) as tree, tempfile.TemporaryDirectory() as record:
        path = os.pathsep.join([str(tree), str(tree / "parity_tests" / "import_name")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "--hypothesis-profile=ci", "-q", "-o", f"cache_dir={record}"]
        status = subprocess.run(
            orphans.kept([*command, *options, *tests]), cwd=tree, env=environment, check=False, stdout=sys.stderr
        ).returncode
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"pytest ended with {status} on a tree of {len(mutants)} mutants; its output says why")
        return list(json.loads((Path(record) / "v" / "cache" / "lastfailed").read_text())) if status else []


def seen(
    mutants: Sequence[Mutant], tests: Sequence[str], fails: Callable[[Sequence[Mutant], str], bool]
) -> tuple[dict[Mutant, str], list[Mutant]]:
    """Mutants that make a test fail alone, each with the first such test; and mutants that do so only with others.

    A test that fails without any change sees none. The last mutant has no other to meet, so the second list is shorter.
    """
    left, by_itself, met = list(mutants), dict[Mutant, str](), list[Mutant]()
    for test in tests:
        if fails([], test):
            continue
        while left and fails(left, test):
            some = left
            while len(some) > 1:
                half = some[: len(some) // 2]
                some = half if fails(half, test) else some[len(half) :]
            (mutant,) = some
            left.remove(mutant)
            if fails([mutant], test):
                by_itself[mutant] = test
            else:
                met.append(mutant)
    return by_itself, met


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
