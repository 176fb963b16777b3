"""Parameters gathered for a while, as for scoring with a model that FSDP has sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torch_impl.contract import Module, contract


@contract
def unshard_fsdp2_model(model: Module) -> AbstractContextManager[None]:
    """A context in which every FSDP unit of a model has its parameters in full; behind it they are sharded again.

    They are in the dtype that the units compute in. A parameter that tp shards stays sharded over tp. A model without
    FSDP units is left as it is. A forward inside frees what its units free behind a forward (`reshard_after_forward`),
    and the next one gathers that again. `unshard` is the same function.

    Cost:   on entry 1 all_gather for each unit, and memory for all parameters; on exit none. All ranks enter.
    Errors: TypeError at the call, unless a Module. What is raised inside passes through, with the parameters sharded
            again.
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
