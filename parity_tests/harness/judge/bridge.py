"""The bridge to JAX: enables float64 before the first array, copies arrays in, and never narrows a dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

STRICT = ("jax_ref", "parity_tests")  # packages whose references must broadcast explicitly


def start(cache: str | None = None) -> Any:
    """Import JAX for the CPU with float64, strict promotion and a compilation cache, if given; returns jax.

    A platform that the user has set in JAX_PLATFORMS or in `jax_platforms` of jax.config is kept.
    """
    import jax

    # This also works after a file of schemes has imported JAX, unless it has created an array. By default JAX takes a
    # GPU if there is one, and three quarters of its memory, which the ranks need.
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return jax


def call_reference(reference: Callable[..., Any], **arguments: Any) -> Any:
    """The reference's result: a user's reference may broadcast like `x * w + b`, this project's references may not."""
    import jax

    home = getattr(reference, "__module__", None) or type(reference).__module__
    with jax.numpy_rank_promotion("raise" if home.partition(".")[0] in STRICT else "allow"):
        return reference(**arguments)


def to_jax(name: str, array: Any) -> Any:
    """A JAX copy of a NumPy array or torch tensor, with the same dtype.

    Never shares memory: an array passed by DLPack would change under JAX when the torch tensor is written.
    """
    import jax.numpy as jnp

    if hasattr(array, "detach"):
        if str(array.dtype) == "torch.bfloat16":
            raise TypeError(f"bridge: {name!r} is torch.bfloat16, which NumPy lacks; widen it to float64 first")
        array = array.detach().contiguous().numpy()
    array = np.array(array, copy=True)
    moved = jnp.array(array, copy=True)
    return _same_dtype(name, array.dtype, moved)


def from_jax(name: str, array: Any) -> np.ndarray:
    """A writable NumPy copy of a JAX array; rejects other types, and any float narrower than float64."""
    import jax

    if not isinstance(array, jax.Array):
        raise TypeError(f"bridge: {name} is {type(array).__name__}; the reference must return JAX arrays")
    # NumPy does not count bfloat16 as floating.
    if (np.issubdtype(array.dtype, np.floating) or str(array.dtype) == "bfloat16") and array.dtype != np.float64:
        raise TypeError(
            f"bridge: {name} came out as {array.dtype} for float64 inputs; drop the cast in the reference, "
            "which states the mathematics in float64"
        )
    return np.array(array, copy=True)


def _same_dtype(name: str, dtype: Any, moved: Any) -> Any:
    if moved.dtype != dtype:
        raise TypeError(f"bridge: '{name}' went in as {dtype} and came out as {moved.dtype}; jax_enable_x64 is off")
    return moved
