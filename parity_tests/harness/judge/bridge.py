"""The bridge to JAX: float64 switched on before the first array, own copies in, no dtype narrowed either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

STRICT = ("jax_ref", "parity_tests")  # packages whose references broadcast nothing unseen


def start(cache: str | None = None) -> Any:
    """Import JAX for the CPU with float64, strict promotion and a compilation cache, if given; returns jax.

    A platform that the user has named, by JAX_PLATFORMS or by `jax_platforms` of jax.config, stays.
    """
    import jax

    # Also where a file of schemes has imported JAX before, unless it has made an array. JAX's default takes a GPU if it
    # can use one, and three quarters of the GPU's memory, which the ranks need.
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
    """What a reference returns: a user's may broadcast as JAX does, `x * w + b`, one of this project's may not."""
    import jax

    home = getattr(reference, "__module__", None) or type(reference).__module__
    with jax.numpy_rank_promotion("raise" if home.partition(".")[0] in STRICT else "allow"):
        return reference(**arguments)


def to_jax(name: str, array: Any) -> Any:
    """JAX's own copy of a NumPy array or torch tensor, of the same dtype.

    Nothing is shared: memory passed by DLPack would change under JAX when the torch tensor is written.
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
    """A writable NumPy copy of a JAX array; rejects what is none, and any float narrower than float64."""
    import jax

    if not isinstance(array, jax.Array):
        raise TypeError(f"bridge: {name} is {type(array).__name__}; the reference must return JAX arrays")
    # bfloat16 is no floating dtype to NumPy.
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
