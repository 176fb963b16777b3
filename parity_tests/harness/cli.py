"""shardproof: the command. A verb's options stand in one of the files cli_*.py, its examples in cli_help.py.

Each verb reads its arguments, calls one function, and turns the outcome into a status; what a status means stands in
status.py.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import sys
from typing import Annotated

import typer

from parity_tests.harness import cli_case, cli_help, cli_paper, cli_training, cli_verify
from parity_tests.harness.guard import guarded

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Verify sharded PyTorch against single-device JAX: values, gradients, collectives and bytes.",
    epilog=cli_help.epilog(None),
)
VERBS = {
    "verify": cli_verify.verify,
    "list": cli_verify.list_schemes,
    "draw": cli_case.draw,
    "replay": cli_case.replay,
    "timeline": cli_case.timeline,
    "schedule": cli_paper.schedule,
    "train": cli_training.train,
    "trace": cli_training.trace,
    "plan": cli_paper.plan,
    "tour": cli_verify.tour,
}
for name, verb in VERBS.items():
    app.command(name, epilog=cli_help.epilog(name))(verb)


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(cli_help.versions())
        raise typer.Exit()


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and leave.")
    ] = False,
) -> None:
    """Options that stand before a verb."""


def main() -> None:
    """Run a verb; a user's mistake is one sentence on standard error and a status, never a traceback."""
    sys.exit(guarded(app))


if __name__ == "__main__":
    main()
