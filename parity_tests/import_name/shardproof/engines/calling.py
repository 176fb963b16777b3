"""The calling conditions of a rank: strides of tensors, the dtype of integers, tensors in one storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import checkpoint

from shardproof.declare.case import CaseSpec
from shardproof.declare.conditions import COTANGENT
from shardproof.endings.raised import message_of

LEAST_SWAPPED = 3  # dims that rows in another order need
# Torch's messages for a graph that was not retained, and for a first backward that wrote into a saved tensor.
ONCE = ("backward through the graph a second time", "modified by an inplace operation")


def stored(tensor: torch.Tensor, label: str, case: CaseSpec) -> torch.Tensor:
    """The same numbers, in a view of the kind that the case asks for."""
    kind = case.conditions.get("strided", {}).get(label)
    if kind is not None and tensor.ndim:
        if kind == "swapped" and tensor.ndim >= LEAST_SWAPPED:
            return _swapped(tensor)
        return _stepped(tensor) if kind == "stepped" or tensor.ndim == 1 else _transposed(tensor)
    if label in case.conditions.get("expanded", ()):
        return _expanded(tensor, every_dim=label.startswith(COTANGENT))
    return tensor


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    """A view of contiguous rows in another order: [b, s, d] stored as [s, b, d], [b, h, s, d] as [b, s, h, d].

    Its leading dims cannot be merged without a copy; in the other two kinds of views they can.
    """
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


def _stepped(tensor: torch.Tensor) -> torch.Tensor:
    """Every other element of a buffer; the elements between are NaN, or 0 for integers."""
    gap = float("nan") if tensor.is_floating_point() else 0
    buffer = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), gap)
    view = buffer[..., ::2]
    view.copy_(tensor)
    return view


def _expanded(tensor: torch.Tensor, *, every_dim: bool) -> torch.Tensor:
    """A view of stride 0 if all values are equal; values that the user passes may differ."""
    one = tensor[(slice(0, 1),) * (tensor.ndim if every_dim else 1)]
    return one.clone().expand(tensor.shape) if bool((tensor == one).all()) else tensor


def of_integer_dtype(full: np.ndarray, label: str, case: CaseSpec) -> np.ndarray:
    """The integers as int32, if the case asks for it and all fit. Full arrays are converted, so ranks agree."""
    if full.dtype != np.int64 or label not in case.conditions.get("int32", ()):
        return full
    narrow = full.astype(np.int32)
    return narrow if np.array_equal(narrow, full) else full


def in_one_storage(leaves: Mapping[str, torch.Tensor], case: CaseSpec) -> dict[str, torch.Tensor]:
    """The leaves: slices of one buffer, or two of them as one tensor, if the case asks for that."""
    shared = dict(leaves)
    floating = {name: leaf for name, leaf in leaves.items() if leaf.is_floating_point()}
    if case.conditions.get("one_storage") and floating:
        buffer = torch.cat([leaf.detach().reshape(-1) for leaf in floating.values()])
        pieces = buffer.split([leaf.numel() for leaf in floating.values()])
        for (name, leaf), piece in zip(floating.items(), pieces, strict=True):
            shared[name] = piece.view(leaf.shape).requires_grad_(leaf.requires_grad)
    first, second = case.conditions.get("same_tensor", (None, None))
    if first is not None and second is not None and torch.equal(leaves[first], leaves[second]):
        shared[second] = leaves[first].detach().requires_grad_(leaves[second].requires_grad)
    return shared


def grad_mode(case: CaseSpec) -> AbstractContextManager[Any]:
    """The context for a forward without gradients."""
    if case.conditions.get("inference_mode"):
        return torch.inference_mode()
    return torch.no_grad() if case.conditions.get("no_grad") else nullcontext()


def autocast(case: CaseSpec, device: str) -> AbstractContextManager[Any]:
    """A forward's context: autocast if the case asks for it. A function turns it off where it needs wide products."""
    return torch.autocast(device, dtype=torch.bfloat16) if case.conditions.get("autocast") else nullcontext()


def called(function: Callable[[], Any], case: CaseSpec) -> Any:
    """Call the function, under `torch.utils.checkpoint` if the case asks for that.

    Backward then runs it to its end, so that all ranks send the same messages.
    """
    if not case.conditions.get("recomputed"):
        return function()
    return checkpoint(function, use_reentrant=False, early_stop=False)


