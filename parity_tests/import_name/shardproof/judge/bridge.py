"""The bridge to JAX: enables float64 before the first array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STRICT = ("jax_ref", "parity_tests", "shardproof")  # packages whose references must broadcast explicitly


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
