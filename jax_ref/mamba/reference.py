"""The Mamba2 mixer on one device: a projection, a short convolution, the recurrence, a gated norm, a projection."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int


def causal_conv(
    x: Float[Array, "b s c"],
    weight: Float[Array, "k c"],
    bias: Float[Array, " c"] | None = None,
    first: Bool[Array, " s"] | None = None,
) -> Float[Array, "b s c"]:
    """silu(bias + sum over j < k of weight[k - 1 - j] * x[t - j]), over positions t - j in the same sequence as t.

    `first` marks the first token of each sequence; without it there is one sequence.
    """
    width, size = weight.shape[0], x.shape[1]
    # The sequence index of each token: taps count only within a sequence.
    sequence = jnp.zeros(size, jnp.int64) if first is None else jnp.cumsum(first)
    total = jnp.zeros_like(x)
    # One tap at a time: the input `back` tokens earlier, with zeros before the start.
    for back in range(min(width, size)):
        shifted = jnp.concatenate([jnp.zeros_like(x[:, :back]), x[:, : size - back]], axis=1)
        before = jnp.concatenate([jnp.full(back, -1), sequence[: size - back]])
        is_same = (before == sequence)[None, :, None]
        total = total + jnp.where(is_same, shifted, 0.0) * weight[width - 1 - back][None, None, :]
    return jax.nn.silu(total if bias is None else total + bias[None, None, :])


def scan(
    x: Float[Array, "b s h p"],
    dt: Float[Array, "b s h"],
    A: Float[Array, " h"],
    B: Float[Array, "b s g n"],
    C: Float[Array, "b s g n"],
    D: Float[Array, "h *e"],
    first: Bool[Array, " s"] | None = None,
    initial_states: Float[Array, "b h p n"] | None = None,
) -> tuple[Float[Array, "b s h p"], Float[Array, "b h p n"]]:
    """y[t] = S[t] C[t] + D x[t] and the last S;  S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T.

    Head i reads group i * g // h. D has a number per head, or one per channel. Before token 0, S is `initial_states`;
    before any later token in `first`, S is 0.

    Source: arXiv 2405.21060.
    """
    b, s, h, p = x.shape
    groups, n = B.shape[2:]
    skips = D.reshape(h, -1)
    group = jnp.arange(h) * groups // h
    state = jnp.zeros((b, h, p, n), x.dtype) if initial_states is None else initial_states
    # Token 0 is the first of a sequence, but starts from `initial_states`, not from 0.
    again = jnp.zeros(s, bool) if first is None else first.at[0].set(False) if s else first

    # The recurrence token by token, as the paper defines it; production computes it in chunks.
    def step(state, token):
        x, dt, B, C, again = token
        decay = jnp.exp(dt * A[None, :])
        decayed = jnp.where(again, jnp.zeros_like(state), state) * decay[:, :, None, None]
        state = decayed + jnp.einsum("bh,bhp,bhn->bhpn", dt, x, B[:, group])
        return state, jnp.einsum("bhpn,bhn->bhp", state, C[:, group]) + skips[None] * x

    tokens = [jnp.moveaxis(each, 1, 0) for each in (x, dt, B, C)]
    final, y = jax.lax.scan(step, state, (*tokens, again))
    return jnp.moveaxis(y, 0, 1), final


class GatedNorm(nnx.Module):
    """RMS norm of y * silu(z) over each of `groups` equal parts, times a weight."""

    def __init__(self, width: int, groups: int, eps: float):
        self.groups, self.eps = groups, eps
        self.weight = nnx.Param(jnp.ones(width))

    def __call__(self, y: Float[Array, "b s i"], z: Float[Array, "b s i"]) -> Float[Array, "b s i"]:
        gated = y * jax.nn.silu(z)
        # Gate first, then normalise: the order of Mamba2's RMSNormGated with norm_before_gate=False.
        parts = gated.reshape(*gated.shape[:-1], self.groups, gated.shape[-1] // self.groups)
        mean_square = jnp.mean(parts**2, axis=-1, keepdims=True)
        return (parts / jnp.sqrt(mean_square + self.eps)).reshape(gated.shape) * self.weight[...][None, None, :]


class Conv(nnx.Module):
    """The weights of a depthwise convolution."""

    def __init__(self, width: int, channels: int, use_bias: bool):
        self.kernel = nnx.Param(jnp.zeros((width, channels)))
        self.bias = nnx.Param(jnp.zeros(channels)) if use_bias else None


class Mamba2(nnx.Module):
    """z|x|B|C|dt = in_proj(u);  x|B|C = conv;  dt = softplus(dt + dt_bias);  y = scan;  out = out_proj(norm(y, z)).

    Source: arXiv 2405.21060.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        head_dim: int,
        n_groups: int,
        d_state: int,
        d_conv: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: float = 1e-5,
        norm_groups: int | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        rngs: nnx.Rngs,
    ):
        inner, shared = num_heads * head_dim, n_groups * d_state
        self.sizes, self.dt_limit = (num_heads, head_dim, n_groups, d_state), dt_limit
        self.in_proj = nnx.Linear(d_model, 2 * inner + 2 * shared + num_heads, use_bias=bias, rngs=rngs)
        self.conv1d = Conv(d_conv, inner + 2 * shared, conv_bias)
        self.dt_bias = nnx.Param(jnp.zeros(num_heads))
        self.A_log = nnx.Param(jnp.zeros(num_heads))
        self.D = nnx.Param(jnp.ones(num_heads))
        self.norm = GatedNorm(inner, n_groups if norm_groups is None else norm_groups, norm_eps)
        self.out_proj = nnx.Linear(inner, d_model, use_bias=bias, rngs=rngs)

    def __call__(self, u: Float[Array, "b s d"], cu_seqlens: Int[Array, " q"] | None = None) -> Float[Array, "b s d"]:
        """`cu_seqlens` are the offsets of the sequences in one row of u."""
        h, p, g, n = self.sizes
        # Columns have the checkpoint's order: z, x, B, C, dt.
        z, x, B, C, dt = jnp.split(self.in_proj(u), _ends(h * p, h * p, g * n, g * n), axis=-1)
        first = None if cu_seqlens is None else jnp.zeros(u.shape[1], bool).at[cu_seqlens[:-1]].set(True, mode="drop")
        bias = None if self.conv1d.bias is None else self.conv1d.bias[...]
        mixed = causal_conv(jnp.concatenate([x, B, C], -1), self.conv1d.kernel[...], bias, first)
        x, B, C = jnp.split(mixed, _ends(h * p, g * n), axis=-1)
        dt = jnp.clip(jax.nn.softplus(dt + self.dt_bias[...][None, None, :]), *self.dt_limit)
        B, C = (each.reshape(*each.shape[:2], g, n) for each in (B, C))
        heads = x.reshape(*x.shape[:2], h, p)
        y, _ = scan(heads, dt, -jnp.exp(self.A_log[...]), B, C, self.D[...], first)
        return self.out_proj(self.norm(y.reshape(x.shape), z))


def _ends(*sizes: int) -> list[int]:
    return [sum(sizes[: i + 1]) for i in range(len(sizes))]
