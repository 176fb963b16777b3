# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Mamba2 two ways
#
# A Mamba2 mixer runs along the sequence, and the sequence is sharded over ranks. One strategy swaps tokens for heads,
# so that each rank has all tokens of its heads. The other leaves every token where it is, and sends rows and
# states across the borders. Both compute the same recurrence. The lengths decide which of them sends less. Everything
# runs on this CPU.

# %%
# %matplotlib inline
import os
from dataclasses import replace

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import torch

from jax_ref.mamba import causal_conv, scan
from shardproof import Cost, colours, rank_legend, scheme, tiles, values
from torch_impl.layouts import TokenLayout
from torch_impl.mamba import Mamba2Mixer, MambaContextParallel, MambaStatePassing, mamba_cp_bytes

SIZES = dict(num_heads=4, head_dim=2, n_groups=2, d_state=2)
TOKENS, RANKS = 16, 4

# %% [markdown]
# ## Which rank holds which tokens and heads
#
# Tokens along, heads down, one colour for each rank. DualChunkSwap gives a rank an early chunk and its mirror image.
# Hidden-parallel turns the picture by one all-to-all before the convolution and one after the gate. State passing never
# turns it. Arrows are messages across a border: a few rows for the convolution, gathered from all ranks at once,
# and one state for each head, gathered likewise.

# %%
layout = TokenLayout.dense("dual_chunk_swap", TOKENS, cp_size=RANKS, cp_rank=0)
holder = torch.empty(TOKENS, dtype=torch.long)
for rank in range(RANKS):
    holder[layout.index[rank]] = rank
