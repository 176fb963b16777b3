"""The bridge to JAX: float64 is switched on before the first array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
