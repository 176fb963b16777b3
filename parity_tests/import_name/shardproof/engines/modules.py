"""Load a module's parameters and read its gradients by name, also inside DDP, FSDP2 and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.declare.declared import flat

# Prefixes that wrappers insert into the names of a module's parameters.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def load_parameters(module: nn.Module, parameters: Mapping[str, Any]) -> nn.Module:
    """Copy a tree of tensors into a module's parameters of the same names, and return the module.

    Each tensor has the shape of its parameter; for a DTensor, the shape of this rank's shard. A parameter on the meta
    device has no storage: call `module.to_empty(device=...)` first.
    Errors: ValueError if the names or a shape differ between the tree and the module.
    """
    tensors = flat(parameters)
    parameters_by_name = dict(named_parameters(module))
    if sorted(tensors) != sorted(parameters_by_name):
        raise ValueError(
            f"load_parameters: the module has ({', '.join(parameters_by_name)}), the tree has ({', '.join(tensors)})"
        )
    with torch.no_grad():
        for name, parameter in parameters_by_name.items():
            target = local(parameter)
            if target.shape != tensors[name].shape:
                shapes = f"{tuple(target.shape)} on this rank, the tree has {tuple(tensors[name].shape)}"
                raise ValueError(f"load_parameters: '{name}' is {shapes}")
            target.copy_(tensors[name])
    return module


def named_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters, with their names without prefixes of wrappers."""
    for name, parameter in module.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, parameter


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def gradients(module: nn.Module, tree: str, variables: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Read the accumulated gradient of each variable: from its parameter if it is in `tree`, else from itself.

    Errors: KeyError if the module lacks a parameter of the tree.
    """
    accumulated = {f"{tree}.{name}": parameter.grad for name, parameter in named_parameters(module)}
    gradient_by_name = {}
    for name, variable in variables.items():
        gradient = accumulated[name] if name.startswith(f"{tree}.") else variable.grad
        gradient_by_name[name] = None if gradient is None else local(gradient)
    return gradient_by_name