heads = torch.arange(SIZES["num_heads"])
pictures = {
    "outside the mixer": holder.expand(len(heads), -1),
    "inside: hidden-parallel": (heads * RANKS // len(heads))[:, None].expand(-1, TOKENS),
    "inside: state passing": holder.expand(len(heads), -1),
}

figure, axes = plt.subplots(1, 3, figsize=(10.5, 2.4), sharey=True, layout="constrained")
for ax, (title, owner) in zip(axes, pictures.items(), strict=True):
    tiles(ax, owner, RANKS, title=title, xlabel="token")
axes[0].set_ylabel("head")
rank_legend(figure, RANKS)
ARROW = {"arrowstyle": "->", "linewidth": 1.4}
for border in range(2, TOKENS, 2):
    if holder[border] != holder[border - 1]:
        for head in heads.tolist():
            axes[2].annotate("", (border + 0.3, head), (border - 1.3, head), arrowprops=ARROW)
plt.show()

# %% [markdown]
# ## One mathematics
#
# The reference is the recurrence itself, token by token, on one device:
#
#     x|B|C = silu(conv(x|B|C));  S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T
#     y[t] = (S[t] C[t] + D x[t]) silu(z[t])
#
# It stands between the projections, and takes the outputs of in_proj: z, x, B, C and dt.


# %%
def reference(projected, conv_weight, dt_bias, A_log, D):
    h, p, g, n = SIZES.values()
    ends = [h * p, 2 * h * p + 2 * g * n]
    z, xBC, dt = jnp.split(projected, ends, axis=-1)
    x, B, C = jnp.split(causal_conv(xBC, conv_weight.T), [h * p, h * p + g * n], axis=-1)
    rows = projected.shape[:2]
    x, B, C = x.reshape(*rows, h, p), B.reshape(*rows, g, n), C.reshape(*rows, g, n)
    y, _ = scan(x, jax.nn.softplus(dt + dt_bias[None, None]), -jnp.exp(A_log), B, C, D)
    return y.reshape(z.shape) * jax.nn.silu(z)


# %% [markdown]
# A strategy needs a mixer for its parameters only. One scheme, with the strategy as an option, compares both with the
# reference: outputs, the gradient of the input and of every parameter. Parameters are replicated (`cp=R`), so
# their gradients add up over ranks. Messages are declared too, and counted.

# %%
STRATEGIES = {"hidden-parallel": MambaContextParallel, "state passing": MambaStatePassing}


def mixer_with(conv_weight, dt_bias, A_log, D):
    mixer = Mamba2Mixer(1, **SIZES, conv_bias=False, chunk_size=4, device="meta")
    for name, parameter in {"dt_bias": dt_bias, "A_log": A_log, "D": D}.items():
        delattr(mixer, name)
        setattr(mixer, name, parameter)
    del mixer.conv1d.weight
    mixer.conv1d.weight = conv_weight[:, None]
    return mixer


def cost(c):
    heads, inner, channels = c.h, c.i, c.c
    if c.strategy == "hidden-parallel":
        columns = 3 * inner + 2 * max(SIZES["n_groups"], c.cp) * SIZES["d_state"] + heads
        moved = {"all_to_all": (2, c.b * c.s * columns // c.cp * c.itemsize)} if c.cp > 1 else {}
        return Cost(forward=moved, backward=moved)
    wide, segments = max(c.itemsize, 4), 2 * c.b
    halo, states = segments * (c.k - 1) * channels, segments * (inner * SIZES["d_state"] + heads)
    return Cost(
        forward={"all_gather": (2, halo * c.itemsize + states * wide)},
        backward={"reduce_scatter": (2, c.cp * (halo + states) * wide)},
    )


SPEC = {"conv_weight": "c k cp=R", "dt_bias": "h cp=R", "A_log": "h cp=R", "D": "h cp=R"}
DECLARED = dict(
    reference=reference,
    mesh={"cp": (1, 2, 4)},
    inputs={"projected": "b s/cp:dual_chunk_swap w", **SPEC},
    outputs="b s/cp:dual_chunk_swap i",
    dims={"b": (1,), "s": (16,), "w": (28,), "c": (16,), "k": (4,), "h": (4,), "i": (8,)},
    draw=dict.fromkeys(("projected", *SPEC), values("normal")),
    rank_options={"strategy": ("hidden-parallel", "state passing")},
    reduction=("s",),
    roundings=8,
    cost=cost,
)


@scheme(**DECLARED)
def mixed(mesh, projected, conv_weight, dt_bias, A_log, D, strategy):
    mixer = mixer_with(conv_weight, dt_bias, A_log, D)
    return STRATEGIES[strategy](mesh["cp"], **SIZES, mixer=mixer).mix(projected)


print(mixed.verify(examples=12))

# %% [markdown]
# ## Two mistakes
#
# The convolution looks back three tokens, so each segment needs the three rows before it, wherever they live. Leave
# them out: every message is the same, and shapes fit.


# %%
class WithoutHalo(MambaStatePassing):
    def _mix_rows(self, rows, parameters, segments):
        zeros = torch.full_like(segments.halo.before, self.cp_size * len(segments.halo.sent))
        return super()._mix_rows(rows, parameters, replace(segments, halo=replace(segments.halo, before=zeros)))


STRATEGIES["without halo"] = WithoutHalo
mistaken = {**DECLARED, "rank_options": {"strategy": ("state passing", "without halo")}}


@scheme(**mistaken)
def mixed_without_halo(mesh, projected, conv_weight, dt_bias, A_log, D, strategy):
    mixer = mixer_with(conv_weight, dt_bias, A_log, D)
    return STRATEGIES[strategy](mesh["cp"], **SIZES, mixer=mixer).mix(projected)


broken = mixed_without_halo.verify(cp=2, strategy="without halo", dtype="float32", examples=1)
assert not broken.ok
display(broken)

# %% [markdown]
# Everything after the first border is wrong, and nothing before it: the convolution's error is in every later state.

# %%
out = broken.tensors[0]
figure, panel = plt.subplots(figsize=(7.5, 2.2), layout="constrained")
owners = out.owners["cp"][0, :, 0]
panel.bar(range(TOKENS), abs(out.got - out.want).max((0, 2)), color=[colours.of_rank(rank) for rank in owners])
panel.set(xlabel="token", ylabel="largest error of the output", xticks=range(0, TOKENS, 2))
rank_legend(figure, 2)
plt.show()

# %% [markdown]
# And the mistake of whoever calls it: the batch was sharded by DualChunkSwap, and the strategy is called as if it was
# sharded into blocks. The recurrence then runs through the tokens in another order.


# %%
@scheme(**{**DECLARED, "rank_options": {"strategy": ("hidden-parallel", "state passing"), "order": ("contiguous",)}})
def mixed_in_another_order(mesh, projected, conv_weight, dt_bias, A_log, D, strategy, order):
    mixer = mixer_with(conv_weight, dt_bias, A_log, D)
    return STRATEGIES[strategy](mesh["cp"], **SIZES, mixer=mixer, layout=order).mix(projected)


mixed_in_another_order.verify(cp=2, strategy="hidden-parallel", order="contiguous", dtype="float32", examples=1)

# %% [markdown]
# ## What each sends
#
# Bytes that one of 8 ranks sends forward in a layer of a large model, over the length of the sequence. Hidden-parallel
# sends every token, state passing a state for each segment: one where rows are sharded into blocks, two under
# DualChunkSwap, two for each sequence of a packed stream. Where lines cross, the other becomes the cheaper.

# %%
LARGE = dict(num_heads=128, head_dim=64, n_groups=8, d_state=128, d_conv=4, element_size=2)
LENGTHS = [2**k for k in range(10, 21)]
SEGMENTS = {"blocks": 1, "DualChunkSwap": 2, "12 packed sequences": 24}


def sent(tokens, segments=2):
    return mamba_cp_bytes(tokens=tokens, cp_size=8, segments=segments, **LARGE)


figure, panel = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
mebibytes = [sent(s).hidden_parallel / 2**20 for s in LENGTHS]
panel.plot(LENGTHS, mebibytes, **colours.line(0), label="hidden-parallel")
for number, (name, segments) in enumerate(SEGMENTS.items(), 1):
    cost_of = [sent(s, segments) for s in LENGTHS]
    style = {**colours.line(number), "marker": ""}
    panel.plot(LENGTHS, [c.state_passing / 2**20 for c in cost_of], **style, label=f"states: {name}")
    crossing = 8 * cost_of[0].crossover_tokens
    panel.plot(crossing, sent(crossing // 8 * 8).hidden_parallel / 2**20, **{**colours.line(number), "markersize": 8})
panel.set(xscale="log", yscale="log", xlabel="tokens of the full sequence", ylabel="MiB sent by a rank, forward")
panel.set_xscale("log", base=2)
panel.legend(fontsize=9)
plt.show()

# %%
print(f"{'tokens':>8}  " + "".join(f"{name:22}" for name in SEGMENTS))
for tokens in LENGTHS[::2]:
    print(f"{tokens:8}  " + "".join(f"{sent(tokens, segments).cheaper:22}" for segments in SEGMENTS.values()))

# %% [markdown]
# Heads that ranks cannot share leave one way:

# %%
print(mamba_cp_bytes(tokens=12000, cp_size=6, **{**LARGE, "num_heads": 64}))

# %% [markdown]
# ## Your turn
#
# 1. Each rank computes the final state of its own tokens from a state of zero, before it knows the tokens before them.
#    How do two such states give the state after both halves? Which number has to travel beside them?
# 2. Declare `D` as `h cp=I`: each rank then promises the full gradient. What does the report say at `cp=1` and at
#    `cp=2`?
#
# The next cell has the answers.

# %%
generator = torch.Generator().manual_seed(0)
x, dt, A, B, C, D = (
    jnp.asarray(torch.randn(shape, generator=generator).numpy())
    for shape in ((1, 16, 4, 2), (1, 16, 4), (4,), (1, 16, 2, 2), (1, 16, 2, 2), (4,))
)
dt, A = jax.nn.softplus(dt), -jnp.exp(A)
(_, early), (_, late), (_, both) = (
    scan(x[:, rows], dt[:, rows], A, B[:, rows], C[:, rows], D) for rows in (slice(8), slice(8, 16), slice(16))
)
decay = jnp.exp((dt[:, 8:] * A[None, None]).sum(1))[..., None, None]  # of the second half: one number for each head
assert jnp.allclose(late + decay * early, both, atol=1e-5)
print(f"1. late + decay * early: {late.size} numbers of a state and {decay.size} decays travel, for any length")
promised = scheme(**{**DECLARED, "inputs": {**DECLARED["inputs"], "D": "h cp=I"}})(mixed.fn)
for cp in (1, 2):
    report = promised.verify(cp=cp, strategy="state passing", dtype="float32", examples=1)
    print(f"2. cp={cp}:", report.notes.get("d/d D", ["equal"])[0])
