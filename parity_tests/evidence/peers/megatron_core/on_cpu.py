"""Megatron on a machine without CUDA: its groups, and the device that it allocates on."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import ModelParallelConfig, parallel_state


def device_of_cpu() -> torch.device:
    return torch.device("cpu")


def allocate_on_cpu(mesh: Any = None) -> None:
    """Make torch.cuda name the CPU as its current device, which Megatron asks for wherever it allocates."""
    torch.cuda.current_device = device_of_cpu


def initialize_model_parallel(mesh: Any) -> None:
    """The set-up at the start of a training script, once on each rank."""
    allocate_on_cpu()
    sizes = {axis: mesh.size(axis) for axis in mesh.axes}
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.get("tp", 1),
        context_parallel_size=sizes.get("cp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
    )


# State that each rank of lockstep needs for itself: the groups, and the buffer of sequence-parallel gathers.
ISOLATED = ("megatron.core",)


def config(sequence_parallel: bool = False) -> ModelParallelConfig:
    """The configuration of a layer that gets its parameters from outside."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return ModelParallelConfig(
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel and ranks > 1,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
