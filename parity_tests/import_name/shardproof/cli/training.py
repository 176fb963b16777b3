"""The verbs about the training run: train and trace."""

from __future__ import annotations

from typing import Annotated

import typer

from shardproof.cli import complete
from shardproof.cli.values import FigurePath, JsonPath, sizes
from shardproof.draw.arguments import LARGEST_SEED

Dtype = Annotated[str, typer.Option(help="float64, float32 or bfloat16.", autocompletion=complete.of_run("DTYPES"))]
Mamba = Annotated[
    str,
    typer.Option(
        help="hidden (exchanges tokens for heads) or state (passes states on).", autocompletion=complete.of_run("MAMBA")
    ),
]
Attention = Annotated[
    str, typer.Option(help="ring, all_gather, ulysses or usp.", autocompletion=complete.of_run("ATTENTION"))
]
# Options of trace that do not apply to a pair.
OF_OUR_MODEL = ("schedule", "mamba", "attention", "tied")
OF_THE_STEP = ("mesh", *OF_OUR_MODEL, "seed", "engine")
Schedule = Annotated[
    str,
    typer.Option(
        help="Pipeline schedule, or its beginning: 1f1b, zbv, interleaved1f1b.",
        autocompletion=complete.of_run("SCHEDULES"),
    ),
]
Traced = Annotated[
    str | None,
    typer.Argument(
        help="file.py::function that builds a sharded model, or a file that declares your own pairs of modules; "
        "none: the first training step on --mesh.",
        autocompletion=complete.files,
    ),
]
TraceDtype = Annotated[
    str | None,
    typer.Option(
        help="float64, float32, bfloat16 or, for a file, float16; default: float64, or the file's own.",
        autocompletion=complete.dtypes,
    ),
]
Twin = Annotated[
    str | None,
    typer.Option(help="For a sharded model: the function that builds it on one device.", metavar="FILE::FUNCTION"),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        help="For a sharded model: the function that returns its inputs, a tuple or a dict.", metavar="FILE::FUNCTION"
    ),
]
Tied = Annotated[bool, typer.Option("--tied", help="Share the weight of embedding and head.")]


def train(
    context: typer.Context,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            help="Mesh axis sizes: dp=2,cp=2; axes pp, dp_replicate, dp_shard (or dp), cp, ep, tp. One run per --mesh.",
            metavar="AXIS=N",
            autocompletion=complete.training_meshes,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 20,
    dtype: Dtype = "float64",
    mamba: Mamba = "hidden",
    attention: Attention = "ring",
    schedule: Schedule = "1f1b",
    tied: Tied = False,
    experts: Annotated[bool, typer.Option("--experts", help="A mixture of experts in place of the last MLP.")] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw, or muon for matrices and AdamW for the others.", autocompletion=complete.of_run("OPTIMIZERS")
        ),
    ] = "adamw",
    clip: Annotated[float | None, typer.Option(help="Scale gradients down to this norm.", metavar="NORM")] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the weights and the batches.")] = 0,
    engine: Annotated[
        str, typer.Option(help="gloo, lockstep, nccl or torchrun.", autocompletion=complete.engines)
    ] = "gloo",
    checkpoint: Annotated[str | None, typer.Option(help="Folder of checkpoints.", metavar="DIR")] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 5,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start from step 1 and replace the checkpoints of an earlier run.")
    ] = False,
    figure: FigurePath = None,
    page: Annotated[
        str | None, typer.Option(help="Run the built-in list of meshes and write their table.", metavar="PATH")
    ] = None,
    json: JsonPath = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print one line for each run only.")] = False,
) -> None:
    """Train a small hybrid language model over a mesh. Every step is compared with one device."""
    from shardproof.report.out_path import check_folder
    from shardproof.training import page as meshes
    from shardproof.training import session
    from shardproof.training.run import Run

    check_folder(checkpoint=checkpoint)
    if checkpoint is None and _is_on_command_line(context, "every"):
        raise ValueError(f"--every {every} needs --checkpoint DIR, where the state goes")
    settings = {"steps": steps, "seed": seed, "is_tied": tied, "dtype": dtype, "mamba": mamba, "attention": attention}
    settings |= {"schedule": schedule, "optimizer": optimizer, "clip": clip, "has_experts": experts}
    settings |= {"checkpoint": checkpoint, "every": every, "resume": resume, "overwrite": overwrite}
    mesh_sizes = [sizes([text] if text else [], "--mesh") for text in mesh or [""]]
    runs = meshes.runs(steps=steps, seed=seed) if page else [Run.on(each, **settings) for each in mesh_sizes]
    raise typer.Exit(session.train(runs, session.TrainOptions(engine, figure, json, page, quiet)))


