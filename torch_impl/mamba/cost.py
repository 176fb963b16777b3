"""Compare the bytes sent by the two context-parallel strategies of a Mamba2 mixer, to choose the cheaper one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_impl.contract import PositiveInt, Rejected, contract
from torch_impl.mamba.mix import mixer_sizes


@dataclass(frozen=True)
class MambaCost:
    """Bytes that a rank sends per layer in forward; backward sends as many if sums run in the dtype of the inputs.

    `hidden_parallel` is None if ranks cannot share the heads or the groups. Above `crossover_tokens` local tokens state
    passing is `cheaper`; this is 0 if it is the only strategy, and None for one rank, which sends nothing.
    """

    hidden_parallel: int | None
    state_passing: int
    cheaper: Literal["hidden_parallel", "state_passing"]
    crossover_tokens: int | None


@contract
def mamba_cp_bytes(
    *,
    tokens: PositiveInt,
    cp_size: PositiveInt,
    num_heads: PositiveInt,
    head_dim: PositiveInt,
    n_groups: PositiveInt,
    d_state: PositiveInt,
    d_conv: PositiveInt,
    element_size: PositiveInt,
    segments: PositiveInt = 2,
) -> MambaCost:
    """The bytes that each strategy sends for `tokens` tokens over cp_size ranks, all rows of the batch together.

        hidden-parallel  tokens * e * (n - 1) / n^2 * (3 H P + 2 max(G, n) N + H),  e = element_size
        state passing    (n - 1) * segments * ((K - 1) (H P + 2 G N) e + H (P N + 1) max(e, 4))

    `element_size` is in bytes. `segments` is the number of states that a rank sends: 1 per contiguous row or stream, 2
    per row under dual_chunk_swap, 2 per sequence of a packed stream under dual_chunk_swap. The first cost grows with
    the tokens and the second with the sequences, so many short sequences favour hidden-parallel. At equal cost
    hidden-parallel counts as cheaper.

    >>> sizes = dict(num_heads=128, head_dim=64, n_groups=8, d_state=128, d_conv=4, element_size=2)
    >>> mamba_cp_bytes(tokens=131072, cp_size=8, **sizes)
    MambaCost(hidden_parallel=767033344, state_passing=59587584, cheaper='state_passing', crossover_tokens=1272)

    Errors: TypeError for a size that is not an integer; ValueError for sizes below 1, tokens that cp_size does not
            divide, num_heads that n_groups does not divide.
    """
    sizes = mixer_sizes(num_heads, head_dim, n_groups, d_state)
    if tokens % cp_size:
        raise Rejected(f"tokens={tokens} must be divisible by cp_size={cp_size}; pad them")
    # A segment passes on the last taps of x|B|C, and per head its state and log decay, in float32 or wider.
    state = num_heads * (head_dim * d_state + 1) * max(element_size, 4)
    segment = (d_conv - 1) * sizes.channels * element_size + state
    state_passing = (cp_size - 1) * segments * segment
    if sizes.indivisible(cp_size):
        return MambaCost(None, state_passing, "state_passing", 0)
    # z, x and the output, B and C, dt; fewer groups than ranks are copied until each rank has one.
    columns = 3 * sizes.inner + 2 * max(n_groups, cp_size) * d_state + num_heads
    hidden_parallel = tokens // cp_size * element_size * (cp_size - 1) * columns // cp_size
    # The crossover is the number of local tokens at which the two formulas above are equal.
    return MambaCost(
        hidden_parallel,
        state_passing,
        "state_passing" if state_passing < hidden_parallel else "hidden_parallel",
        cp_size * segments * segment // (element_size * columns) if cp_size > 1 else None,
    )
