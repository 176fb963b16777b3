"""The verbs about one case: its picture, its replay, its timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardproof.cli import complete
from shardproof.cli.values import Dims, FigurePath, HtmlPath, JsonPath, Mesh, Replay, Timeout, Traceback, sizes
from shardproof.declare import scheme_index


def draw(
    target: Annotated[str, typer.Argument(help="A file or a scheme name.", autocompletion=complete.targets)],
    mesh: Mesh = None,
    dim: Dims = None,
    figure: FigurePath = None,
    json: JsonPath = None,
) -> None:
    """Pictures of a scheme's layouts and gradient types."""
    fixed = {**sizes(mesh, "--mesh"), **sizes(dim, "--dim")}
    is_text = figure is None and json is None and not Path(target).exists()
    if is_text and (picture := scheme_index.stored_picture(target, fixed)):
        print(f"{target}\n{picture}\n")
        return
    from shardproof.cli import listing

    listing.pictures(target, fixed, figure, json)


def replay(
    file: Replay,
    engine: Annotated[
        str | None,
        typer.Option(help="The engine to run on; default: the recorded engine.", autocompletion=complete.engines),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Number of runs.")] = 1,
    timeout: Timeout = None,
    html: HtmlPath = None,
    json: JsonPath = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only one line for each run.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the ledger as well.")] = False,
    traceback: Traceback = False,
) -> None:
    """Run one recorded case again."""
    from shardproof.cli import listing
    from shardproof.engines.engines import limited

    with limited(timeout):
        status = listing.replay_file(file, engine, repeat, json, quiet, verbose, traceback, html)
    raise typer.Exit(status)


def timeline(
    file: Replay,
    out: Annotated[
        str, typer.Option(help="The JSON file, - for standard output; open it in a trace viewer.", metavar="PATH")
    ] = "timeline.json",
) -> None:
    """The collectives of a recorded case, a track for each rank."""
    from shardproof.cli import listing

    raise typer.Exit(listing.timeline(file, out))
