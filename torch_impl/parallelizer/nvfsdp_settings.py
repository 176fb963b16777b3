"""The arguments of Megatron-FSDP in one object: checked, and each that has no effect here told so."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

from torch_impl.parallelizer.arguments import checked_bool

STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard")
OF_THE_PAGE = ("params", "grads_params")  # names of no release; each of them is cut by optim_grads_params
BACKENDS = ("auto", "native", "megatron_fsdp", "nvfsdp")
OF_CUDA = ("keep_fp8_transpose_cache_when_using_custom_fsdp", "nccl_ub", "fsdp_double_buffer")


@dataclass(frozen=True)
class Settings:
    """What the page's function is told beside model, mesh, units and plan."""

    data_parallel_sharding_strategy: str
    init_nvfsdp_with_meta_device: bool
    grad_reduce_in_fp32: bool
    preserve_fp32_weights: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    check_for_nan_in_grad: bool
    average_in_collective: bool
    disable_bucketing: bool
    calculate_per_token_loss: bool
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool
    nccl_ub: bool
    fsdp_double_buffer: bool
    activation_checkpointing: bool

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "data_parallel_sharding_strategy":
                checked_bool(field.name, getattr(self, field.name))
        name = "data_parallel_sharding_strategy"
        strategy: Any = self.data_parallel_sharding_strategy
        if not isinstance(strategy, str):
            raise TypeError(f"{name}: is {strategy!r}, a {type(strategy).__name__}; use one of {', '.join(STRATEGIES)}")
        if strategy not in (*STRATEGIES, *OF_THE_PAGE):
            raise ValueError(f"{name}={strategy!r} is not known; use one of {', '.join(STRATEGIES)}")
        if self.calculate_per_token_loss and self.average_in_collective:
            raise ValueError(
                "calculate_per_token_loss=True sums gradients and average_in_collective=True averages them; "
                "choose one of the two"
            )

    @property
    def strategy(self) -> str:
        """The strategy by one of its four real names."""
        name = self.data_parallel_sharding_strategy
        return STRATEGIES[0] if name in OF_THE_PAGE else name

    @property
    def is_sharded(self) -> bool:
        return self.strategy != "no_shard"

    def warn_of_aliases(self) -> None:
        name = self.data_parallel_sharding_strategy
        if name in OF_THE_PAGE:
            _warn(
                f"data_parallel_sharding_strategy={name!r} is no name of any release and is taken for "
                f"{STRATEGIES[0]!r}, which cuts all that it names; the names are {', '.join(STRATEGIES)}"
            )

    def warn_of_what_has_no_effect(self) -> None:
        """What the native backend does not do, by name; results do not depend on it."""
        for name in OF_CUDA:
            if getattr(self, name):
                _warn(f"{name}=True has no effect natively: memory and speed only, needs megatron-fsdp on CUDA")
        if not self.overlap_grad_reduce:
            _warn("overlap_grad_reduce=False has no effect natively: reductions always overlap with the backward")
        if not self.overlap_param_gather and not self.is_sharded:
            _warn("overlap_param_gather=False has no effect with no_shard: no parameter is gathered")


def checked_backend(backend: Any) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not known; use one of {', '.join(BACKENDS)}")
    return backend


def _warn(said: str) -> None:
    warnings.warn(said, UserWarning, stacklevel=5)
