"""Initialise a model on the meta device, a unit at a time, to values that do not depend on the mesh."""

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
    """ValueError unless the model is on the meta device exactly if that is expected, and can be initialised."""
    for problem in _meta_problems(model, is_expected):
        raise ValueError(f"init_nvfsdp_with_meta_device{problem}")


def _meta_problems(model: nn.Module, is_expected: bool) -> Iterator[str]:
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta and not is_expected:
        yield f"=False, and {on_meta[0]!r} is on the meta device; pass True, or a model with values"
    if is_expected and not on_meta:
        build = "build the model under torch.device('meta'), or pass False"
        yield f"=True, and no parameter is on the meta device; {build}"
    # Models of transformers initialise all their modules by this one method; others need one for each module.
    if not is_expected or hasattr(model, "_init_weights"):
        return
    for name, module in model.named_modules():
        if any(p.is_meta for p in _direct_tensors(module).values()) and not hasattr(module, "reset_parameters"):
            lacks = "has parameters and no reset_parameters, nor has the model _init_weights"
            yield f": {name or type(model).__name__!r} {lacks}; add one of them"


def shared_seed(mesh: DeviceMesh) -> int:
    """The first rank's seed, on every rank of a mesh. Cost: 1 broadcast of 8 bytes for each axis."""
    # Below 2^62, so that it fits int64 also after a module's checksum has been added.
    seed = torch.tensor(torch.initial_seed() % 2**62, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.broadcast(seed, group=mesh.get_group(axis), group_src=0)
    return int(seed)


def materialize(model: nn.Module, modules: Iterable[tuple[str, nn.Module]], device: torch.device, seed: int) -> None:
    """Initialise modules of a model at full size.

    A module's values follow from the seed and its name. The generators of the process are left as they were. What
    shares a parameter on the meta device shares it afterwards.

    Errors: ValueError for a parameter that has no value after the initialisation.
    """
    modules = list(modules)
    _allocate(model, [module for _, module in modules], device)
    for name, module in modules:
        # The name, not the order of calls: on another mesh a rank may initialise other modules before this one.
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
    """The generators of the CPU and of one device, seeded, and restored afterwards; no other device's is touched."""
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
    """Allocate each parameter and buffer, filled with NaN, under all names that the model has for it."""
    inside = {id(tensor) for module in modules for tensor in _direct_tensors(module).values() if tensor.is_meta}
    allocated: dict[int, Tensor] = {}
    # A parameter that several modules share is allocated once and registered under each of its names.
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
    """Parameters and buffers of a module, without those of modules inside it."""
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}
