"""A look at every reduced gradient at the end of a backward: all finite, or an error on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torch_impl.collectives import accumulator
from torch_impl.parallelizer._torch_compat import after_backward, largest_magnitudes, map_tensors


def check_after_backward(model: nn.Module, group: ProcessGroup) -> None:
    """From now on each backward through the model's output ends with the check, over the ranks of a group.

    To be called after FSDP has taken the model, whose reductions then come first. A backward that reduces nothing, as
    all but the last of an accumulation, is not looked at.

    Cost:   1 all_reduce of 4 bytes for each backward, and one wait for the device.
    Errors: FloatingPointError from `backward` on every rank, naming the first parameter in the order of names.
    """
    model.register_forward_hook(_Watch(model, group))


class _Watch:
    """Asks, once a backward has begun, for the check at its end."""

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self._model, self._group, self._is_asked = model, group, False

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._is_asked = False  # where the last backward did not come to its end
        map_tensors(lambda x: x.register_hook(self._ask) if x.requires_grad else x, output)

    def _ask(self, gradient: Tensor) -> None:
        if not self._is_asked:
            self._is_asked = True
            after_backward(self._check)

    def _check(self) -> None:
        self._is_asked = False
        named = sorted((name, p.grad) for name, p in self._model.named_parameters() if p.grad is not None)
        if not named:
            return
        worst = _not_finite([gradient for _, gradient in named])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)
        place = int(worst)
        if place:
            name = named[len(named) - place][0]
            raise FloatingPointError(
                f"check_for_nan_in_grad: the gradient of {name!r} is not finite on some rank; no step was taken, look "
                "at the loss of each rank and at the learning rate"
            )


def _not_finite(gradients: list[Tensor]) -> Tensor:
    """0 if this rank's parts of all gradients are finite; else how many stand from the first that is not to the end."""
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    held = [number for number, gradient in enumerate(local) if gradient.numel()]
    device = local[0].device
    if not held:
        return torch.zeros((), dtype=torch.int32, device=device)
    wide = accumulator(max((local[number].dtype for number in held), key=lambda dtype: dtype.itemsize))
    magnitudes = torch.stack([each.to(wide) for each in largest_magnitudes([local[number] for number in held])])
    to_the_end = torch.tensor([len(local) - number for number in held], dtype=torch.int32, device=device)
    return torch.where(magnitudes.isfinite(), 0, to_the_end).max()
