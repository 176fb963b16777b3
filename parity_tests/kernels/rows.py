"""Rows of logits that a kernel must get right: masked, tied, far apart, several blocks wide, of any strides."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KINDS = ("normal", "masked borders", "masked rows", "ties", "far apart", "one column")
ON_ANOTHER_RANK, OUT_OF_VOCABULARY = -1, -2


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, 3]))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(generator(seed).standard_normal(shape))


def logits(kind: str, dtype: torch.dtype, device: str, n: int = 4, v: int = 10) -> Tensor:
    z = 3.0 * normal(n, 1 if kind == "one column" else v)
    if kind == "masked borders":
        z[:, [0, 3, 4, -1]] = -math.inf
        z[1, 4:] = -math.inf
        z[2, :8] = -math.inf
    elif kind == "masked rows":
        z[::2] = -math.inf
    elif kind == "ties":
        z = z.round().clamp(-1, 1)
    elif kind == "far apart":
        z = z * 1e4
    return z.to(device, dtype)


def columns(z: Tensor, k: int) -> Tensor:
    """k columns for each row: some twice, some on another rank, and in one row all outside the vocabulary."""
    ids = generator(k).integers(OUT_OF_VOCABULARY, z.shape[-1], (len(z), k))
    ids[3] = OUT_OF_VOCABULARY
    return torch.from_numpy(ids).to(z.device, torch.int32)


def are_equal(x: Tensor, y: Tensor) -> bool:
    """Equal shapes and numbers, infinities included; NaN equals NaN."""
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


STRIDES = {
    "transposed": lambda z: z.T.contiguous().T,
    "every other column": lambda z: torch.stack([z, -z], -1).flatten(1)[:, ::2],
    "every other row": lambda z: torch.stack([z, -z], 1).flatten(0, 1)[::2],
    "part of a row": lambda z: torch.cat([z, z], 1)[:, : z.shape[1]],
}
