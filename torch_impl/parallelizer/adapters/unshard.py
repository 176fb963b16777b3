"""Gather a model's parameters temporarily, for example to score with a model that FSDP has sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torch_impl.contract import Module, contract


@contract
def unshard_fsdp2_model(model: Module) -> AbstractContextManager[None]:
    """A context in which every FSDP unit of `model` has its full parameters; they are sharded again afterwards.

    Parameters are in the units' compute dtype, and stay sharded over tp. A model without FSDP units is not changed. A
    forward inside frees units with `reshard_after_forward`, and the next forward gathers them again. `unshard` is the
    same function.

    Cost:   on entry 1 all_gather for each unit, and memory for all parameters; on exit none. All ranks must enter.
    Errors: TypeError at the call if model is not a Module. Exceptions inside the context pass through, after the
            parameters are sharded again.
    """
    return _unsharded(model)


@contextmanager
def _unsharded(model: nn.Module) -> Iterator[None]:
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for unit in units:
            unit.unshard()
        yield
    finally:
        for unit in units:
            unit.reshard()


unshard = unshard_fsdp2_model
