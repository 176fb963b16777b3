"""What each layout asks of a size, and the sentence for a size that cannot be cut."""

MULTIPLES = {
    "contiguous": lambda world: world,
    "ragged": lambda world: 1,
    "dual_chunk_swap": lambda world: 2 * world,
    "striped": lambda world: world,
    "packed": lambda world: 1,  # asks nothing of the total; each sequence must suit dual_chunk_swap
}


def needs(layout: str, world: int) -> int:
    """The number of which a size must be a multiple; 1 where anything will do, as for custom layouts."""
    return MULTIPLES[layout](world) if layout in MULTIPLES else 1


def uncuttable(dim: str, size: int, axis: str, world: int, layout: str) -> str | None:
    """Why `dim` cannot be cut, or None if it can.

    >>> uncuttable("s", 30, "cp", 4, "dual_chunk_swap")
    's=30 cannot be cut by dual_chunk_swap over cp=4 (needs a multiple of 8); pad to 32'
    >>> uncuttable("s", 32, "cp", 4, "dual_chunk_swap")
    """
    if size < 0:
        return f"{dim}={size} is not a size; sizes are 0 or more"
    if world < 1:
        return f"{axis}={world} is not a number of ranks; it is 1 or more"
    multiple = needs(layout, world)
    if size % multiple == 0:
        return None
    padded = size + multiple - size % multiple
    return (
        f"{dim}={size} cannot be cut by {layout} over {axis}={world} (needs a multiple of {multiple}); pad to {padded}"
    )


def check_cuttable(size: int, world: int, layout: str) -> None:
    """Raise the sentence as a ValueError, in the layout function's own words `size` and `world`."""
    sentence = uncuttable("size", size, "world", world, layout)
    if sentence:
        raise ValueError(sentence)
