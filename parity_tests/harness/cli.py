"""shardproof: the command. Each verb reads its arguments, calls one function, and turns the outcome into a status.

What a status means stands in status.py.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from parity_tests.harness.status import guarded

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Verify sharded PyTorch against single-device JAX: values, gradients, collectives and bytes.",
    epilog="Example: shardproof verify my_scheme.py --mesh tp=4",
)

Targets = Annotated[
    list[str] | None,
    typer.Argument(help="Files, folders, scheme names or globs; none: every built-in scheme."),
]
Mesh = Annotated[list[str] | None, typer.Option(help="Mesh axis sizes: tp=4 or dp=2,cp=2.", metavar="AXIS=N")]
Dims = Annotated[list[str] | None, typer.Option(help="Dim sizes: s=16.", metavar="DIM=N")]


@app.command()
def verify(
    targets: Targets = None,
    engine: Annotated[str, typer.Option(help="lockstep, gloo, nccl or torchrun.")] = "lockstep",
    examples: Annotated[int | None, typer.Option(min=1, help="Cases per scheme; default: the profile's.")] = None,
    profile: Annotated[
        str, typer.Option(help="quick (8 cases of one shape), dev (20), ci (60) or nightly (2000).")
    ] = "dev",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    mesh: Mesh = None,
    dim: Dims = None,
    dtype: Annotated[
        str | None, typer.Option(help="float64, float32, bfloat16 or float16; default: the scheme's.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the scheme: temperature=2.0.", metavar="K=V")
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first scheme that is not equal.")] = False,
    jax_cache: Annotated[str | None, typer.Option(help="Folder that keeps JAX's compiled references.")] = None,
    json: Annotated[str | None, typer.Option(help="Write the verdicts as JSON; - is standard output.")] = None,
    junit: Annotated[str | None, typer.Option(help="Write the verdicts as JUnit XML.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print failures and the closing line only.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print every scheme's tensors and the ledger of one case.")
    ] = False,
) -> None:
    """Compare schemes with their references on drawn cases. Exit status 1 for a mismatch, 3 for a failed rank."""
    from parity_tests.harness import session

    wanted = session.Wanted(
        engine=engine,
        examples=examples,
        profile=profile,
        seed=seed,
        names={**_sizes(mesh, "--mesh"), **_sizes(dim, "--dim"), **_options(option)},
        dtype=dtype,
        fail_fast=fail_fast,
        jax_cache=jax_cache,
        json=json,
        junit=junit,
        quiet=quiet,
        verbose=verbose,
    )
    raise typer.Exit(session.verify(targets or [], wanted))


@app.command(name="list")
def list_schemes(
    pattern: Annotated[str, typer.Argument(help="A glob over scheme names.")] = "*",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The table of schemes: name, mesh, specs, reference, file."""
    from parity_tests.harness import listing

    listing.show(pattern, json)


@app.command()
def draw(
    target: Annotated[str, typer.Argument(help="A file or a scheme name.")],
    mesh: Mesh = None,
    dim: Dims = None,
    svg: Annotated[str | None, typer.Option(help="Write the picture as SVG.")] = None,
) -> None:
    """Pictures of a scheme's layouts and gradient types."""
    from parity_tests.harness import listing

    listing.pictures(target, {**_sizes(mesh, "--mesh"), **_sizes(dim, "--dim")}, svg)


