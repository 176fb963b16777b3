"""Ranks of a benchmark answer together, and none is left behind."""

import sys

import pytest

from parity_tests.evidence.benchmarks.ranks import run_ranks
from parity_tests.specimens.processes import is_there

# Writes its process id where the test looks for it; then rank 1 ends as it is asked to, once rank 0 is there.
RANK = """
import json, os, sys, time
from pathlib import Path
rank, how, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
(folder / f"found_{rank}.json.new").write_text(json.dumps({"pid": os.getpid()}))
(folder / f"found_{rank}.json.new").rename(folder / f"found_{rank}.json")
while not (folder / f"found_{1 - rank}.json").exists():
    time.sleep(0.01)
if how == "hang" or (how == "fail" and rank == 0):
    time.sleep(600)
sys.exit(3 if how == "fail" else 0)
"""
COMMAND = (sys.executable, "-c", RANK)


def pids(folder):
    return [int("".join(filter(str.isdigit, (folder / f"found_{rank}.json").read_text()))) for rank in (0, 1)]


def test_results_of_every_rank(tmp_path):
    records = run_ranks(COMMAND, 2, tmp_path, "end", topic="this", seconds=60)
    assert [of_rank["pid"] for of_rank in records] == pids(tmp_path)
    assert not any(map(is_there, pids(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "seconds", "text"),
    [
        ("fail", 60, "benchmarks: rank 1 of this ended with status 3"),
        ("hang", 2, "benchmarks: this took longer than 2 s"),
    ],
)
def test_no_rank_outlives_one_that_fails_or_hangs(how, seconds, text, tmp_path):
    with pytest.raises(RuntimeError) as caught:
        run_ranks(COMMAND, 2, tmp_path, how, topic="this", seconds=seconds)
    assert str(caught.value) == text
    assert not any(map(is_there, pids(tmp_path)))
