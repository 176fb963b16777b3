"""How a function's tensors are sharded: read from its annotations, or from a run on DTensors.

Ranks import this, so it loads no JAX.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardproof.engines.failure import RankFault
from shardproof.tracing.sharded_rank import function_of

OPEN, RETURN = "?", "return"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHARDED = re.compile(r"S\(-?[0-9]+\)")  # spmd-types' S(1)
ABOUT_THE_MESH = ("mesh", "device_mesh", "group", "process_group")


@dataclass(frozen=True)
class TensorOfRun:
    """One tensor: its full shape, its placements if it is a DTensor, and the largest value of an integer tensor."""

    shape: tuple[int, ...]
    placements: tuple[str, ...] | None = None
    largest: int | None = None


@dataclass(frozen=True)
class Guess:
    """Data on one tensor for a skeleton: its spec, the placements of its DTensor, the largest integer."""

    spec: str = OPEN
    placements: tuple[str, ...] | None = None
    largest: int | None = None


def tensor_names(function: Callable[..., Any]) -> list[str]:
    """The tensors: parameters without a default that are not about the mesh."""
    parameters = inspect.signature(function).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is p.empty and p.kind in plain and not is_about_the_mesh(p.name)]


def is_about_the_mesh(name: str) -> bool:
    """Whether a parameter with this name is the mesh, or one of its process groups."""
    return name in ABOUT_THE_MESH or name.endswith(("_mesh", "_group"))


def from_annotations(function: Callable[..., Any], axes: Sequence[str]) -> dict[str, Guess]:
    """Guesses by parameter; the result's guess is under `return`.

    Reads the string of jaxtyping's `Float[Tensor, "b s v/tp"]`, the placements of `Annotated[DTensor, Shard(0)]`, one
    for each axis, and the types of spmd-types, by axis: `Annotated[Tensor, {"tp": S(1), "dp": R}]`. A string names the
    dims: `Annotated[DTensor, "b v", Shard(1)]`.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:  # an annotation that only a type checker can evaluate gives no guess
        return {}
    guesses = {name: _of_annotation(hint, axes) for name, hint in hints.items()}
    return {name: guess for name, guess in guesses.items() if guess is not None}


def _of_annotation(hint: Any, axes: Sequence[str]) -> Guess | None:
    stated = getattr(hint, "dim_str", None)
    if stated:
        return Guess(stated)
    metadata = getattr(hint, "__metadata__", ())
    data = [x for item in metadata for x in (item if isinstance(item, tuple | list) else [item])]
    placements = [x for x in data if isinstance(x, Placement)]
    names = next((x.split() for x in data if isinstance(x, str)), None)
    by_axis = next((x for x in data if isinstance(x, Mapping)), None)
    if by_axis is not None:
        return _of_types(by_axis, names, axes)
    if not placements or len(placements) != len(axes):
        return None
    placement_texts = tuple(map(written, placements))
    count = 1 + max((p.dim for p in placements if isinstance(p, Shard)), default=-1)
    return Guess(OPEN if names is None or len(names) < count else spec(names, placement_texts, axes), placement_texts)


def _of_types(by_axis: Mapping[Any, Any], names: list[str] | None, axes: Sequence[str]) -> Guess | None:
    """The guess from types of spmd-types; None unless each axis has one that a spec can say.

    `V` says that the ranks' tensors differ and not along which dim.
    """
    if set(by_axis) != set(axes):
        return None
    kinds = [str(getattr(by_axis[axis], "value", by_axis[axis])) for axis in axes]  # R, I and P, or S(1)
    sharded = [int(kind[2:-1]) for kind in kinds if SHARDED.fullmatch(kind)]
    if any(kind not in ("R", "I", "P") and not SHARDED.fullmatch(kind) for kind in kinds):
        return None
    if names is None or len(names) <= max(sharded, default=-1):
        return Guess()
    items = list(names)
    for axis, kind in zip(axes, kinds, strict=True):
        if SHARDED.fullmatch(kind):
            items[int(kind[2:-1])] += f"/{axis}"
    return Guess(" ".join([*items, *(f"{a}={k}" for a, k in zip(axes, kinds, strict=True) if len(k) == 1)]))