def trace(
    context: typer.Context,
    file: Traced = None,
    mesh: Annotated[
        str,
        typer.Option(
            help="Mesh axis sizes: dp=2,cp=2; axes pp, dp_replicate, dp_shard (or dp), cp, tp, or the model's own.",
            metavar="AXIS=N",
            autocompletion=complete.training_meshes,
        ),
    ] = "",
    twin: Twin = None,
    inputs: Inputs = None,
    dtype: TraceDtype = None,
    mamba: Mamba = "hidden",
    attention: Attention = "ring",
    schedule: Schedule = "1f1b",
    tied: Tied = False,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the weights and the batch.")] = 0,
    engine: Annotated[str, typer.Option(help="gloo, lockstep or nccl.", autocompletion=complete.engines)] = "gloo",
    json: JsonPath = None,
    every_tensor: Annotated[bool, typer.Option("--whole", "--verbose", "-v", help="Print every tensor.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print one line for each trace only.")] = False,
) -> None:
    """Name the first module with different tensors. Compares a sharded model with one device, or your own pair."""
    if file is not None and "::" in file:
        foreign = [name for name in OF_OUR_MODEL if _is_on_command_line(context, name)]
        if foreign:
            raise ValueError(f"--{foreign[0]} is of the training step; leave it out for a model of your own")
        raise typer.Exit(_of_sharded(file, twin, inputs, mesh, dtype, engine, seed, json, every_tensor, quiet))
    alone = [name for name in ("twin", "inputs") if _is_on_command_line(context, name)]
    if alone:
        raise ValueError(f"--{alone[0]} is of a sharded model; name the function that builds it, as file.py::sharded")
    if file is not None:
        from shardproof.tracing import pair_session

        foreign = [name for name in OF_THE_STEP if _is_on_command_line(context, name)]
        if foreign:
            raise ValueError(f"--{foreign[0]} is of the training step; a pair runs on one rank, so leave it out")
        raise typer.Exit(pair_session.trace(file, dtype, json, every_tensor, quiet))
    from shardproof.training import trace_session
    from shardproof.training.run import Run

    settings = {"mamba": mamba, "attention": attention, "schedule": schedule, "is_tied": tied, "seed": seed}
    settings["dtype"] = dtype or "float64"
    run = Run.on(sizes([mesh] if mesh else [], "--mesh"), **settings, steps=1)
    raise typer.Exit(trace_session.trace(run, engine, json, every_tensor, quiet))


def _of_sharded(
    sharded: str,
    twin: str | None,
    inputs: str | None,
    mesh: str,
    dtype: str | None,
    engine: str,
    seed: int,
    json: str | None,
    every_tensor: bool,
    quiet: bool,
) -> int:
    """Trace a sharded model; a bare name is a function in the same file."""
    from shardproof.tracing import sharded_session

    file = sharded.partition("::")[0]
    for name, target in (("twin", twin), ("inputs", inputs)):
        if target is None:
            raise ValueError(f"{sharded}: needs --{name} as well, as in --twin {file}::single --inputs {file}::inputs")
    of_twin, of_inputs = (target if "::" in target else f"{file}::{target}" for target in (twin or "", inputs or ""))
    axes = sizes([mesh] if mesh else [], "--mesh")
    question = sharded_session.Question(sharded, of_twin, of_inputs, axes, dtype, engine, seed)
    return sharded_session.trace(question, json, every_tensor, quiet)


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
