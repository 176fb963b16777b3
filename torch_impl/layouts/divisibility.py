"""Validation of sizes and offsets against a layout.

Every check reads sizes and host values alone, so all ranks reject the same input before any collective.
"""

from collections.abc import Sequence
from numbers import Integral

import torch
from jaxtyping import Int64
from torch import Tensor

from torch_impl.contract import Rejected, contract, dtype_name, is_integer, type_name

# Equal chunks per rank. Layouts not listed take any size; packed has a rule per sequence, in `validate_offsets`.
CHUNKS_PER_RANK = {"contiguous": 1, "striped": 1, "dual_chunk_swap": 2}


@contract
def needs(layout: str, world: int) -> int:
    """The multiple that `layout` requires of a size; 1 if any size will do.

    Errors: TypeError for a layout that is not a str, or a world that is not an integer.
    """
    return multiple_of(layout, world)


def multiple_of(layout: str, world: int) -> int:
    """The core of `needs`."""
    chunks = CHUNKS_PER_RANK.get(layout)
    return chunks * world if chunks else 1


def indivisible(dim: str, size: int, axis: str, world: int, layout: str) -> str | None:
    """The error message if `layout` cannot shard `dim` over `axis`, or None if it can.

    >>> indivisible("s", 30, "cp", 4, "dual_chunk_swap")
    's=30 cannot be sharded by dual_chunk_swap over cp=4 (needs a multiple of 8); pad to 32'

    Errors: TypeError for a size or world that is not an integer.
    """
    check_integer(dim, size)
    check_integer(axis, world)
    return sharding_problem(dim, size, axis, world, layout)


