"""The columns of a Mamba2 projection that each of several ranks holds, by cutting z, x, B, C and dt apart."""

import numpy as np


def projection_columns(num_heads: int, head_dim: int, n_groups: int, d_state: int, world: int) -> list[np.ndarray]:
    """Rank r holds the columns of its heads in z, x and dt, and in B and C those of the groups that they read.

    >>> projection_columns(4, 1, 2, 1, 4)[3]
    array([ 3,  7,  9, 11, 15])
    """
    inner, shared = num_heads * head_dim, n_groups * d_state
    whole = np.arange(2 * inner + 2 * shared + num_heads, dtype=np.int64)
    z, x, b, c, dt = np.split(whole, np.cumsum([inner, inner, shared, shared]))
    return _held(num_heads, n_groups, world, heads=(z, x), groups=(b, c), last=(dt,))


def conv_channels(num_heads: int, head_dim: int, n_groups: int, d_state: int, world: int) -> list[np.ndarray]:
    """The same of the channels x, B and C of the convolution.

    >>> conv_channels(4, 1, 2, 1, 4)[1]
    array([1, 4, 6])
    """
    inner, shared = num_heads * head_dim, n_groups * d_state
    x, b, c = np.split(np.arange(inner + 2 * shared, dtype=np.int64), np.cumsum([inner, shared]))
    return _held(num_heads, n_groups, world, heads=(x,), groups=(b, c), last=())


def _held(num_heads: int, n_groups: int, world: int, *, heads, groups, last) -> list[np.ndarray]:
    """One rank after another: which heads it has, which groups these read, and the blocks of both."""
    ranks = []
    for own in np.split(np.arange(num_heads), world):
        read = np.unique(own // (num_heads // n_groups))
        parts = [part.reshape(num_heads, -1)[own] for part in heads]
        parts += [part.reshape(n_groups, -1)[read] for part in groups]
        parts += [part.reshape(num_heads, -1)[own] for part in last]
        ranks.append(np.concatenate([part.ravel() for part in parts]))
    return ranks
