"""Judge a mutant by the tests that run its line: pytest on a tree where one file differs.

The tree is a folder of links, but for production, which is copied with the change in it; so every process that a test
starts sees the mutant too, and the repository is never written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from parity_tests.injected_bugs.injected_bug import PRODUCTION, ROOT
from parity_tests.mutants.mutant import Mutant
from parity_tests.mutants.reached import PYTEST, Reach

SLOWER, AT_LEAST_S = 3.0, 90.0  # the time limit: times what the healthy run took, and not less than that


def first_failing(mutant: Mutant, files: Sequence[tuple[Path, Reach]]) -> str | None:
    """The first of these files of tests that fails on the mutant, or does not end; the fastest is tried first."""
    with _tree_of(mutant) as tree:
        for file, reach in sorted(files, key=lambda each: each[1].seconds):
            name = file.relative_to(ROOT).as_posix()
            limit = max(SLOWER * reach.seconds, AT_LEAST_S)
            status = _status(tree, name, limit)
            if status is None:
                return f"{name} (no end after {limit:.0f} s)"
            if status != 0:
                return name
    return None


@contextmanager
def _tree_of(mutant: Mutant) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        tree = Path(folder)
        for path in ROOT.iterdir():
            if path.name != PRODUCTION:
                (tree / path.name).symlink_to(path)
        shutil.copytree(ROOT / PRODUCTION, tree / PRODUCTION, ignore=shutil.ignore_patterns("__pycache__"))
        (tree / mutant.file).write_text(mutant.patched.text)
        yield tree


def _status(tree: Path, name: str, limit: float) -> int | None:
    """Of pytest on one file; None where it does not end in time."""
    path = os.pathsep.join([str(tree), str(tree / "parity_tests" / "import_name")])
    command = [sys.executable, *PYTEST, "-c", "pyproject.toml", "--rootdir", str(tree), name]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and the ranks that it started, which are of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()
