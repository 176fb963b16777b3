"""One stage of a model: its shell with the modules that the stage keeps, under the names that they had.

A stage runs its family's own forward, so that positions, masks and rotary angles are made as the family makes them.
Meanwhile layers of other stages hand on what they are given, and so does a norm that is elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def shell(
    module: nn.Module, kept: set[str], taken: Callable[[str, nn.Module], nn.Module], prefix: str = ""
) -> nn.Module:
    """A clone of a module without what is not kept. `taken` gives the module of a kept name.

    Removed modules become None, or are missing in the dict by old indices that a list becomes. `removed_modules` names
    them all, also those of modules inside, as plans for tensor parallelism would.
    """
    clone = copy.copy(module)
    for name, table in vars(clone).items():
        if isinstance(table, (dict, set)):  # parameters, buffers, hooks
            clone.__dict__[name] = copy.copy(table)
    children: dict[str, nn.Module | None] = {}
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in kept:
            children[name] = taken(path, child)
        elif any(other.startswith(f"{path}.") for other in kept) or isinstance(child, nn.ModuleList):
            children[name] = shell(child, kept, taken, f"{path}.")
        else:
            children[name] = None
    if isinstance(module, nn.ModuleList):
        clone = nn.ModuleDict({name: child for name, child in children.items() if child is not None})
    else:
        clone._modules = children
    clone.__dict__["removed_modules"] = tuple(_removed(children))
    return clone


def _removed(children: Mapping[str, nn.Module | None]) -> Iterator[str]:
    for name, child in children.items():
        if child is None:
            yield name
        else:
            yield from (f"{name}.{inside}" for inside in getattr(child, "removed_modules", ()))


def run_as_family(inner: nn.Module, layers: str, count: int, standing_in: tuple[str, ...]) -> None:
    """Have the module with the layers take ids or hidden states and return a tensor; in place."""
    family = type(inner).forward
    ends = bool(standing_in) and getattr(inner, standing_in[-1]) is not None  # what stands last of all is here

    def whole(*args: Any, **kwargs: Any) -> Any:
        with _stood_in(inner, layers, count, standing_in, kwargs.get("inputs_embeds")):
            return family(inner, *args, **kwargs)

    def forward(x: Tensor, **kwargs: Any) -> Tensor:
        with _stood_in(inner, layers, count, standing_in, _named(x).get("inputs_embeds")) as handed:
            found = family(inner, **_named(x), use_cache=False, **kwargs)
            left = found if isinstance(found, Tensor) else found[0]
            if not ends:
                handed.check(count, left)
        return left

    inner.__dict__["run_whole"] = whole
    inner.forward = forward


def run_head(outer: nn.Module, inner: nn.Module, heads: tuple[str, ...]) -> None:
    """Have a model with a head return logits where the stage has the head, hidden states elsewhere; in place."""
    family = type(outer).forward
    has_heads = all(_at(outer, name) is not None for name in heads)

    def forward(x: Tensor, **kwargs: Any) -> Tensor:
        if not has_heads:
            kwargs.pop("logits_to_keep", None)
            return inner(x, **kwargs)
        patched = inner.__dict__["forward"]
        inner.forward = getattr(inner, "run_whole", patched)
        try:
            found = family(outer, **_named(x), use_cache=False, **kwargs)
        finally:
            inner.forward = patched
        return found if isinstance(found, Tensor) else found.logits

    outer.forward = forward


def _named(x: Tensor) -> dict[str, Tensor]:
    """Floats are hidden states, whatever their width; integers are ids."""
    return {"inputs_embeds": x} if x.dtype.is_floating_point else {"input_ids": x}


@contextlib.contextmanager
def _stood_in(
    inner: nn.Module, layers: str, count: int, standing_in: tuple[str, ...], entering: Tensor | None
) -> Iterator[_HandedOn]:
    """Inside, the layers are a list of all, and what is missing hands on its input."""
    held: Mapping[str, nn.Module] = getattr(inner, layers)
    own = dict(held.items())
    handed = _HandedOn(type(inner).__name__, {int(number) for number in own}, entering)
    replaced: dict[str, Any] = {
        layers: [own[str(n)] if str(n) in own else functools.partial(handed, n) for n in range(count)]
    }
    replaced |= {name: _handed_through for name in standing_in if getattr(inner, name) is None}
    inner.__dict__.update(replaced)
    try:
        yield handed
    finally:
        for name in replaced:
            del inner.__dict__[name]


class _HandedOn:
    """Stands in for the layers of other stages, which get what the one before gave: else the family does something of
    its own in between, which every stage would do again."""

    def __init__(self, family: str, own: set[int], entering: Tensor | None) -> None:
        self.family, self.own = family, own
        self.given = {} if entering is None else {-1: entering}

    def __call__(self, layer: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.check(layer, x)
        self.given[layer] = x
        return x

    def check(self, layer: int, x: Tensor) -> None:
        """What a layer gets, or what leaves the last one. Errors: ValueError."""
        if layer - 1 in self.own or (layer == 0 and not self.given):
            return  # what an own layer or the embedding gave is not known here
        if self.given.get(layer - 1) is not x:
            raise ValueError(
                f"pipelining.split_model_into_stages: {self.family} does something to hidden states beside its "
                f"embedding, layers and norm, before layer {layer} or instead of it; no stage can do that for all, so "
                "use one stage, or put it into a layer"
            )


def _handed_through(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def _at(module: nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)  # pyright: ignore[reportAssignmentType]
    return module


def consume(model: nn.Module, message: str) -> None:
    """Empty a model that was split, so that what other ranks have is freed; its forward says what became of it."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(message)

    model._modules.clear()
    model.forward = forward
