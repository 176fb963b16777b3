"""`shardproof watch script.py args`: run a script as Python does, and print the ledger of its collectives."""

from __future__ import annotations

import os
import re
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shardproof.endings.exit_status import EQUAL, RANK_FAILED
from shardproof.report.guard import complain

NO_LAUNCHER = re.compile("environment variable (RANK|WORLD_SIZE|LOCAL_RANK) expected, but not set")  # torch's words


def watch(
    script: Annotated[str, typer.Argument(help="A Python file; under torchrun each rank runs it.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank of the job that prints its ledger.")] = 0,
    rows: Annotated[bool, typer.Option("--rows", help="Print each operation too, with its module and line.")] = False,
) -> None:
    """Run a script and print its collectives by module and phase. Options stand before the script."""
    raise typer.Exit(run(script, arguments or [], rank, rows))


def run(script: str, arguments: Sequence[str], rank: int = 0, rows: bool = False) -> int:
    """The script's own status, or 3 after the traceback of an exception. Its ledger is printed in any case.

    Errors: ValueError for a script that is not there.
    """
    if not Path(script).is_file():
        what = "is a folder" if Path(script).is_dir() else "no such file"
        raise ValueError(f"watch: {script}: {what}; give a script")
    from shardproof.engines.ledger_table import table
    from shardproof.engines.watched import watch as watched

    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:  # with it, Python adds no folder, and the first entry is another one
        sys.path[0] = str(Path(script).resolve().parent)
    with watched() as ledger:
        status = _status_of(script)
    if int(os.environ.get("RANK", "0")) == rank:
        sys.stdout.flush()
        print(table(ledger))
        for row in ledger.rows if rows else ():
            print(f"{row.module} | {row}" if row.module else row)
    return status


def _status_of(script: str) -> int:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return left.code if isinstance(left.code, int) else EQUAL if left.code is None else 1
    except Exception as error:
        traceback.print_exc()
        if NO_LAUNCHER.search(str(error)):
            start = f"torchrun --nproc-per-node 2 -m shardproof watch {script}"
            complain(f"{script} needs a launcher; start it by {start}")
        return RANK_FAILED
    return EQUAL