def from_run(tensors: Mapping[str, TensorOfRun], axes: Sequence[str]) -> dict[str, Guess]:
    """Guesses from a run; dims of equal size share a letter, except within one tensor."""
    by_size: dict[int, str] = {}
    letters = iter(LETTERS)
    guesses = {}
    for name, tensor in tensors.items():
        dims: list[str] = []
        for size in tensor.shape:
            letter = by_size.get(size)
            if letter is None or letter in dims:
                letter = next(letters)
                by_size.setdefault(size, letter)
            dims.append(letter)
        placements = tensor.placements or ("Replicate()",) * len(axes)
        guesses[name] = Guess(
            spec(dims, placements, axes, is_typed=tensor.largest is None), tensor.placements, tensor.largest
        )
    return guesses


def spec(dims: Sequence[str], placements: Sequence[str], axes: Sequence[str], *, is_typed: bool = True) -> str:
    """The spec string of placements: a sharded dim, `tp=I` for a replica, `tp=P` for terms of a sum."""
    items, types = list(dims), []
    for axis, placement in zip(axes, placements, strict=True):
        if placement.startswith("Shard("):
            dim = int(placement.removeprefix("Shard(").removesuffix(")")) % len(items)
            items[dim] += f"/{axis}"
        elif is_typed:
            types.append(f"{axis}={'P' if placement.startswith('Partial') else 'I'}")
    return " ".join([*items, *types])


def written(placement: Placement) -> str:
    """A placement as code."""
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return "Partial()" if isinstance(placement, Partial) else "Replicate()" if isinstance(placement, Replicate) else "?"


def run(mesh: Any, case: Any) -> dict[str, TensorOfRun]:
    """On a rank: call the function with its inputs and note the tensors.

    Results are named `return`, `return 1` and so on; entries of a dict `return NAME`.
    """
    options = case.options
    function, device_mesh = function_of(options["function"]), mesh.device_mesh
    torch.manual_seed(0)
    arguments = function_of(options["inputs"])(device_mesh)
    names = tensor_names(function)
    values = list(arguments.values()) if isinstance(arguments, Mapping) else arguments
    if not isinstance(values, tuple | list) or len(values) != len(names):
        returned = str(len(values)) if isinstance(values, tuple | list) else f"a {type(values).__name__}"
        raise RankFault(f"the inputs are {returned}, the function takes {len(names)} ({', '.join(names)})")
    by_name = dict(arguments) if isinstance(arguments, Mapping) else dict(zip(names, arguments, strict=True))
    other_arguments = {
        name: about_the_mesh(name, mesh) for name in inspect.signature(function).parameters if is_about_the_mesh(name)
    }
    results = function(**{**other_arguments, **by_name})
    tensors = {name: _tensor_of_run(x) for name, x in by_name.items() if isinstance(x, Tensor)}
    if isinstance(results, Mapping):
        return tensors | {f"{RETURN} {name}": _tensor_of_run(x) for name, x in results.items()}
    results = results if isinstance(results, tuple | list) else [results]
    return tensors | {f"{RETURN} {i}" if i else RETURN: _tensor_of_run(x) for i, x in enumerate(results)}


def about_the_mesh(name: str, mesh: Any) -> Any:
    """The argument for a parameter with this name: the mesh, torch's DeviceMesh, or the first axis's group."""
    if name.endswith("group"):
        return mesh[mesh.axes[0]]
    return mesh if name == "mesh" else mesh.device_mesh


def _tensor_of_run(x: Tensor) -> TensorOfRun:
    placements: Iterable[Placement] | None = getattr(x, "placements", None)
    placement_texts = None if placements is None else tuple(map(written, placements))
    largest = None if x.is_floating_point() else int((x.full_tensor() if placement_texts else x).max())  # pyright: ignore
    return TensorOfRun(tuple(x.shape), placement_texts, largest)
