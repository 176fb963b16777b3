"""Where kernels run in this process: on CUDA, or on a CPU in Triton's interpreter, which is chosen by
TRITON_INTERPRET=1 before triton is first imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from torch_impl.kernels.softmax import _statistics

INTERPRETED = not isinstance(_statistics, triton.JITFunction)
DEVICE = "cpu" if INTERPRETED else "cuda"
REASON = "not run: needs CUDA, or TRITON_INTERPRET=1 before triton is first imported"


def is_here() -> bool:
    return INTERPRETED or torch.cuda.is_available()


def round_as_a_gpu_does() -> None:
    """The interpreter cuts float32 off to bfloat16 where a GPU rounds to the nearest; let it round."""
    from triton.runtime import interpreter

    cut_off: Any = interpreter._convert_float
    if cut_off.__module__ != interpreter.__name__:  # it does already
        return

    def rounded(x: np.ndarray, of: Any, to: Any, mode: Any) -> np.ndarray:
        if (of, to) != (tl.float32, tl.bfloat16):
            return cut_off(x, of, to, mode)
        narrow = torch.from_numpy(np.ascontiguousarray(x)).bfloat16()
        return narrow.view(torch.uint16).numpy().reshape(x.shape)

    interpreter._convert_float = rounded


def replace_the_language_once() -> None:
    """The interpreter puts its own functions into Triton's language at every call, also when one kernel function calls
    another. Each time it looks through all names of the language: half of a small kernel's time. Once is enough in
    a process that compiles nothing, where they can stay.
    """
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] = interpreter._patch_lang
    if replace.__module__ != interpreter.__name__:  # it is done once already
        return

    class Kept:
        def restore(self) -> None: ...

    @functools.cache
    def once(function: Any) -> Kept:
        replace(function)
        return Kept()

    interpreter._patch_lang = once


def derive_types_once() -> None:
    """The interpreter derives the type of every intermediate anew, and NumPy's types by a table of all: a quarter of
    a small kernel's time. They are few, and a name tells one from another.
    """
    from triton.runtime import interpreter

    if interpreter._get_np_dtype.__module__ != interpreter.__name__:  # they are derived once already
        return

    def once_by_name(derive: Callable[..., Any]) -> Callable[..., Any]:
        results: dict[tuple[str, ...], Any] = {}

        def derived(*types: Any) -> Any:
            names = tuple(each.name for each in types)
            if names not in results:
                results[names] = derive(*types)
            return results[names]

        return derived

    interpreter._get_np_dtype = once_by_name(interpreter._get_np_dtype)
    tl.block_type.with_element_ty = once_by_name(tl.block_type.with_element_ty)


if INTERPRETED:
    round_as_a_gpu_does()
    replace_the_language_once()
    derive_types_once()
