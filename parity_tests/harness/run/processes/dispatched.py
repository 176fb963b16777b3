"""From a dispatcher call on a c10d namespace to what the ledger says of it.

One table names, for each operator, its family and the arguments that are handed in and written to; sizes that
an operator's schema does not hold (the output of a functional collective) follow from the group's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# operator -> (family, argument handed in, argument written; None: a new tensor)
_Table = Mapping[str, tuple[str, str, str | None]]
IN_PLACE: _Table = {
    "allreduce_": ("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors", "tensors"),
    "allgather_": ("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": ("all_gather", "input_tensor", "output_tensor"),
    "allgather_coalesced_": ("all_gather", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", "outputs"),
    "alltoall_": ("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": ("all_to_all", "input", "output"),
    "broadcast_": ("broadcast", "tensors", "tensors"),
    "reduce_": ("reduce", "tensors", "tensors"),
    "scatter_": ("scatter", "input_tensors", "output_tensors"),
    "gather_": ("gather", "input_tensors", "output_tensors"),
    "barrier": ("barrier", "", ""),
    "monitored_barrier_": ("barrier", "", ""),
    "send": ("send", "tensors", ""),
    "recv_": ("recv", "", "tensors"),
    "recv_any_source_": ("recv", "", "tensors"),
}
FUNCTIONAL: _Table = {
    "all_reduce": ("all_reduce", "input", None),
    "all_reduce_": ("all_reduce", "input", None),
    "all_reduce_coalesced": ("all_reduce", "inputs", None),
    "all_reduce_coalesced_": ("all_reduce", "inputs", None),
    "all_gather_into_tensor": ("all_gather", "input", None),
    "all_gather_into_tensor_out": ("all_gather", "input", None),
    "all_gather_into_tensor_coalesced": ("all_gather", "inputs", None),
    "reduce_scatter_tensor": ("reduce_scatter", "input", None),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input", None),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs", None),
    "all_to_all_single": ("all_to_all", "input", None),
    "broadcast": ("broadcast", "input", None),
    "broadcast_": ("broadcast", "input", None),
    "isend": ("send", "tensor", ""),
    "irecv": ("recv", "", "tensor"),
}
OPERATORS: Mapping[str, _Table] = {"c10d": IN_PLACE, "_c10d_functional": FUNCTIONAL}
SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})
REFUSED = {"batch_p2p_ops": "it mixes sends and receives in one call, for compiled code; use batch_isend_irecv"}


@dataclass(frozen=True)
class Issue:
    """One call, in the ledger's terms; ranks are global."""

    op: str
    group: dist.ProcessGroup
    tensors: tuple[Tensor, ...]
    bytes_in: int
    bytes_out: int
    reduce_op: str | None
    root: int | None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None
    peer: int | None
    tag: int
    is_async: bool


def issue(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Issue:
    """What this call issues."""
    name = func._schema.name.partition("::")[2]
    table = OPERATORS[func.namespace]
    if name not in table:
        raise NotImplementedError(f"ledger: {name} is not written down: {REFUSED.get(name, 'it is not known')}")
    op, takes, gives = table[name]
    call = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()} | dict(kwargs)
    call |= {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    group = _group(call)
    ranks = dist.get_process_group_ranks(group)
    handed = _tensors(call.get(takes))
    written = _tensors(call.get(gives)) if gives is not None else None
    splits = _splits(call, handed, written, len(ranks)) if op == "all_to_all" else None
    size_in = sum(map(_nbytes, handed))
    size_out = _functional_bytes(op, handed, len(ranks), splits) if written is None else sum(map(_nbytes, written))
    root = call.get("root_rank", call.get("src") if op == "broadcast" else None)
    root = None if root is None else ranks[root]
    if (op == "reduce" and root != dist.get_rank()) or (op == "broadcast" and root == dist.get_rank()):
        size_out = 0  # nothing is written here
    peer = call.get("dst", call.get("src")) if op in ("send", "recv") else None
    return Issue(
        op=op,
        group=group,
        tensors=handed if op != "recv" else written or (),
        bytes_in=size_in,
        bytes_out=size_out,
        reduce_op=_reduce_op(call.get("reduce_op")),
        root=root,
        splits=splits,
        peer=None if peer is None else ranks[peer],
        tag=call.get("tag", 0),
        is_async=func.namespace != "c10d" or bool(call.get("async_op", False)),
    )


def _group(call: Mapping[str, Any]) -> dist.ProcessGroup:
    held = call.get("process_group", call.get("group_name"))
    if isinstance(held, str):
        return torch._C._distributed_c10d._resolve_process_group(held)  # pyright: ignore[reportAttributeAccessIssue]
    return held if isinstance(held, dist.ProcessGroup) else dist.ProcessGroup.unbox(held)


def _reduce_op(held: Any) -> str | None:
    if held is None:
        return None
    return held.upper() if isinstance(held, str) else dist.ReduceOp.RedOpType(held.op()).name


def _tensors(held: Any) -> tuple[Tensor, ...]:
    if isinstance(held, Tensor):
        return (held,)
    return tuple(t for item in held or () for t in _tensors(item))


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _rows(x: Tensor) -> int:
    return x.shape[0] if x.dim() else 1


def _splits(
    call: Mapping[str, Any], handed: tuple[Tensor, ...], written: tuple[Tensor, ...] | None, world: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows to each peer, rows from each peer); empty splits mean equal ones."""
    if "input_tensors" in call:
        return tuple(map(_rows, handed)), tuple(map(_rows, written or ()))
    sent = tuple(call["input_split_sizes"]) or (_rows(handed[0]) // world,) * world
    received = tuple(call["output_split_sizes"])
    if not received:
        received = (_rows(written[0] if written else handed[0]) // world,) * world
    return sent, received


def _functional_bytes(op: str, handed: tuple[Tensor, ...], world: int, splits: Any) -> int:
    """Bytes of the tensor that a functional collective returns."""
    sizes: Mapping[str, Callable[[int], int]] = {
        "all_gather": lambda size: size * world,
        "reduce_scatter": lambda size: size // world,
    }
    if op == "all_to_all":
        (x,) = handed
        return sum(splits[1]) * math.prod(x.shape[1:]) * x.element_size()
    return sum(sizes.get(op, int)(_nbytes(x)) for x in handed)
