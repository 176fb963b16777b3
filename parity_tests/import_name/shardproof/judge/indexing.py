"""NumPy's rules for operations that move numbers or add them up: shapes, slices, gathers, scatters, sums.

Each is `build(equation, lead)`: a function of the operands, which all have the dims `lead` in front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardproof.judge.step import NoRule

Lead = tuple[int, ...]
SMALL = 4096  # elements: up to here copying a broadcast array is faster than a view


def _shape(equation: Any, operand: int = 0) -> tuple[int, ...]:
    return equation.invars[operand].aval.shape


def reshaped(equation: Any, lead: Lead) -> Callable[..., Any]:
    """Also squeeze. A reshape may read the operand's dims in another order."""
    shape = (*lead, *equation.outvars[0].aval.shape)
    dims = equation.params.get("dimensions") if equation.primitive.name == "reshape" else None
    if dims is None:
        return lambda x: x.reshape(shape)
    order = (*range(len(lead)), *(len(lead) + dim for dim in dims))
    return lambda x: x.transpose(order).reshape(shape)


def broadcast_in_dim(equation: Any, lead: Lead) -> Callable[..., Any]:
    shape = (*lead, *equation.outvars[0].aval.shape)
    stretched = [*lead, *(1,) * len(equation.params["shape"])]
    for size, dim in zip(_shape(equation), equation.params["broadcast_dimensions"], strict=True):
        stretched[len(lead) + dim] = size
    if tuple(stretched) == shape:
        return lambda x: x.reshape(shape)
    if np.prod(shape) > SMALL:
        return lambda x: np.broadcast_to(x.reshape(stretched), shape)

    def copied(x: Any) -> np.ndarray:
        result = np.empty(shape, x.dtype)
        result[...] = x.reshape(stretched)
        return result

    return copied


def transpose(equation: Any, lead: Lead) -> Callable[..., Any]:
    order = (*range(len(lead)), *(len(lead) + dim for dim in equation.params["permutation"]))
    return lambda x: x.transpose(order)


def reverse(equation: Any, lead: Lead) -> Callable[..., Any]:
    return _at(lead, [slice(None, None, -1 if d in equation.params["dimensions"] else 1) for d, _ in _dims(equation)])


def sliced(equation: Any, lead: Lead) -> Callable[..., Any]:
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    strides = equation.params["strides"] or (1,) * len(starts)
    return _at(lead, [slice(*bounds) for bounds in zip(starts, limits, strides, strict=True)])


def _dims(equation: Any) -> Any:
    return enumerate(_shape(equation))


def _at(lead: Lead, index: Sequence[Any]) -> Callable[..., Any]:
    full = (*(slice(None),) * len(lead), *index)
    return lambda x: x[full]


def concatenate(equation: Any, lead: Lead) -> Callable[..., Any]:
    axis = len(lead) + int(equation.params["dimension"])
    return lambda *parts: np.concatenate(parts, axis)


def stack(equation: Any, lead: Lead) -> Callable[..., Any]:
    axis = len(lead) + equation.params["axis"]
    return lambda *parts: np.stack(parts, axis)


def unstack(equation: Any, lead: Lead) -> Callable[..., Any]:
    axis = len(lead) + equation.params["axis"]
    return lambda x: tuple(np.moveaxis(x, axis, 0))


def split(equation: Any, lead: Lead) -> Callable[..., Any]:
    axis, ends = len(lead) + int(equation.params["axis"]), np.cumsum(equation.params["sizes"])
    ahead = (slice(None),) * axis
    parts = [(*ahead, slice(end - size, end)) for size, end in zip(equation.params["sizes"], ends, strict=True)]
    return lambda x: tuple(x[part] for part in parts)


def tile(equation: Any, lead: Lead) -> Callable[..., Any]:
    repeats = (*(1,) * len(lead), *equation.params["reps"])
    return lambda x: np.tile(x, repeats)


