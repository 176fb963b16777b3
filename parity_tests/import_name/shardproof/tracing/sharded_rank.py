"""A rank's part of tracing a sharded model: build it, run it once forward and backward, return its recording."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardproof.declare import discover
from shardproof.engines.failure import RankFault
from shardproof.tracing.torch_side import Recording, is_floating, local_array, recorded

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class RankTrace:
    """The recording of one rank's model under the twin's names; weights and gradients are local.

    `with_gradient` are the weights that require one, `loss` is the model's result if that is one number.
    """

    recording: Recording
    weights: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    with_gradient: tuple[str, ...]
    dtype: str
    loss: float | None


def trace(mesh: Any, case: Any) -> RankTrace:
    """One rank's part. The options are the targets, the seed, the dtype and the shape of the output."""
    options = case.options
    device_mesh = mesh.device_mesh
    torch.manual_seed(options["seed"])
    model = function_of(options["sharded"])(device_mesh)
    if not isinstance(model, nn.Module):
        returned = f"returned {type(model).__name__} on rank {dist.get_rank()}"
        raise RankFault(f"{options['sharded']}: {returned}; return a torch.nn.Module")
    if options["dtype"] is not None:
        model.to(getattr(torch, options["dtype"]))
    tested = dtype_of(model)
    torch.manual_seed(options["seed"])
    inputs = to_device(cast(function_of(options["inputs"])(), getattr(torch, tested)), device_mesh.device_type)
    weights = {plain_name(name): full_array(p) for name, p in model.named_parameters()}
    with recorded(model, is_whole=True, array=full_array) as seen:
        out = call(model, inputs)
        out.backward(_cotangent(out, tuple(options["shape"]), options["seed"], mesh))
    gradients = {
        plain_name(name): full_array(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in model.named_parameters()
    }
    with_gradient = tuple(plain_name(name) for name, p in model.named_parameters() if p.requires_grad)
    recording = Recording(_renamed(seen.values), _renamed(seen.gradients))
    loss = None if out.ndim else float(full_array(out))
    return RankTrace(recording, weights, gradients, with_gradient, tested, loss)


def function_of(target: str, *, is_own: bool = False) -> Callable[..., Any]:
    """The function of `file.py::name`; with `is_own`, it must be defined in that file. Errors: UnusableTarget."""
    file, _, name = target.partition("::")
    module = discover.module_of_file(file)
    function = getattr(module, name, None)
    if inspect.isfunction(function) and (function.__module__ == module.__name__ or not is_own):
        return function
    functions = sorted(
        n
        for n, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not n.startswith("_")
    )
    has = f"it has {', '.join(functions)}" if functions else "it has none"
    raise discover.UnusableTarget(f"{target}: no function of this name{discover.nearest(name, functions)} ({has})")


def call(model: nn.Module, inputs: Any) -> Tensor:
    """The tensor that backward starts from: the model's loss, else its first floating output."""
    out = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = next((x for x in leaves(out) if is_floating(x)), None)
    if loss is None or not is_floating(loss) or not loss.requires_grad:
        problem = "has no gradient" if is_floating(loss) else f"is {type(out).__name__}, without a floating tensor"
        raise ValueError(f"the model's output {problem}; return a tensor that depends on the parameters")
    return loss


def full_array(x: Tensor) -> np.ndarray:
    """A DTensor's full tensor; for a plain tensor, the local one."""
    return local_array(x.detach().full_tensor() if hasattr(x, "full_tensor") else x)  # pyright: ignore


def dtype_of(model: nn.Module) -> str:
    """The dtype of the parameters."""
    return str(next((p.dtype for p in model.parameters()), torch.float32)).removeprefix("torch.")


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Floating inputs in this dtype, others as they are."""
    if isinstance(tree, Mapping):
        return {name: cast(x, dtype) for name, x in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(cast(x, dtype) for x in tree)
    return tree.to(dtype) if is_floating(tree) else tree


def to_device(tree: Any, device: str) -> Any:
    """The same tensors on a device."""
    if isinstance(tree, Mapping):
        return {name: to_device(x, device) for name, x in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(to_device(x, device) for x in tree)
    return tree.to(device) if isinstance(tree, Tensor) else tree


def drawn_cotangent(shape: tuple[int, ...], seed: int) -> Tensor:
    """The cotangent that backward starts from, full and in float64; 1 for a loss."""
    noise = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(noise) if shape else torch.ones((), dtype=torch.float64)


def _cotangent(out: Tensor, shape: tuple[int, ...], seed: int, mesh: Any) -> Tensor:
    """The drawn cotangent with the output's placement: as a DTensor, full, or this rank's block of the sharded dim."""
    full = drawn_cotangent(shape, seed).to(out.device, out.dtype)
    if hasattr(out, "placements"):
        from torch.distributed.tensor import Replicate, distribute_tensor

        dtensor: Any = out
        placements = [Replicate() if p.is_partial() else p for p in dtensor.placements]
        return distribute_tensor(full, dtensor.device_mesh, placements, src_data_rank=None)
    for axis in mesh.axes:
        for dim, size in enumerate(out.shape):
            if size != full.shape[dim] and out.ndim == full.ndim:
                pieces = full.chunk(mesh.size(axis), dim)
                if mesh.rank(axis) < len(pieces) and pieces[mesh.rank(axis)].shape[dim] == size:
                    full = pieces[mesh.rank(axis)]
    if full.shape != out.shape:
        raise ValueError(
            f"the sharded model returns {tuple(out.shape)}, its twin {shape}; return the twin's, or a block"
        )
    return full


def plain_name(name: str) -> str:
    """A name without wrappers' additions."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def _renamed(arrays: Mapping[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    return {event._replace(module=plain_name(event.module)): x for event, x in arrays.items()}


def leaves(tree: Any) -> list[Any]:
    """Everything that is in the tuples, lists and dicts of a tree."""
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, tuple | list):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]
