"""How a style cuts the parameters of a module, known before it does."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from torch_impl.parallelizer.local_forward import LocalForward
from torch_impl.parallelizer.packed_styles import HALVES, is_halved


def placements_of(style: ParallelStyle, module: nn.Module) -> dict[str, Placement]:
    """Placement over tp of each of the module's parameters that the style cuts or repeats, by name.

    A style that is neither torch's nor ours cuts nothing as far as is known.

    Errors: ValueError for a module that the style cannot cut.
    """
    if isinstance(style, LocalForward):
        return style.placements(module)
    names = [name for name, _ in module.named_parameters()]
    if isinstance(style, SequenceParallel):
        return {name: Replicate() for name in names}
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return {}
    if not isinstance(module, nn.Linear | nn.Embedding):
        kind = type(module).__name__
        raise ValueError(f"{type(style).__name__} cuts Linear and Embedding, not {kind}; choose another style")
    inner = next((name for name in names if "." in name), None)
    if inner is not None:
        kind = type(module).__name__
        raise ValueError(
            f"{type(style).__name__} cuts a layer's own parameters, and this {kind} has {inner!r} inside; "
            "put what is added beside the layer, or merge it"
        )
    is_linear = isinstance(module, nn.Linear)
    if isinstance(style, ColwiseParallel):
        return {name: Shard(0 if is_linear else 1) for name in names}
    return {name: Shard(1 if is_linear else 0) if name == "weight" else Replicate() for name in names}


def cut_dim(placement: Placement | None) -> tuple[int | None, int]:
    """The dim that a placement cuts, None of none, and into how many parts first, each of which is then cut alike."""
    if placement is not None and is_halved(placement):
        return placement.dim, HALVES  # pyright: ignore[reportAttributeAccessIssue]
    return (placement.dim, 1) if isinstance(placement, Shard) else (None, 1)
