"""Arguments of the functions that draw cases, checked before anything is drawn."""

from __future__ import annotations

from numbers import Integral

LARGEST_SEED = 2**32 - 1  # torch and NumPy accept slightly more, each its own range


def check_arguments(name: str, *, examples: object = None, seed: object = 0, inside_subgroup: object = None) -> None:
    """Errors: ValueError that names the scheme, the argument, and the values that it takes."""
    for argument, value, is_right, remedy in (
        ("examples", examples, examples is None or _whole(examples) >= 1, "give 1 or more"),
        ("seed", seed, 0 <= _whole(seed) <= LARGEST_SEED, f"give a whole number from 0 to {LARGEST_SEED}"),
        (
            "inside_subgroup",
            inside_subgroup,
            any(inside_subgroup is choice for choice in (None, True, False)),
            "give True, False or None",
        ),
    ):
        if not is_right:
            raise ValueError(f"scheme '{name}': {argument}={value!r}; {remedy}")


def _whole(value: object) -> int:
    """The whole number; -1 for anything else, a bool included."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else -1
