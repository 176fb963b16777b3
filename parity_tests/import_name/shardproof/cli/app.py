"""shardproof: the command. A verb's options are in one file of this folder, its examples in help.py.

Each verb reads its arguments, calls one function, and turns the outcome into a status; endings/exit_status.py lists
the statuses.
"""

from __future__ import annotations

import os
import sys

if sys.argv[1:2] != ["watch"]:  # a script that is watched keeps its environment
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before a file of schemes creates an array: see `bridge.start`

import contextlib
import io
import shlex
from itertools import zip_longest
from typing import Annotated, Any

import typer
import typer.core

from shardproof.cli import case, paper, training, verify, watched_script
from shardproof.cli.help import epilog, versions
from shardproof.cli.values import size_as_option, unsuitable
from shardproof.endings.exit_status import EQUAL, INTERRUPTED, USAGE
from shardproof.engines.collector import collect_rarely
from shardproof.report.guard import guarded

UsageError: Any = typer.BadParameter.__base__  # of click, or of the copy of it that typer brings


class Verbs(typer.core.TyperGroup):
    """The verbs; a file in place of a verb selects `replay` or `verify`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        file = args[0].partition("::")[0]
        if file.endswith(".py"):
            verb = "replay" if os.path.basename(file).startswith("replay_") else "verify"
            raise ValueError(f"{args[0]}: is a file, not a verb; write shardproof {verb} {shlex.join(args)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Verbs,
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Verify sharded PyTorch against single-device JAX: values, gradients, collectives and bytes.",
    epilog=epilog(None),
)


class Verb(typer.core.TyperCommand):
    """A verb that accepts `--json` without a path as standard output."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with_path = [
            "--json=-" if arg == "--json" and after.startswith("-") and after != "-" else arg
            for arg, after in zip_longest(args, args[1:], fillvalue="--")
        ]
        try:
            return super().parse_args(ctx, [*with_path])  # which it empties
        except typer.BadParameter as error:
            raise unsuitable(error, VERBS[self.name or ""], with_path) from None
        except UsageError as error:
            raise size_as_option(error, VERBS[self.name or ""], with_path) from None


VERBS = {
    "verify": verify.verify,
    "new": verify.new,
    "list": verify.list_schemes,
    "draw": case.draw,
    "replay": case.replay,
    "timeline": case.timeline,
    "schedule": paper.schedule,
    "train": training.train,
    "trace": training.trace,
    "plan": paper.plan,
    "cost": paper.cost,
    "tour": verify.tour,
}
for name, verb in VERBS.items():
    app.command(name, cls=Verb, epilog=epilog(name))(verb)
# What follows the script is the script's own.
OF_A_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
app.command("watch", context_settings=OF_A_SCRIPT, epilog=epilog("watch"))(watched_script.watch)


def _version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(versions())
        raise typer.Exit()


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Options before a verb."""


def main() -> None:
    """Run a verb; a user's mistake prints one sentence on standard error and sets a status, without a traceback."""
    collect_rarely()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path may have bytes that are no text
            stream.reconfigure(errors="backslashreplace")
    # A file of schemes may have replaced sys.exit, as a test of a script that exits does.
    raise SystemExit(guarded(_status_of_verb))


def _status_of_verb() -> int:
    """The status of the verb, which typer returns; left to itself, typer would hand it to sys.exit.

    Errors: KeyboardInterrupt after an interrupt; ValueError for a value that an option does not take.
    """
    try:
        status = app(standalone_mode=False)
    except UsageError as error:
        with contextlib.suppress(OSError):  # the disk of standard error is full
            error.show()
        return USAGE
    except typer.Abort as aborted:  # in place of an EOFError
        raise aborted.__cause__ or aborted from None
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return status or EQUAL


if __name__ == "__main__":
    main()
