"""Initialise a model from the meta device, one unit at a time, with values that do not depend on the mesh."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.parallelizer.tp_styles import owner_of


def check_meta(model: nn.Module, *, is_expected: bool) -> None:
    """Errors: ValueError unless the model is on the meta device just if `is_expected`, and can be initialised there."""
    for problem in _meta_problems(model, is_expected):
        raise ValueError(f"init_nvfsdp_with_meta_device{problem}")


def _meta_problems(model: nn.Module, is_expected: bool) -> Iterator[str]:
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta and not is_expected:
        yield f"=False, and {on_meta[0]!r} is on the meta device; pass True, or a model with values"
    if is_expected and not on_meta:
        build = "build the model under torch.device('meta'), or pass False"
        yield f"=True, and no parameter is on the meta device; {build}"
    # A transformers model initialises all its modules by this one method; other models need one for each module.
    if not is_expected or hasattr(model, "_init_weights"):
        return
    for name, module in model.named_modules():
        if any(p.is_meta for p in _direct_tensors(module).values()) and not hasattr(module, "reset_parameters"):
            lacks = "has parameters but no reset_parameters, and the model has no _init_weights"
            yield f": {name or type(model).__name__!r} {lacks}; add one of them"


def shared_seed(mesh: DeviceMesh) -> int:
    """The first rank's seed, on every rank of a mesh. Cost: 1 broadcast of 8 bytes for each axis."""
    # Keep it below 2^62, so that it fits int64 even after a module's checksum is added.
    seed = torch.tensor(torch.initial_seed() % 2**62, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.broadcast(seed, group=mesh.get_group(axis), group_src=0)
    return int(seed)


def materialize(model: nn.Module, modules: Iterable[tuple[str, nn.Module]], device: torch.device, seed: int) -> None:
    """Initialise modules of a model at full size.

    A module's values depend on the seed and its name only. The process's random generators are restored. Tied
    parameters stay tied.

    Errors: ValueError for a parameter without a value after the initialisation.
    """
    modules = list(modules)
    _allocate(model, [module for _, module in modules], device)
    for name, module in modules:
        # Seed by name and not by order: on another mesh a rank may initialise other modules before this one.
        module_seed = (seed + zlib.crc32(name.encode())) % 2**62
        with _seed_generators(device, module_seed), torch.no_grad():
            _initialize(model, module)
        for leaf, tensor in _direct_tensors(module).items():
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise ValueError(
                    f"init_nvfsdp_with_meta_device: {f'{name}.{leaf}'!r} has no value after the initialisation of "
                    f"{type(module).__name__}; give it a reset_parameters"
                )


@contextmanager
def _seed_generators(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of one device, and restore them afterwards; other devices are not touched."""
    cuda = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda, device_type="cuda"):
        torch.default_generator.manual_seed(seed)
        for index in cuda:
            with torch.cuda.device(index):
                torch.cuda.manual_seed(seed)
        yield


def _initialize(model: nn.Module, module: nn.Module) -> None:
    initialize: Any = getattr(model, "_init_weights", None)
    if initialize is not None:
        initialize(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # pyright: ignore[reportCallIssue]


def _allocate(model: nn.Module, modules: list[nn.Module], device: torch.device) -> None:
    """Allocate each parameter and buffer, filled with NaN, under all its names in the model."""
    inside = {id(tensor) for module in modules for tensor in _direct_tensors(module).values() if tensor.is_meta}
    allocated: dict[int, Tensor] = {}
    # Allocate a shared parameter once, and register it under each of its names.
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in inside:
            owner, leaf = owner_of(model, name)
            if id(parameter) not in allocated:
                empty = nn.Parameter(_empty(parameter, device), requires_grad=parameter.requires_grad)
                allocated[id(parameter)] = empty
            owner.register_parameter(leaf, allocated[id(parameter)])  # pyright: ignore[reportArgumentType]
    for module in modules:
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[leaf] = _empty(buffer, device)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    return empty.fill_(float("nan")) if empty.is_floating_point() else empty


def _direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a module owns directly."""
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}
