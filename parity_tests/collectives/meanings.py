"""The references of this folder's schemes: each collective as a function of full arrays, in JAX.

Most are the identity: a collective moves shards or adds up addends, and the full array stays the same.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def identity(x: Float[Array, "*a"]) -> Float[Array, "*a"]:
    """x."""
    return x


def identity_beside(x: Float[Array, "*a"], beside: Int[Array, " b"]) -> Float[Array, "*a"]:
    """x; `beside` gives the ranks the length of a dim."""
    return x


def first_row_of_shard(x: Float[Array, "n a"], src: int, mesh: dict[str, int]) -> Float[Array, "1 a"]:
    """The first row of rank src's shard, src counted around the ring."""
    first = src % mesh["tp"] * (len(x) // mesh["tp"])
    return x[first : first + 1]


def rolled(x: Float[Array, "n a"], shift: int) -> Float[Array, "n a"]:
    """Row i is row i - shift of x, around the ring."""
    return jnp.roll(x, shift, axis=0)


def rolled_by_shards(x: Float[Array, "n a"], shift: int | None, mesh: dict[str, int]) -> Float[Array, "n a"]:
    """Each rank gets the shard of the rank `shift` places before it."""
    return jnp.roll(x, (1 if shift is None else shift) * (len(x) // mesh["tp"]), axis=0)


def both_rolled_by_shards(
    x: Float[Array, "n a"], ids: Int[Array, " n"], shift: int | None, mesh: dict[str, int]
) -> tuple[Float[Array, "n a"], Int[Array, " n"]]:
    """Each rank gets both shards of the rank `shift` places before it."""
    return rolled_by_shards(x, shift, mesh), jnp.roll(ids, (1 if shift is None else shift) * (len(ids) // mesh["tp"]))


def column_maximum(x: Float[Array, "n a"]) -> Float[Array, " a"]:
    """max_i x_ia."""
    return x.max(0)


def numbered(x: Float[Array, "s d"]) -> Float[Array, "s d"]:
    """Row i of x, times i."""
    return x * jnp.arange(x.shape[0], dtype=x.dtype)[:, None]


def numbered_beside(x: Float[Array, "s d"], offsets: Int[Array, " n"]) -> Float[Array, "s d"]:
    """Row i of x, times i; `offsets` gives the ranks the offsets of sequences."""
    return numbered(x)


def identity_of_sequences(x: Float[Array, "s d"], offsets: Int[Array, " n"]) -> Float[Array, "s d"]:
    """x."""
    return x


def stacked_copies(x: Float[Array, "a b"], mesh: dict[str, int]) -> Float[Array, "copies b"]:
    """x once for each rank, one after another."""
    return jnp.concatenate([x] * mesh["tp"])


def times_ranks(x: Float[Array, "a b"], mesh: dict[str, int]) -> Float[Array, "a b"]:
    """The sum of the ranks' equal tensors."""
    return x * mesh["tp"]


def sum_of_rows(x: Float[Array, "w b"]) -> Float[Array, "1 b"]:
    """The sum of the ranks' rows."""
    return x.sum(0, keepdims=True)


# What the ranks and the layouts of these schemes know of unequal shards.
