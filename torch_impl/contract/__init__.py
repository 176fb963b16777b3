"""The contract of a public function: its signature states it, and every call validates it once, on entry.

    @contract
    def vocab_parallel_logprob(
        vocab_parallel_logits: Sharded[Tensor, "... v/tp"],
        target: ShardedIds[Tensor, "..."],
        tp_group: Group[ProcessGroup, "tp"],
        temperature: Positive = 1.0,
    ) -> Sharded[Tensor, "... tp=I"]: ...

The signature states the shape, the sharding, the kind of number, the range and the gradient type of every argument.
Three things are derived from it: the validation with its messages, the manual's spec line (`spec_line`), and the
declaration of a scheme (`contract_of`). For a type checker `Sharded[Tensor, "..."]` is a Tensor and `Positive` a float.

Code behind a contract does not validate again: internal functions receive validated arguments. A check that only the
body can make raises `Rejected` with the sentence alone; the contract adds the function's name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_impl.contract.contract import Contract as Contract
from torch_impl.contract.contract import contract as contract
from torch_impl.contract.contract import contract_of as contract_of
from torch_impl.contract.contract import read_contract as read_contract
from torch_impl.contract.contract import spec_line as spec_line
from torch_impl.contract.kinds import Finite as Finite
from torch_impl.contract.kinds import Function as Function
from torch_impl.contract.kinds import GradientType as GradientType
from torch_impl.contract.kinds import Instance as Instance
from torch_impl.contract.kinds import Kind as Kind
from torch_impl.contract.kinds import ListOf as ListOf
from torch_impl.contract.kinds import Names as Names
from torch_impl.contract.kinds import NonNegative as NonNegative
from torch_impl.contract.kinds import NonNegativeInt as NonNegativeInt
from torch_impl.contract.kinds import Number as Number
from torch_impl.contract.kinds import OneOf as OneOf
from torch_impl.contract.kinds import Positive as Positive
from torch_impl.contract.kinds import PositiveInt as PositiveInt
from torch_impl.contract.kinds import RelatedKind as RelatedKind
from torch_impl.contract.kinds import Sizes as Sizes
from torch_impl.contract.kinds import check as check
from torch_impl.contract.kinds import type_name as type_name
from torch_impl.contract.rejected import Rejected as Rejected
from torch_impl.contract.rejected import TypeProblem as TypeProblem
from torch_impl.contract.rejected import sentence_about as sentence_about

if TYPE_CHECKING:
    from torch_impl.contract.tensor_kinds import Device as Device
    from torch_impl.contract.tensor_kinds import Dtype as Dtype
    from torch_impl.contract.tensor_kinds import Group as Group
    from torch_impl.contract.tensor_kinds import Groups as Groups
    from torch_impl.contract.tensor_kinds import Mesh as Mesh
    from torch_impl.contract.tensor_kinds import Module as Module
    from torch_impl.contract.tensor_kinds import Sharded as Sharded
    from torch_impl.contract.tensor_kinds import ShardedAny as ShardedAny
    from torch_impl.contract.tensor_kinds import ShardedBool as ShardedBool
    from torch_impl.contract.tensor_kinds import ShardedIds as ShardedIds
    from torch_impl.contract.tensor_kinds import ShardedInt as ShardedInt
    from torch_impl.contract.tensor_kinds import ShardedNumber as ShardedNumber
    from torch_impl.contract.tensor_kinds import Tensors as Tensors
    from torch_impl.contract.tensor_kinds import dtype_name as dtype_name
    from torch_impl.contract.tensor_kinds import is_integer as is_integer

_OF_TENSORS = (
    *("Device", "Dtype", "Group", "Groups", "Mesh", "Module", "Sharded", "ShardedAny", "ShardedBool", "ShardedIds"),
    *("ShardedInt", "ShardedNumber", "Tensors", "dtype_name", "is_integer"),
)


def __getattr__(name: str) -> Any:
    """Import the kinds of tensors and groups on first use: they load torch, which numbers and names do not need."""
    if name not in _OF_TENSORS:
        raise AttributeError(f"module 'torch_impl.contract' has no attribute {name!r}")
    return getattr(import_module("torch_impl.contract.tensor_kinds"), name)