def sharding_problem(dim: str, size: int, axis: str, world: int, layout: str) -> str | None:
    """The core of `indivisible`."""
    if world < 1:
        return f"{axis}={world} is not a number of ranks; it is 1 or more"
    if size < 0:
        return f"{dim}={size} is not a size; sizes are 0 or more"
    multiple = multiple_of(layout, world)
    padded = -(-size // multiple) * multiple  # the next multiple, which the message recommends
    if padded == size:
        return None
    what = f"{dim}={size} cannot be sharded by {layout} over {axis}={world}"
    return f"{what} (needs a multiple of {multiple}); pad to {padded}"


def length_multiple(kind: str, cp_size: int) -> int:
    """The multiple that a layout requires of a length; 1 on a single rank, which takes any length."""
    if cp_size == 1 or kind == "ragged":
        return 1
    return multiple_of("dual_chunk_swap" if kind == "packed" else kind, cp_size)


def length_problem(kind: str, length: int, cp_size: int, real: int, counts: Sequence[int] | None) -> str | None:
    """Why `length`, `real` or `counts` is invalid for a sequence in this layout, or None."""
    # A single rank takes any length.
    can_be_sharded = length >= 0 and length_multiple(kind, cp_size) == 1
    if not can_be_sharded and (problem := sharding_problem("s", length, "cp", cp_size, kind)):
        return problem
    if not 0 <= real <= length:
        return f"real_length={real} is outside s={length}; it counts the tokens without padding"
    if counts is not None and kind != "ragged":
        return f"counts={counts} are for ragged, the layout is {kind}; leave them out"
    return None


def rank_problem(cp_size: int, cp_rank: int) -> str | None:
    """Why `cp_rank` or `cp_size` is invalid, or None."""
    if cp_size < 1:
        return f"cp_size={cp_size} is not a number of ranks; it is 1 or more"
    if not 0 <= cp_rank < cp_size:
        return f"cp_rank={cp_rank} is not in cp_size={cp_size}; ranks are 0 to {cp_size - 1}"
    return None


def check_divisible(layout: str, size: int, world: int, rank: int | None = None) -> None:
    """ValueError if `size` cannot be sharded or `rank` is not in the world."""
    reason = sharding_problem("size", size, "world", world, layout)
    if reason is None and rank is not None and not 0 <= rank < world:
        reason = f"{layout}: rank={rank} is not in a world of {world}; ranks are 0 to {world - 1}"
    if reason is not None:
        raise ValueError(reason)


def check_integer(name: str, size: object) -> None:
    """TypeError unless `size` is an integer: an int, a SymInt or a 0-d integer tensor, but not a bool."""
    if isinstance(size, Tensor) and not size.ndim and not size.is_floating_point() and size.dtype != torch.bool:
        return
    if isinstance(size, bool) or not isinstance(size, Integral | torch.SymInt):
        raise TypeError(f"{name}={size!r} is {type_name(size)}; pass an int")


def validate_offsets(
    cu_seqlens: Tensor | Sequence[int],
    size: int | None,
    world: int,
    *,
    axis: str = "world",
    multiple: int | None = None,
) -> Int64[Tensor, " offsets"]:
    """The offsets on the host as int64; ValueError unless they run from 0 to `size` and every length can be sharded.

    With `size` None they may end anywhere. Each length must be a multiple of `multiple`; the default is DualChunkSwap's
    multiple over `axis`.
    """
    offsets = host_offsets(cu_seqlens, "cu_seqlens")
    if size is not None and offsets[-1] != size:
        raise ValueError(too_short(int(offsets[-1]), size))
    lengths = offsets.diff()
    multiple = multiple_of("dual_chunk_swap", world) if multiple is None else multiple
    for j in first(lengths % multiple != 0):
        rule = f"dual_chunk_swap over {axis}={world} needs a multiple of {multiple}"
        padded = lengths[j] + -lengths[j] % multiple
        raise ValueError(f"cu_seqlens: sequence {j} has padded length {lengths[j]}, {rule}; pad it to {padded}")
    return offsets


def too_short(end: int, size: int) -> str:
    """The error message for offsets that do not end at the end of the stream."""
    return f"cu_seqlens ends at {end} but the stream holds {size} tokens; pass the padded offsets"


def host_offsets(
    values: Tensor | Sequence[int], name: str, error: type[ValueError] = ValueError
) -> Int64[Tensor, " offsets"]:
    """Offsets as int64 on the host, validated: one row of integers that starts at 0 and never decreases.

    `error` is raised otherwise; `Rejected` where the message begins with the name of the contracted function.
    """
    # Check dtype and shape first: they are known without the copy, which waits for the device.
    on_device = offsets_of(name, values)
    check_row(name, on_device, error)
    offsets = on_device.cpu().long()
    check_rising(name, offsets, error)
    return offsets


def offsets_of(name: str, values: Tensor | Sequence[int]) -> Tensor:
    """Offsets as a tensor on their device; TypeError unless they are integers. Does not wait for the device."""
    try:
        offsets = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise Rejected(f"{name}={values!r} are not offsets; pass a row of integers", TypeError) from None
    if offsets.layout is not torch.strided or offsets.is_nested or offsets.is_meta:
        what = "on meta, without values" if offsets.is_meta else "not a dense tensor"
        raise Rejected(f"{name} is {what}; pass a dense row of integers", TypeError)
    # An empty list becomes a float tensor; leave its error to `check_row`, which complains about the shape.
    if offsets.numel():
        _check_integers(name, offsets)
    return offsets


def check_offset_tensor(name: str, values: Tensor) -> None:
    """Reject a list, another shape than a row, or another dtype than integers. Does not wait for the device."""
    offsets = offsets_of(name, values)
    if not isinstance(values, Tensor):
        raise Rejected(f"{name} is {type_name(values)}; pass a Tensor", TypeError)
    check_row(name, offsets, Rejected)


def check_row(name: str, offsets: Tensor, error: type[ValueError] = ValueError) -> None:
    """Validate shape and dtype of offsets, without reading their values: one row of integers."""
    if offsets.dim() != 1 or not len(offsets):
        raise error(f"{name}: shape is {tuple(offsets.shape)}; offsets are one row that starts at 0")
    _check_integers(name, offsets)


def _check_integers(name: str, offsets: Tensor) -> None:
    if not is_integer(offsets) or offsets.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise Rejected(f"{name}: dtype is {dtype_name(offsets)}; offsets are integers", TypeError)


def check_rising(name: str, offsets: Int64[Tensor, " offsets"], error: type[ValueError] = ValueError) -> None:
    """`error` unless the offsets, on the host, start at 0 and never decrease."""
    if offsets[0] != 0:
        raise error(f"{name}: starts at {offsets[0]}; offsets start at 0")
    for j in first(offsets.diff() < 0):
        back = f"from {offsets[j]} back to {offsets[j + 1]}"
        raise error(f"{name}: sequence {j} runs {back}; offsets never decrease")


def first(wrong: Tensor) -> list[int]:
    """The index of the first True entry, as a list of one; an empty list if there is none."""
    return wrong.nonzero()[:1].flatten().tolist()


def without_fill(offsets: Tensor | Sequence[int]) -> Tensor:
    """The offsets on the host, without the negative entries at the end."""
    host = torch.as_tensor(offsets).cpu()
    if host.dim() != 1 or host.dtype == torch.bool or host.is_floating_point() or not len(host):
        return host  # later checks reject it with a more specific message
    # Cut after the last non-negative entry; a negative entry before it stays and is rejected later.
    valid = (host >= 0).nonzero().flatten()
    return host[: int(valid[-1]) + 1] if len(valid) else host
