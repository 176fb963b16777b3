"""The JAX reference of a small model's training, compiled once for each configuration and shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from jax_ref.parallelizer import Trained, step, train
from parity_tests.harness.judge import bridge
from parity_tests.harness.judge.reference import compiler_options
from parity_tests.parallelizer.families import Chosen, arrays
from parity_tests.parallelizer.training import ADAMW


def reference(chosen: Chosen, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> Trained:
    """Steps on full batches, and the weights after them."""
    return train(chosen.config, arrays(chosen), batches, **ADAMW, compiled=_compiled())


@cache
def _compiled() -> Any:
    return bridge.start().jit(step, static_argnums=0, compiler_options=compiler_options())
