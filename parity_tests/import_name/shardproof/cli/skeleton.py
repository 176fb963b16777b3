"""`shardproof new FILE::function`: a scheme's file with everything that can be inferred, and `?` for the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from keyword import iskeyword
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console

from shardproof.cli.inferred import RETURN, Guess, from_annotations, from_run, is_about_the_mesh, tensor_names
from shardproof.declare.case import LARGEST_WORLD, CaseSpec
from shardproof.declare.discover import UnusableTarget
from shardproof.declare.targets import absolute
from shardproof.engines.engines import run as on_ranks
from shardproof.engines.failure import RankFailure
from shardproof.report.out_path import check_writable, write_text
from shardproof.report.sentence import Sentence
from shardproof.tracing.sharded_rank import function_of

QUIET_S = 120.0
PAGE = '''"""A scheme of `{name}` in {file}.

Write the reference{open}. Then run
`shardproof verify {out}`.
"""

{standard}from shardproof import {imports}{by_path}{dtensor}
{function}

def reference({tensors}):
    """The same on one device: full arrays in, full arrays out, in jax.numpy."""
    raise NotImplementedError("write the reference of {name}")


@scheme(
    reference=reference,
    mesh={{{mesh}}},
    inputs={{
{inputs}
    }},
    outputs={outputs},
{draw})
def {scheme}({parameters}):
    """`{name}` with the shards of one rank."""
{body}'''


@dataclass(frozen=True)
class Skeleton:
    """What the file is written from: the function, the axes, and a guess for each tensor and result."""

    target: str
    out: str
    axes: Mapping[str, int]
    guesses: Mapping[str, Guess]

    @property
    def open(self) -> list[str]:
        """The inputs and results without a guess."""
        results = list(self.results) or [RETURN]
        names = [*tensor_names(function_of(self.target)), *results]
        return [name for name in names if self.guesses.get(name, Guess()).spec == Guess().spec]

    @property
    def results(self) -> dict[str, str]:
        """The spec of each result by name: `return`, `return 1` and so on; entries of a dict `return NAME`."""
        return {name: guess.spec for name, guess in self.guesses.items() if name.split()[0] == RETURN}


def new(target: str, out: str | None, inputs: str | None, axes: Mapping[str, int]) -> int:
    """Write the file and print the remaining steps; returns the exit status.

    Errors: UnusableTarget if the function does not exist or cannot be run; ValueError if the file exists.
    """
    file, colons, name = target.partition("::")
    if not colons:
        raise UnusableTarget(f"{target}: names no function; write {target}::function")
    function = function_of(target, is_own=True)
    if not tensor_names(function):
        raise UnusableTarget(f"{target}: takes no tensor; name a function that takes tensors")
    path = Path(out) if out else Path(file).with_name(f"scheme_{name}.py")
    if path.exists():
        raise ValueError(f"{path} already exists; give another --out")
    if path.suffix != ".py":
        raise ValueError(f"--out {path}: a scheme is in a Python file; end it in .py")
    check_writable(out=str(path))
    axes = dict(axes) or {"tp": 2}
    if prod(axes.values()) > LARGEST_WORLD:
        raise ValueError(f"--mesh has {prod(axes.values())} ranks; the limit is {LARGEST_WORLD}")
    guesses = from_annotations(function, list(axes))
    if inputs is not None:
        source = inputs if "::" in inputs else f"{file}::{inputs}"
        function_of(source)
        guesses |= from_run(_tensors_of_run(target, source, axes), list(axes))
    skeleton = Skeleton(target, str(path), axes, guesses)
    write_text(str(path), text(skeleton))
    open_specs = [f"the spec of {'the result' if each == RETURN else each}" for each in skeleton.open]
    missing = ", ".join(["the reference", *open_specs])
    Console().print(Sentence(f"{path}: write {missing}; then shardproof verify {path}"), soft_wrap=True)
    return 0


def _tensors_of_run(target: str, inputs: str, axes: Mapping[str, int]) -> Any:
    options = {"function": absolute(target), "inputs": absolute(inputs)}
    try:
        return on_ranks(body, CaseSpec("new", axes, options=options), "gloo", quiet_s=QUIET_S).results[0]
    except RankFailure as failure:
        raise UnusableTarget(f"{target}: cannot be run with {inputs}: {str(failure).splitlines()[0]}") from failure


def body(mesh: Any, case: Any) -> Any:
    """What each rank runs: `inferred.run`."""
    return import_module("shardproof.cli.inferred").run(mesh, case)


def text(skeleton: Skeleton) -> str:
    """The file, formatted like ruff's output."""
    file, _, name = skeleton.target.partition("::")
    function = function_of(skeleton.target)
    names = tensor_names(function)
    guesses = {each: skeleton.guesses.get(each, Guess()) for each in names}
    draws = {each: guess.largest for each, guess in guesses.items() if guess.largest is not None}
    placed = {each: guess.placements for each, guess in guesses.items() if guess.placements}
    lines = [f"        {_quoted(each)}: {_quoted(guess.spec)}," for each, guess in guesses.items()]
    kinds = {item.partition("(")[0] for placements in placed.values() for item in placements}
    return PAGE.format(
        name=name,
        file=Path(file).name,
        open=" and what stands as ?" if skeleton.open else "",
        out=Path(skeleton.out).name,
        imports="integers, scheme" if draws else "scheme",
        dtensor=f"\nfrom torch.distributed.tensor import {', '.join(sorted({*kinds, 'DTensor'}))}" if placed else "",
        standard="" if _is_importable(file) else "from pathlib import Path\n\n",
        by_path="" if _is_importable(file) else "\nfrom shardproof.declare.discover import module_of_file",
        function=_import(Path(file), Path(skeleton.out), name),
        tensors=", ".join(names),
        mesh=", ".join(f'"{axis}": {_sizes(size)}' for axis, size in skeleton.axes.items()),
        inputs="\n".join(lines),
        outputs=_outputs(skeleton.results or {RETURN: Guess().spec}),
        draw="".join(_draw(draws)),
        scheme=f"{name}_scheme",
        parameters=", ".join(["mesh", *names]),
        body="\n".join(_body(name, function, placed)),
    )