@app.command()
def replay(
    file: Annotated[str, typer.Argument(help="A replay_<id>.py file.")],
    engine: Annotated[str | None, typer.Option(help="Another engine than the one recorded.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="How many times.")] = 1,
) -> None:
    """Run one recorded case again."""
    from parity_tests.harness import listing

    raise typer.Exit(listing.replay_file(file, engine, repeat))


@app.command()
def timeline(
    file: Annotated[str, typer.Argument(help="A replay_<id>.py file.")],
    out: Annotated[str, typer.Option(help="Where the JSON goes; open it in a trace viewer.")] = "timeline.json",
) -> None:
    """The collectives of a recorded case as a trace, one track per rank."""
    from parity_tests.harness import listing

    raise typer.Exit(listing.timeline(file, out))


@app.command()
def schedule(
    target: Annotated[str, typer.Argument(help="A schedule's name or its beginning (zbv), or a .csv file.")],
    pp: Annotated[int | None, typer.Option(help="Ranks; for a file they are its rows.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches; for a file they are its own.")] = None,
    stages_per_rank: Annotated[int | None, typer.Option(min=1, help="Default: 2, or what the schedule has.")] = None,
    times: Annotated[
        str, typer.Option(help="Forward, input gradient, weight gradient of a chunk.", metavar="F,I,W")
    ] = "1,1,1",
    p2p: Annotated[float, typer.Option(help="What a message between ranks takes.")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    figure: Annotated[str | None, typer.Option(help="Write the picture: a path ending in .png or .svg.")] = None,
    csv: Annotated[str | None, typer.Option(help="Write the order as a CSV file.")] = None,
) -> None:
    """A pipeline schedule run on paper: who computes what and when, bubbles, live activations. Nothing is executed."""
    from parity_tests.harness import schedule_picture
    from torch_impl.pipelining.simulate import Times

    given = Times(*_three(times), p2p=p2p)
    schedule_picture.show(target, pp, microbatches, stages_per_rank, given, json, figure, csv)


@app.command()
def train(
    mesh: Annotated[
        list[str] | None,
        typer.Option(help="A mesh: dp=2,cp=2 of dp_replicate, dp_shard (or dp), cp, tp. Again for a further run."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 20,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    mamba: Annotated[str, typer.Option(help="hidden (tokens for heads) or state (states passed on).")] = "hidden",
    attention: Annotated[str, typer.Option(help="ring, all_gather or ulysses.")] = "ring",
    tied: Annotated[bool, typer.Option("--tied", help="Share the weight of embedding and head.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    engine: Annotated[str, typer.Option(help="gloo, lockstep, nccl or torchrun.")] = "gloo",
    checkpoint: Annotated[str | None, typer.Option(help="Folder of checkpoints.", metavar="DIR")] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 5,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    figure: Annotated[str | None, typer.Option(help="Where the figure of the last run goes.")] = None,
    page: Annotated[str | None, typer.Option(help="Run the built-in list of meshes and write their table.")] = None,
    json: Annotated[str | None, typer.Option(help="Write every step as JSON; - is standard output.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print one line for each run only.")] = False,
) -> None:
    """Train a small hybrid language model over a mesh; compare every step with one device."""
    from parity_tests.training import page as meshes
    from parity_tests.training import session
    from parity_tests.training.run import Run

    settings = {"steps": steps, "seed": seed, "is_tied": tied, "dtype": dtype, "mamba": mamba, "attention": attention}
    settings |= {"checkpoint": checkpoint, "every": every, "resume": resume}
    given = [_sizes([text] if text else [], "--mesh") for text in mesh or [""]]
    runs = meshes.runs(steps=steps, seed=seed) if page else [Run.on(sizes, **settings) for sizes in given]
    raise typer.Exit(session.train(runs, session.Wanted(engine, figure, json, page, quiet)))


@app.command()
def trace(
    mesh: Annotated[str, typer.Option(help="dp=2,cp=2 of dp_replicate, dp_shard (or dp), cp, tp.")] = "",
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    mamba: Annotated[str, typer.Option(help="hidden or state.")] = "hidden",
    attention: Annotated[str, typer.Option(help="ring, all_gather or ulysses.")] = "ring",
    tied: Annotated[bool, typer.Option("--tied", help="Share the weight of embedding and head.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    engine: Annotated[str, typer.Option(help="gloo, lockstep or nccl.")] = "gloo",
    json: Annotated[str | None, typer.Option(help="Write every tensor as JSON; - is standard output.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Print every tensor.")] = False,
) -> None:
    """Trace the first training step; name the first module whose tensors differ from one device's."""
    from parity_tests.training import trace_session
    from parity_tests.training.run import Run

    settings = {"dtype": dtype, "mamba": mamba, "attention": attention, "is_tied": tied, "seed": seed}
    run = Run.on(_sizes([mesh] if mesh else [], "--mesh"), **settings, steps=1)
    raise typer.Exit(trace_session.trace(run, engine, json, whole))


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="qwen3, transformers.LlamaConfig, a folder with config.json, or file.py:factory.")
    ],
    mesh: Mesh = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of one rank's microbatch.")] = 4096,
    option: Annotated[
        list[str] | None, typer.Option(help="A field of the configuration: num_hidden_layers=80.", metavar="K=V")
    ] = None,
) -> None:
    """What cutting a model over a mesh of any size would do: placements, bytes, collectives. Nothing runs."""
    from parity_tests.harness import plan as dry

    dry.show(model, _sizes(mesh, "--mesh"), tokens, _options(option))


@app.command()
def tour(
    figure: Annotated[str, typer.Option(help="Where the figure goes.")] = "shardproof_verify.png",
    examples: Annotated[int, typer.Option(min=1, help="Cases per scheme.")] = 8,
) -> None:
    """Everything at once on this CPU: all built-in schemes, real text, three planted bugs, one figure."""
    from parity_tests.harness import tour as first_run

    raise typer.Exit(first_run.run(figure, examples))


def main() -> None:
    """Run a verb; a user's mistake is one sentence on standard error and a status, never a traceback."""
    sys.exit(guarded(app))


def _sizes(given: Sequence[str] | None, flag: str) -> dict[str, int]:
    """{"tp": 4, "cp": 2} of ["tp=4,cp=2"]."""
    sizes = {}
    for text in (part for item in given or () for part in item.split(",")):
        name, equals, value = text.partition("=")
        if not equals or not value.isdigit():
            raise ValueError(f"{flag} {text!r} is not NAME=NUMBER, such as tp=4")
        if name.strip() in sizes:
            raise ValueError(f"{flag} {text!r} says {name.strip()!r} a second time; give each size once")
        sizes[name.strip()] = int(value)
    return sizes


def _three(given: str) -> list[float]:
    """[1.0, 1.0, 2.0] of "1,1,2"."""
    try:
        found = [float(part) for part in given.split(",")]
    except ValueError:
        found = []
    if len(found) != 3:
        raise ValueError(f"--times {given!r} is not F,I,W, such as 1,1,2")
    return found


def _options(given: Sequence[str] | None) -> dict[str, Any]:
    import ast

    options = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r} is not NAME=VALUE, such as temperature=2.0")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


if __name__ == "__main__":
    main()