def pad(equation: Any, lead: Lead) -> Callable[..., Any]:
    """Negative padding removes elements; interior padding goes between neighbours."""
    shape, of_value = equation.outvars[0].aval.shape, (*lead, *(1,) * len(equation.params["padding_config"]))
    source, target = [], []
    for (low, _, between), size, out in zip(equation.params["padding_config"], _shape(equation), shape, strict=True):
        low, step = int(low), 1 + int(between)
        first = max(0, -(low // step))  # the first and the last operand index that remain
        last = min(size - 1, (out - 1 - low) // step)
        source.append(slice(first, max(first, last + 1)))
        target.append(slice(low + first * step, max(low + first * step, low + last * step + 1), step))
    from_operand, to_result = _at(lead, source), (*(slice(None),) * len(lead), *target)

    def padded(x: Any, value: Any) -> np.ndarray:
        result = np.empty((*lead, *shape), x.dtype)
        result[...] = value.reshape(of_value)
        result[to_result] = from_operand(x)
        return result

    return padded


def reduction(ufunc: np.ufunc) -> Callable[..., Callable[..., Any]]:
    """Reduces over the parameter `axes`, in the operand's dtype."""

    def build(equation: Any, lead: Lead = ()) -> Callable[..., Any]:
        axes = tuple(len(lead) + int(axis) for axis in equation.params["axes"])
        dtype = equation.outvars[0].aval.dtype
        return lambda x: ufunc.reduce(x, axes, dtype)

    return build


def accumulation(ufunc: np.ufunc) -> Callable[..., Callable[..., Any]]:
    """Accumulates along the parameter `axis`, from its end if `reverse` is set."""

    def build(equation: Any, lead: Lead = ()) -> Callable[..., Any]:
        axis, dtype = len(lead) + int(equation.params["axis"]), equation.outvars[0].aval.dtype
        if not equation.params.get("reverse"):
            return lambda x: ufunc.accumulate(x, axis, dtype)
        return lambda x: np.flip(ufunc.accumulate(np.flip(x, axis), axis, dtype), axis)

    return build


def dynamic_slice(equation: Any, lead: Lead) -> Callable[..., Any]:
    at = _clamped(_shape(equation), equation.params["slice_sizes"], lead)
    return lambda x, *starts: x[at(starts)]


def dynamic_update_slice(equation: Any, lead: Lead) -> Callable[..., Any]:
    at = _clamped(_shape(equation), _shape(equation, 1), lead)

    def updated(x: Any, update: Any, *starts: Any) -> np.ndarray:
        result = x.copy()
        result[at(starts)] = update
        return result

    return updated


def _clamped(shape: Sequence[int], sizes: Sequence[int], lead: Lead) -> Callable[..., Any]:
    """Moves a slice that would not fit to the nearest place inside."""

    def at(starts: Sequence[Any]) -> tuple[slice, ...]:
        first = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, shape, sizes, strict=True)]
        return (*(slice(None),) * len(lead), *(slice(s, s + size) for s, size in zip(first, sizes, strict=True)))

    return at


def gather(equation: Any, lead: Lead) -> Callable[..., Any]:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    out = equation.outvars[0].aval
    batching = _batching(numbers, "start_indices_batching_dims")
    not_windows = {*numbers.collapsed_slice_dims, *batching}
    window_dims = [dim for dim in range(len(sizes)) if dim not in not_windows]
    windows = Windows(
        _shape(equation),
        _shape(equation, 1),
        sizes,
        dict(zip(window_dims, numbers.offset_dims, strict=True)),
        numbers.start_index_map,
        batching,
        out.ndim,
    )
    ahead = (slice(None),) * len(lead)
    filled = "FILL" in _mode(equation)
    fill = np.asarray(equation.params["fill_value"] if filled and not lead else 0).astype(out.dtype)
    full = (*lead, *out.shape)

    def gathered(x: Any, starts: Any) -> Any:
        values = x[(*ahead, *windows.positions(starts))] if x.size else np.zeros(full, x.dtype)
        if filled and not (fits := windows.fit(starts)).all():
            values = np.where(fits, values, fill)
        return values if values.shape == full else np.broadcast_to(values, full)

    return gathered


def scatter(combine: np.ufunc | None) -> Callable[..., Callable[..., Any]]:
    """Updates replace the operand's elements or are combined with them; updates out of bounds are dropped."""

    def build(equation: Any, lead: Lead = ()) -> Callable[..., Any]:
        numbers, updates_shape = equation.params["dimension_numbers"], _shape(equation, 2)
        shape = _shape(equation)
        if not shape or (combine is None and equation.params.get("update_jaxpr")):
            raise NoRule("scatter into a scalar, or by a function")
        batching = _batching(numbers, "scatter_indices_batching_dims")
        not_windows = {*numbers.inserted_window_dims, *batching}
        window_dims = [dim for dim in range(len(shape)) if dim not in not_windows]
        placed = dict(zip(window_dims, numbers.update_window_dims, strict=True))
        sizes = [updates_shape[placed[dim]] if dim in placed else 1 for dim in range(len(shape))]
        windows = Windows(
            shape,
            _shape(equation, 1),
            sizes,
            placed,
            numbers.scatter_dims_to_operand_dims,
            batching,
            len(updates_shape),
        )
        clipped = "CLIP" in _mode(equation)
        ahead = (slice(None),) * len(lead)

        def scattered(x: Any, starts: Any, updates: Any) -> np.ndarray:
            result = x.copy()
            fits = np.broadcast_to(clipped or windows.fit(starts), updates_shape)
            positions = np.broadcast_arrays(*windows.positions(starts), fits)[:-1]
            if not fits.all():
                positions, updates = [position[fits] for position in positions], updates[(*ahead, fits)]
            if not updates.size:
                return result
            at: Any = (*ahead, *positions)
            if combine is None:
                result[at] = updates
            else:
                combine.at(result, at, updates)
            return result

        return scattered

    return build


class Windows:
    """The positions of a gather's or scatter's windows in the operand, for each element of the result or the updates.

    `placed` maps an operand dim to the dim of the result that runs over it; the result's other dims belong to the start
    indices, whose last dim runs over the operand dims `mapped`. `batching` pairs an operand dim with the dim of the
    start indices that runs along with it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        starts_shape: Sequence[int],
        sizes: Sequence[int],
        placed: dict[int, int],
        mapped: Sequence[int],
        batching: dict[int, int],
        rank: int,
    ) -> None:
        batch = [dim for dim in range(rank) if dim not in placed.values()]
        self._shape_of_starts = [1] * rank
        for dim, size in zip(batch, starts_shape[:-1], strict=True):
            self._shape_of_starts[dim] = size
        self._offsets = []
        for dim in range(len(shape)):
            along, count = (placed[dim], sizes[dim]) if dim in placed else (None, 1)
            if dim in batching:
                along, count = batch[batching[dim]], shape[dim]
            offset = np.zeros((1,) * rank, np.int64)
            if along is not None and count != 1:
                offset = np.arange(count).reshape([count if d == along else 1 for d in range(rank)])
            self._offsets.append(offset)
        self._mapped = list(mapped)
        self._limits = np.array([shape[dim] - sizes[dim] for dim in mapped], np.int64)

    def positions(self, starts: Any) -> list[Any]:
        """The index in each operand dim, with shapes that broadcast together; windows are moved inside the operand."""
        positions = list(self._offsets)
        starts = np.minimum(np.maximum(starts.astype(np.int64), 0), np.maximum(self._limits, 0))
        for k, dim in enumerate(self._mapped):
            positions[dim] = positions[dim] + starts[..., k].reshape(self._shape_of_starts)
        return positions

    def fit(self, starts: Any) -> Any:
        """Whether the window of each element lies inside the operand."""
        starts = starts.astype(np.int64)
        return ((starts >= 0) & (starts <= self._limits)).all(-1).reshape(self._shape_of_starts)


def _batching(numbers: Any, of_starts: str) -> dict[int, int]:
    """Maps operand dims to the dims of the start indices that run along with them."""
    return dict(zip(numbers.operand_batching_dims, getattr(numbers, of_starts), strict=True))


def _mode(equation: Any) -> str:
    return str(equation.params.get("mode")).upper()