def _outputs(results: Mapping[str, str]) -> str:
    """The specs as a string, a tuple or, for a function that returns a dict, a dict."""
    names = [name.removeprefix(RETURN).strip() for name in results]
    specs = [_quoted(spec) for spec in results.values()]
    if all(name.isidentifier() for name in names):
        return f"{{{', '.join(f'{_quoted(name)}: {spec}' for name, spec in zip(names, specs, strict=True))}}}"
    return specs[0] if len(specs) == 1 else f"({', '.join(specs)})"


def _draw(draws: Mapping[str, int]) -> list[str]:
    inner = ", ".join(f"{_quoted(name)}: integers(0, {largest})" for name, largest in draws.items())
    return [f"    draw={{{inner}}},\n"] if draws else []


def _body(name: str, function: Callable[..., Any], placed: Mapping[str, Sequence[str]]) -> list[str]:
    """DTensors made of the shards if the function takes them, then the call."""
    lines = []
    for each, placements in placed.items():
        lines.append(f"    {each} = DTensor.from_local({each}, mesh.device_mesh, [{', '.join(placements)}])")
    arguments = []
    for parameter in inspect.signature(function).parameters.values():
        if not is_about_the_mesh(parameter.name) and parameter.default is not parameter.empty:
            continue
        keyword = f"{parameter.name}=" if parameter.kind is parameter.KEYWORD_ONLY else ""
        arguments.append(keyword + _argument(parameter.name))
    return [*lines, f"    return {name}({', '.join(arguments)})"]


def _argument(name: str) -> str:
    if not is_about_the_mesh(name):
        return name
    if name.endswith("group"):
        return "mesh[mesh.axes[0]]"
    return "mesh" if name == "mesh" else "mesh.device_mesh"


def _import(file: Path, out: Path, name: str) -> str:
    """The lines that import the function from the file next to the scheme's; inside a package, a relative import.

    A file whose name is not a module name, like `13_x.py`, is imported by its path.
    """
    if file.resolve().parent != out.resolve().parent:
        raise ValueError(f"--out {out}: put it beside {file}, from which it imports")
    if not _is_importable(file):
        path = f"Path(__file__).with_name({_quoted(file.name)})"
        return f"\n{name} = module_of_file(str({path})).{name}\n"
    module = f".{file.stem}" if (file.resolve().parent / "__init__.py").is_file() else file.stem
    return f"\nfrom {module} import {name}\n"


def _is_importable(file: str | Path) -> bool:
    stem = Path(file).stem
    return stem.isidentifier() and not iskeyword(stem)


def _sizes(size: int) -> str:
    return "(1, 2)" if size == 1 else f"(1, {size})"


def _quoted(text: str) -> str:
    return f'"{text}"'
