"""The module of one stage: a shell of the model that has only the stage's modules, under their original names.

A stage runs its model family's own forward, which computes positions, masks and rotary angles. During that forward the
layers of other stages, and a norm on another stage, are the identity.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def shell(
    module: nn.Module, names: set[str], take: Callable[[str, nn.Module], nn.Module], prefix: str = ""
) -> nn.Module:
    """A clone of a module with only the submodules `names`; `take` moves or copies each of them.

    Other submodules become None; a list becomes a dict by original index that omits them.
    `removed_modules` lists them, nested ones included, by the names that tensor-parallel plans use.
    """
    # A shallow copy shares its tables with the model: copy them too, so that changes do not reach the model.
    clone = copy.copy(module)
    for name, table in vars(clone).items():
        if isinstance(table, (dict, set)):  # parameters, buffers, hooks
            clone.__dict__[name] = copy.copy(table)
    children: dict[str, nn.Module | None] = {}
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in names:
            children[name] = take(path, child)
        elif any(other.startswith(f"{path}.") for other in names) or isinstance(child, nn.ModuleList):
            children[name] = shell(child, names, take, f"{path}.")
        else:
            children[name] = None
    if isinstance(module, nn.ModuleList):
        clone = nn.ModuleDict({name: child for name, child in children.items() if child is not None})
    else:
        clone._modules = children
    clone.__dict__["removed_modules"] = tuple(_removed_names(children))
    return clone


def _removed_names(children: Mapping[str, nn.Module | None]) -> Iterator[str]:
    for name, child in children.items():
        if child is None:
            yield name
        else:
            yield from (f"{name}.{inside}" for inside in getattr(child, "removed_modules", ()))


def run_as_family(
    inner: nn.Module, layers: str, count: int, skippable: tuple[str, ...], summands: tuple[str, ...] = ()
) -> None:
    """Change the module that has the layers, in place: it takes ids or hidden states, and returns a tensor.

    If the stage lacks them, `skippable` modules become the identity and `summands` add nothing.
    """
    family = type(inner).forward
    has_last = bool(skippable) and getattr(inner, skippable[-1]) is not None

    def full_output(*args: Any, **kwargs: Any) -> Any:
        with _all_layers(inner, layers, count, skippable, summands, kwargs.get("inputs_embeds")):
            return family(inner, *args, **kwargs)

    def forward(x: Tensor, **kwargs: Any) -> Tensor:
        entering = _by_name(x).get("inputs_embeds")
        with _all_layers(inner, layers, count, skippable, summands, entering) as other_layers:
            output = family(inner, **_by_name(x), use_cache=False, **kwargs)
            hidden = output if isinstance(output, Tensor) else output[0]
            hidden = _not_a_view(hidden)
            # If the stage lacks the norm, the family must return the last layer's output unchanged.
            if not has_last:
                other_layers.check(count, hidden)
        return hidden

    inner.__dict__["full_output"] = full_output
    inner.forward = forward


def run_head(outer: nn.Module, inner: nn.Module, heads: tuple[str, ...]) -> None:
    """Change a model with a head, in place: it returns logits if the stage has the head, else hidden states."""
    family = type(outer).forward
    has_heads = all(_at(outer, name) is not None for name in heads)

    def forward(x: Tensor, **kwargs: Any) -> Tensor:
        if not has_heads:
            # The inner forward does not take this argument, which is for the head.
            kwargs.pop("logits_to_keep", None)
            return inner(x, **kwargs)
        # The family's head needs the full output of the family's inner forward, not only its first tensor.
        patched = inner.__dict__["forward"]
        inner.forward = getattr(inner, "full_output", patched)
        try:
            output = family(outer, **_by_name(x), use_cache=False, **kwargs)
        finally:
            inner.forward = patched
        return output if isinstance(output, Tensor) else output.logits

    outer.forward = forward


def _by_name(x: Tensor) -> dict[str, Tensor]:
    """The keyword argument for a family's forward: floats of any width are hidden states, integers are ids."""
    return {"inputs_embeds": x} if x.dtype.is_floating_point else {"input_ids": x}


@contextlib.contextmanager
def _all_layers(
    inner: nn.Module,
    layers: str,
    count: int,
    skippable: tuple[str, ...],
    summands: tuple[str, ...],
    entering: Tensor | None,
) -> Iterator[_OtherLayers]:
    """Inside the block, the list of layers is complete, with the identity for other stages' layers and modules."""
    # The family indexes and counts its layers, so the list must have all of them.
    stage_layers: Mapping[str, nn.Module] = dict(getattr(inner, layers).items())
    other_layers = _OtherLayers(type(inner).__name__, {int(number) for number in stage_layers}, entering)
    replaced: dict[str, Any] = {
        layers: [
            stage_layers[str(n)] if str(n) in stage_layers else functools.partial(other_layers, n) for n in range(count)
        ]
    }
    replaced |= {name: _identity for name in skippable if getattr(inner, name) is None}
    replaced |= {name: _NoSummand() for name in summands if getattr(inner, name) is None}
    # Entries in __dict__ hide the modules of the same names in _modules.
    inner.__dict__.update(replaced)
    try:
        yield other_layers
    finally:
        for name in replaced:
            del inner.__dict__[name]


class _OtherLayers:
    """The layers of other stages, as the identity. Each must get the output of the layer before it unchanged: otherwise
    the family computes something between its layers, which every stage would repeat."""

    def __init__(self, family: str, stage_layers: set[int], entering: Tensor | None) -> None:
        self.family, self.stage_layers = family, stage_layers
        self.outputs = {} if entering is None else {-1: entering}

    def __call__(self, layer: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.check(layer, x)
        self.outputs[layer] = x
        return x

    def check(self, layer: int, x: Tensor) -> None:
        """Check that `x`, the input of this layer or the last one's output, is the output of the layer before.

        Errors: ValueError if it is not.
        """
        if layer - 1 in self.stage_layers or (layer == 0 and not self.outputs):
            return  # the outputs of the stage's layers and of its embedding are not recorded
        # A layer, or the family after the last layer, may return a view of its whole result.
        before = self.outputs.get(layer - 1)
        if before is None or _not_a_view(before) is not _not_a_view(x):
            raise ValueError(
                f"pipelining.split_model_into_stages: {self.family} changes hidden states outside its "
                f"embedding, layers and norm, before layer {layer} or instead of it; every stage would repeat the "
                "change, so use one stage, or put it into a layer"
            )


def _not_a_view(x: Tensor) -> Tensor:
    """The base of x if x is a view of all of it in the same shape, as after a reshape that changes nothing; else x."""
    base = x._base
    if base is None or (x.shape, x.stride(), x.storage_offset()) != (base.shape, base.stride(), base.storage_offset()):
        return x
    return base


class _NoSummand:
    """Replaces a module of another stage, and its output: adding it to a tensor returns the same tensor."""

    def __call__(self, *args: Any, **kwargs: Any) -> _NoSummand:
        return self

    to = __call__

    def __radd__(self, x: Tensor) -> Tensor:
        return x


def _identity(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def _at(module: nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)  # pyright: ignore[reportAssignmentType]
    return module


def consume(model: nn.Module, message: str) -> None:
    """Empty a model after the split, so that other ranks' modules are freed; its forward then raises the message."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(message)

    model._modules.clear()
    model.forward = forward