def gradients(
    outputs: list[torch.Tensor], variables: list[torch.Tensor], cotangents: list[torch.Tensor], case: CaseSpec
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of one backward, or of the second backward on a retained graph.

    If torch reports that the function allows no second backward, these are the gradients of the first: users notice
    such an error themselves, but not a wrong second backward.
    """
    again = bool(case.conditions.get("second_backward"))
    has_hooks = any(variable._post_accumulate_grad_hooks for variable in variables)
    one_backward = _by_backward if has_hooks or _has_reentrant_checkpoint(outputs) else _by_grad
    if not again:
        return one_backward(outputs, variables, cotangents, retain_graph=False)
    is_overwritten = case.conditions.get("overwritten")
    # The caller writes into the first gradients, and one of them may be the cotangent itself.
    own = [cotangent.clone() for cotangent in cotangents] if is_overwritten else cotangents
    of_first = one_backward(outputs, variables, own, retain_graph=True)
    wait_for(of_first)
    first = tuple(None if gradient is None else gradient.clone() for gradient in of_first)
    if is_overwritten:
        overwrite(gradient for gradient in of_first if gradient is not None)
    try:
        return one_backward(outputs, variables, cotangents, retain_graph=True)
    except RuntimeError as error:
        if any(words in message_of(error) for words in ONCE):
            return first
        raise


def _by_grad(
    outputs: list[torch.Tensor], variables: list[torch.Tensor], cotangents: list[torch.Tensor], *, retain_graph: bool
) -> tuple[torch.Tensor | None, ...]:
    total = total_with(cotangents, outputs)
    return torch.autograd.grad(total, variables, retain_graph=retain_graph, allow_unused=True)


class _Cotangents(torch.autograd.Function):
    """A scalar. Its backward gives each output the stored cotangent itself."""

    @staticmethod
    def forward(ctx: Any, cotangents: Sequence[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.cotangents = cotangents
        # Not `new_zeros`, which would wait for an asynchronous output.
        return torch.zeros((), dtype=outputs[0].dtype, device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *ctx.cotangents


def total_with(cotangents: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar. Its backward starts with these cotangents.

    Torch compares the shapes of explicit `grad_outputs` by SymPy; its import takes longer than a small case, in each
    process.
    """
    with torch.enable_grad():
        total: torch.Tensor = _Cotangents.apply(cotangents, *outputs)
    return total


def _by_backward(
    outputs: list[torch.Tensor], variables: list[torch.Tensor], cotangents: list[torch.Tensor], *, retain_graph: bool
) -> tuple[torch.Tensor | None, ...]:
    """The gradients as `backward()` leaves them in `.grad`.

    For functions that reject `torch.autograd.grad`, or that edit `.grad` in hooks, which it does not call.
    """
    torch.autograd.backward(total_with(cotangents, outputs), retain_graph=retain_graph)
    results = tuple(variable.grad for variable in variables)
    for variable in variables:
        variable.grad = None
    return results


def _has_reentrant_checkpoint(outputs: Iterable[torch.Tensor]) -> bool:
    """Whether a graph has a reentrant checkpoint (torch, Megatron, DeepSpeed), which runs a backward of its own."""
    seen, nodes = set[Any](), [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if "CheckpointFunction" in node.name():
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


def wait_for(results: Iterable[torch.Tensor | None]) -> None:
    """Wait for asynchronous results, which torch waits for at their first use.

    A result that nobody uses is never waited for.
    """
    for tensor in results:
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor.wait()


def shared_with_inputs(
    outputs: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor], case: CaseSpec
) -> list[str]:
    """One sentence for each output in the storage of an input, if this case's caller overwrites its inputs."""
    if not case.conditions.get("overwritten"):
        return []
    inputs_at = {leaf.untyped_storage().data_ptr(): name for name, leaf in leaves.items() if leaf.numel()}
    return [
        f"output '{name}' shares its storage with input '{inputs_at[at]}', which the caller may overwrite"
        for name, tensor in outputs.items()
        if tensor.numel() and (at := _home(tensor)) in inputs_at
    ]


def overwrite(tensors: Iterable[torch.Tensor]) -> None:
    """Write other numbers into the memory of each tensor, as its caller may: NaN, or 1 for integers.

    A function that keeps one of them for a later call then returns other numbers there.
    """
    for tensor in tensors:
        if not isinstance(tensor, AsyncCollectiveTensor) and not _overlaps_itself(tensor):
            tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 1)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as in an expanded view; torch refuses to write into such a tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _home(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; waits for an asynchronous result first."""
    arrived = tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
    return arrived.untyped_storage().data_ptr()
