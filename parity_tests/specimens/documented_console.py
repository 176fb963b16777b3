"""Run the blocks of a page: a command with its output, and a change to a file."""

from __future__ import annotations

import re
from pathlib import Path

from parity_tests import warm_python

NEWER = "with which this release was tested"
EQUAL_ROW = re.compile(r"^  equal  +(?P<label>\S.*?)  +\d\.\de[+-]\d\d ")


def shape(printed: str) -> list[str]:
    """Lines without parts that differ by machine: versions, widths, ids, and the rounding errors of an equal tensor.

    A mistake is larger than any rounding, so that the figures of a wrong tensor are the same on each machine.
    """
    lines = [line for line in printed.strip("\n").splitlines() if not line.endswith(NEWER)]
    lines = [re.sub(r"replay_[0-9a-f]{8}", "replay_#", line.rstrip()) for line in lines]
    rows = [EQUAL_ROW.match(line) for line in lines]
    reduced = [f"{row['label']} equal" if row else line for line, row in zip(lines, rows, strict=True)]
    return [re.sub(r"(?<=\S) +", " ", line) for line in reduced]


def run_as_shown(block: str, folder: Path) -> tuple[int, list[str], list[str]]:
    """(status, printed text, the page's text) for a block of one command and its output.

    Programs are `shardproof`, `pytest` and `python`, each of which a forked Python runs. The name of a replay file
    on the page stands for the replay file in the folder.
    """
    command, _, documented = block.partition("\n")
    program, *arguments = command.removeprefix("$ ").split()
    if program == "python":
        arguments = [path.name for path in folder.glob("replay_*.py")] if "replay_" in arguments[0] else arguments
    else:
        arguments = ["-m", program, *arguments]
    done = warm_python.run(*arguments, folder=folder)
    return done.returncode, shape(done.stdout), shape(documented)


def replaced(source: str, difference: str) -> str:
    """The file with a diff of one line applied. Errors: ValueError unless the file has the old line exactly once."""
    old, new = (line[1:] for line in difference.splitlines())
    if source.count(f"{old}\n") != 1:
        raise ValueError(f"the line {old!r} is {source.count(old)} times in the file")
    return source.replace(old, new)
