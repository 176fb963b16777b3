"""The bridge to JAX: enables float64 before the first array."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

STRICT = ("jax_ref", "parity_tests", "shardproof")  # references of these packages must broadcast explicitly


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
        jax.config.update("jax_compilation_cache_dir", os.path.abspath(cache))  # the working folder may change
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return jax


def call_reference(reference: Callable[..., Any], **arguments: Any) -> Any:
    """The reference's result: a user's reference may broadcast like `x * w + b`, this project's references may not."""
    import jax

    with jax.numpy_rank_promotion("raise" if _is_strict(reference) else "allow"):
        return reference(**arguments)


def traced(reference: Callable[..., Any], function: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, Any]:
    """The jaxpr of a function that calls the reference, and the shapes of its results.

    In a user's reference integers and booleans become floats as in JAX; floats of two widths are not mixed. Errors:
    TypePromotionError where they are.
    """
    import jax

    trace = jax.make_jaxpr(function, return_shape=True)
    try:
        return trace(*arrays)
    except jax.dtypes.TypePromotionError:
        if _is_strict(reference):
            raise
        with jax.numpy_dtype_promotion("standard"):
            closed, shapes = trace(*arrays)
        if _has_narrow_floats(closed.jaxpr):
            raise
        return closed, shapes


def equations(jaxpr: Any) -> Iterator[Any]:
    """The operations of a traced program, and of the programs that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        yield from inner_equations(equation)


def inner_equations(equation: Any) -> Iterator[Any]:
    """The operations of the programs that one operation calls, such as the body of a loop."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            program = getattr(each, "jaxpr", each)
            if hasattr(program, "eqns"):
                yield from equations(program)


def raised_inside_jax(error: BaseException) -> str | None:
    """The function of JAX whose own lines raised, as `dot_product_attention`; None for an operation of `jax.numpy`."""
    import jax

    home = str(Path(jax.__file__).parent)
    called: FrameType | None = None  # by the last line outside JAX
    for frame, _ in traceback.walk_tb(error.__traceback__):
        is_of_jax = frame.f_code.co_filename.startswith(home)
        called = (called or frame) if is_of_jax else None
    if called is None or Path(called.f_code.co_filename).parent.name == "numpy":
        return None
    return called.f_code.co_name


def _is_strict(reference: Callable[..., Any]) -> bool:
    home = getattr(reference, "__module__", None) or type(reference).__module__
    return home.partition(".")[0] in STRICT


def _has_narrow_floats(jaxpr: Any) -> bool:
    """Whether a number is narrower than float64 somewhere in a program, or in one that it calls."""
    import jax.numpy as jnp

    dtypes = (getattr(out.aval, "dtype", None) for equation in equations(jaxpr) for out in equation.outvars)
    return any(each is not None and jnp.issubdtype(each, jnp.floating) and each != jnp.float64 for each in dtypes)
