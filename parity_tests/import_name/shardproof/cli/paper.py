"""The verbs that only calculate: a pipeline schedule, a plan for sharding a model, the cost of a scheme."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from shardproof.cli import complete
from shardproof.cli.values import FigurePath, JsonPath, options, sizes, three


def schedule(
    target: Annotated[
        str,
        typer.Argument(
            help="A schedule's name or its beginning (zbv), or a .csv file.", autocompletion=complete.schedules
        ),
    ],
    pp: Annotated[int | None, typer.Option(min=1, help="Number of ranks; a file has one row for each.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Number of micro-batches; a file has its own.")
    ] = None,
    stages_per_rank: Annotated[
        int | None, typer.Option(min=1, help="Default: 2, or the schedule's own number.")
    ] = None,
    times: Annotated[
        str, typer.Option(help="Forward, input gradient, weight gradient of a chunk.", metavar="F,I,W")
    ] = "1,1,1",
    p2p: Annotated[float, typer.Option(help="Time of a message between ranks.")] = 0.0,
    json: JsonPath = None,
    figure: FigurePath = None,
    csv: Annotated[str | None, typer.Option(help="Write the order as a CSV file.", metavar="PATH")] = None,
) -> None:
    """Simulate a pipeline schedule. Shows each rank's actions, bubbles and live activations; nothing is executed."""
    from shardproof.cli import schedule_picture
    from torch_impl.pipelining.simulation import Times

    if not (math.isfinite(p2p) and p2p >= 0):
        raise ValueError(f"--p2p {p2p} must be finite and at least 0")
    durations = Times(*three(times), p2p=p2p)
    schedule_picture.show(target, pp, microbatches, stages_per_rank, durations, json, figure, csv)


def plan(
    model: Annotated[
        str, typer.Argument(help="qwen3, transformers.LlamaConfig, a folder with config.json, or file.py:factory.")
    ],
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            help="Mesh axis sizes: dp=8,tp=4; dp is short for dp_shard.",
            metavar="AXIS=N",
            autocompletion=complete.meshes,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of one rank's microbatch.")] = 4096,
    option: Annotated[
        list[str] | None, typer.Option(help="A field of the configuration: num_hidden_layers=80.", metavar="K=V")
    ] = None,
    json: JsonPath = None,
) -> None:
    """Plan the sharding of a model over a mesh of any size. Prints placements, bytes, collectives; nothing runs."""
    from shardproof.cli import plan as dry

    dry.show(model, sizes(mesh, "--mesh"), tokens, options(option), json)


def cost(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Scheme names, files, file.py::name; or attention, mamba, logprob: all schemes for it.",
            autocompletion=complete.priced,
        ),
    ],
    mesh: Annotated[
        list[str],
        typer.Option(
            help="Mesh axis sizes, the axis of neighbouring ranks last: cp=64,tp=8; cp=8..512 for 8, 16 and so on.",
            metavar="AXIS=N",
            autocompletion=complete.meshes,
        ),
    ],
    dim: Annotated[
        list[str] | None,
        typer.Option(
            help="Dim sizes: s=131072, or s=4096*cp. Default: the smallest that the mesh shards.", metavar="DIM=N"
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the scheme: exchange=ring.", metavar="K=V")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float64, float32, bfloat16 or float16; default: bfloat16, if the scheme has it.",
            autocompletion=complete.dtypes,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Draw the lengths of ragged shards and packed sequences; default: DTensor's shards, and one sequence.",
        ),
    ] = None,
    links: Annotated[
        str, typer.Option(help="h100, b200, or a .toml or .json file of hosts and links.", metavar="SHEET")
    ] = "h100",
    json: JsonPath = None,
    figure: FigurePath = None,
) -> None:
    """Price schemes on a mesh of any size. From declared costs: bytes, links, modelled time; nothing runs."""
    from shardproof.cli import priced

    priced.show(targets, priced.Request(mesh, dim or [], options(option), dtype, seed, links), json, figure)
