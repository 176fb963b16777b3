"""The verbs about schemes: verify, list, new, tour."""

from __future__ import annotations

from typing import Annotated

import typer

from shardproof.cli import complete
from shardproof.cli.values import (
    Dims,
    FigurePath,
    HtmlPath,
    JsonPath,
    Mesh,
    Quiet,
    Timeout,
    Traceback,
    options,
    sizes,
)
from shardproof.draw.arguments import LARGEST_SEED

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="Files, file.py::name, folders, scheme names or globs; none: every built-in scheme.",
        autocompletion=complete.targets,
    ),
]


def verify(
    targets: Targets = None,
    engine: Annotated[
        str, typer.Option(help="lockstep, gloo, nccl or torchrun.", autocompletion=complete.engines)
    ] = "lockstep",
    examples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cases per scheme; default: the profile's, or one for each dtype if dims, mesh and options are all "
            "given.",
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            help="quick (8 cases of one shape), fast (16), dev (20), ci (60) or nightly (2000).",
            autocompletion=complete.profiles,
        ),
    ] = "dev",
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Each seed draws other cases.")] = 0,
    mesh: Mesh = None,
    dim: Dims = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float64, float32, bfloat16 or float16; default: the scheme's.", autocompletion=complete.dtypes
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the scheme: temperature=2.0.", metavar="K=V")
    ] = None,
    inside_subgroup: Annotated[
        bool | None,
        typer.Option(
            "--inside-subgroup/--no-inside-subgroup",
            help="Put every case, or none, inside a world twice as large; default: a quarter of them on lockstep.",
        ),
    ] = None,
    implementation: Annotated[
        str | None,
        typer.Option(
            help="Test this module's or FILE.py's functions in place of torch_impl's of the same names.",
            metavar="MODULE",
        ),
    ] = None,
    expected_failures: Annotated[
        str | None,
        typer.Option(
            help="File with one failure per line: scheme, verdict, # reason. Reports those that pass.",
            metavar="FILE",
        ),
    ] = None,
    types: Annotated[
        bool,
        typer.Option(
            "--types",
            help="Also type the lines of each scheme by spmd-types (extra types); a failing scheme is typed anyway.",
        ),
    ] = False,
    timeout: Timeout = None,
    limit: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Seconds after which no further case of a scheme is drawn; default: none.", metavar="SECONDS"
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Stay, and print a new verdict when FILE, or a file that it imports, is saved. Ctrl-C ends it, with "
            "the last verdict's status, or with 130 during a verdict.",
        ),
    ] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first scheme that is not equal.")] = False,
    jax_cache: Annotated[
        str | None, typer.Option(help="Folder that keeps JAX's compiled references.", metavar="DIR")
    ] = None,
    replay_dir: Annotated[
        str | None, typer.Option(help="Folder for replay files; default: the working folder.", metavar="DIR")
    ] = None,
    html: HtmlPath = None,
    json: JsonPath = None,
    junit: Annotated[
        str | None, typer.Option(help="Write the verdicts as JUnit XML; - is standard output.", metavar="PATH")
    ] = None,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print every scheme's tensors and the ledger of one case.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Compare schemes with their references on drawn cases."""
    if engine in ("gloo", "nccl"):
        from shardproof.engines.processes import forks

        forks.start_ahead()
    from shardproof.cli import session

    mesh_sizes, dim_sizes = sizes(mesh, "--mesh"), sizes(dim, "--dim")
    verify_options = session.VerifyOptions(
        engine=engine,
        examples=examples,
        profile=profile,
        seed=seed,
        fixed={**mesh_sizes, **dim_sizes, **options(option)},
        mesh_names=tuple(mesh_sizes),
        dim_names=tuple(dim_sizes),
        dtype=dtype,
        inside_subgroup=inside_subgroup,
        timeout=timeout,
        limit=limit,
        fail_fast=fail_fast,
        jax_cache=jax_cache,
        replay_dir=replay_dir,
        html=html,
        json=json,
        junit=junit,
        quiet=quiet,
        verbose=verbose,
        traceback=traceback,
        implementation=implementation,
        expected_failures=expected_failures,
        types=types,
    )
    if watch:
        from shardproof.cli import at_each_save

        raise typer.Exit(at_each_save.watch(targets or [], verify_options))
    raise typer.Exit(session.verify(targets or [], verify_options))


def new(
    target: Annotated[
        str, typer.Argument(help="file.py::function, on one rank's tensors or on DTensors.", metavar="FILE::FUNCTION")
    ],
    inputs: Annotated[
        str | None,
        typer.Option(
            help="A function that takes the mesh and returns inputs, as a tuple or a dict. FUNCTION is run with them, "
            "and the placements of its DTensors become the specs.",
            metavar="FILE::FUNCTION",
        ),
    ] = None,
    mesh: Mesh = None,
    out: Annotated[
        str | None, typer.Option(help="The file to write; default: scheme_FUNCTION.py beside FILE.", metavar="PATH")
    ] = None,
) -> None:
    """Write a scheme for an existing function. You add the reference, and specs that cannot be inferred."""
    from shardproof.cli import skeleton

    raise typer.Exit(skeleton.new(target, out, inputs, sizes(mesh, "--mesh")))


def list_schemes(
    target: Annotated[
        str,
        typer.Argument(
            help="A file, file.py::name, a folder, a glob of names of built-in schemes or functions, or words on them.",
            autocompletion=complete.targets,
        ),
    ] = "*",
    json: JsonPath = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print names only, one on a line.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also schemes of parts that are not public.")] = False,
) -> None:
    """The schemes with their meshes, functions, references and files."""
    from shardproof.cli import scheme_list

    scheme_list.show(target, json, quiet, everything)


def tour(
    figure: FigurePath = "shardproof_verify.png",
    examples: Annotated[int, typer.Option(min=1, help="Cases per scheme.")] = 8,
    json: JsonPath = None,
    quiet: Quiet = False,
    everything: Annotated[bool, typer.Option("--all", help="Also schemes of parts that are not public.")] = False,
) -> None:
    """Everything at once on this CPU. Schemes of public functions, real text, three injected bugs, one figure."""
    from shardproof.cli import tour as first_run

    raise typer.Exit(first_run.run(figure or "shardproof_verify.png", examples, json, quiet, everything))
