"""The JAX reference of a small model's training, traced once for each configuration and shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from jax_ref.parallelizer import DecoderTraits, Step, Trained, step, train
from parity_tests.parallelizer.families import Chosen, arrays
from parity_tests.parallelizer.training import ADAMW
from shardproof.judge import bridge
from shardproof.judge.reference import evaluated


def reference(chosen: Chosen, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> Trained:
    """Steps on full batches, and the weights after them."""
    bridge.start()
    return train(chosen.config, arrays(chosen), batches, **ADAMW, compiled=_evaluated)


def _evaluated(traits: DecoderTraits, *arguments: Any) -> Step:
    return _of_traits(traits)(*arguments)


@cache
def _of_traits(traits: DecoderTraits) -> Callable[..., Step]:
    return evaluated(partial(step, traits))
