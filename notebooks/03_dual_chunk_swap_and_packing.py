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
# # DualChunkSwap and packing
#
# Why a sequence is sharded into mirrored pairs of chunks, how several sequences of unlike lengths share one stream,
# what padding costs, and where "the next token" lives once a stream is sharded. Everything runs on this CPU.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch

from shardproof import colours, layout_figure, offsets, rank_legend, scheme, tiles, values, verify_case
from torch_impl.layouts import TokenLayout

# %% [markdown]
# ## Half of the square
#
# Under a causal mask a query sees the keys up to its own place. Shard the queries over four ranks and colour each
# pair of query and key by the rank that computes it. The title says what the busiest rank has to do, as a share of
# the total; a quarter is the best there is.

# %%
KINDS = ("contiguous", "striped", "dual_chunk_swap")
S, CP = 32, 4


def holders(kind, length, world):
    """The rank that holds each position."""
    index = TokenLayout.dense(kind, length, cp_size=world, cp_rank=0).index
    return torch.arange(world).repeat_interleave(length // world)[index.flatten().argsort()]


def squares(cp):
    """The three layouts on so many ranks, with what the busiest rank has to do."""
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True, layout="constrained")
    for panel, kind in zip(panels, KINDS, strict=True):
        pairs = torch.where(torch.ones(S, S).tril() > 0, holders(kind, S, cp)[:, None], -1)
        busiest = max((pairs == rank).sum().item() for rank in range(cp)) / (pairs >= 0).sum().item()
        tiles(panel, pairs, cp, title=f"{kind}\nbusiest rank {busiest:.1%}", xlabel="key (position)")
    panels[0].set_ylabel("query (position)")
    rank_legend(figure, cp)
    plt.show()


squares(CP)

# %% [markdown]
# With a slider, on one rank to eight. The next cell needs a running Jupyter and ipywidgets, which the extra `notebooks`
# brings. Elsewhere it shows nothing, and the figure above stands for it.

# %% tags=["skip-execution"]
from ipywidgets import SelectionSlider, interact

slider = SelectionSlider(options=(1, 2, 4, 8), value=CP, description="cp")
interact(squares, cp=slider)
# %% [markdown]
# Striping is as fair once rows are long. What DualChunkSwap has beside it: a rank holds two *runs* of neighbours,
# so that attention works on full blocks, and a convolution or a recurrence crosses few borders.
#
# ## How the chunks are paired
#
# With `n` ranks there are `2 n` chunks; rank `r` has chunks `r` and `2 n - 1 - r`. A reshape and a flip say it all.

# %%
chunks = torch.arange(16).view(2 * CP, -1)
for rank in range(CP):
    index = TokenLayout.dense("dual_chunk_swap", 16, cp_size=CP, cp_rank=rank).local_index
    print(f"rank {rank}: chunks {rank} and {2 * CP - 1 - rank}  ->  positions {index.tolist()}")
    assert torch.equal(index, torch.cat([chunks[rank], chunks.flip(0)[rank]]))

# %% [markdown]
# ## Packed sequences
#
# Documents have unlike lengths. Instead of a row for each, padded to the longest, they follow one another in one
# stream (THD). Each is padded to a multiple of `2 * cp` and sharded by itself, so that every rank has two chunks of
# each document: the same work for all, whatever the lengths are. Sharding the stream as one sequence does not give
# that.

# %%
padded, real = [0, 8, 24, 32], [0, 5, 21, 22]
packed = [TokenLayout.packed(padded, real, cp_size=2, cp_rank=rank) for rank in range(2)]
dense = TokenLayout.dense("dual_chunk_swap", 32, cp_size=2, cp_rank=0)
kinds = {"each sequence": packed[0].index.tolist(), "the stream": dense.index.tolist()}
layout_figure(kinds, dict.fromkeys(kinds, padded))

# %% [markdown]
# What a rank must know of its shard: where its sequences begin, the place of each token inside its sequence, and
# what is padding. `P` marks padding.

# %%
print("ranks    ", packed[0].draw())
print("padding  ", "".join(".P"[mask] for mask in packed[0].padding_mask.int().tolist()))
for rank, layout in enumerate(packed):
    print(
        f"rank {rank}: local cu_seqlens {layout.local_cu.tolist()}, positions",
        *layout.position_ids[layout.local_index].tolist(),
    )

# %% [markdown]
# Which query sees which key, coloured by the rank that holds the query. Sequences never see each other; padding is
# never seen and sees nothing.

# %%
sequence, place, is_real = packed[0].sequence_ids, packed[0].position_ids, ~packed[0].padding_mask
seen = (sequence[:, None] == sequence) & (place[:, None] >= place) & is_real[:, None] & is_real
holder = torch.zeros(32, dtype=torch.long)
for rank, layout in enumerate(packed):
    holder[layout.local_index] = rank

figure, panel = plt.subplots(figsize=(4.6, 3.4), layout="constrained")
tiles(panel, torch.where(seen, holder[:, None], -1), 2, xlabel="key (slot of the stream)", ylabel="query (slot)")
for border in padded[1:-1]:
    panel.axhline(border - 0.5, color="0.6", linewidth=0.8)
    panel.axvline(border - 0.5, color="0.6", linewidth=0.8)
rank_legend(figure, 2)
plt.show()

# %% [markdown]
# ## What padding costs
#
# On average half a block of `2 * cp` slots for each sequence. That is little for documents of thousands of tokens, and
# much for chat turns on many ranks.

# %%
WORLDS = (1, 2, 4, 8, 16, 32, 64)
figure, panel = plt.subplots(figsize=(6.5, 3), layout="constrained")
for number, mean in enumerate((64, 512, 4096)):
    lengths = np.random.default_rng(0).exponential(mean, 4000).astype(int) + 1
    shares = [1 - lengths.sum() / (-(-lengths // (2 * cp)) * 2 * cp).sum() for cp in WORLDS]
    panel.plot(WORLDS, [100 * share for share in shares], **colours.line(number), label=f"mean length {mean}")
panel.set(xscale="log", xlabel="ranks of cp", ylabel="slots that are padding, %", ylim=(0, None))
panel.set_xticks(WORLDS, WORLDS)
panel.minorticks_off()
panel.legend()
plt.show()

# %% [markdown]
# ## The next token
#
# A language model predicts from each token the next one of its document. Shift the ids *before* they are sharded, and
# every rank has the right targets. Shift what a rank holds, and the last token of each chunk gets the first of a
# chunk that stands somewhere else.
#
# The reference says what is meant, for numbers instead of ids, so that gradients are compared as well.


# %%
def next_value(x, padded, real):
    """The next real value of the same sequence, 0 where there is none."""
    slot = jnp.arange(x.shape[0])
    sequence = (slot[:, None] >= padded[None, 1:]).sum(1)
    end = (padded[:-1] + jnp.diff(real))[sequence]
    return jnp.where(slot + 1 < end, jnp.roll(x, -1), 0.0)


DECLARED = dict(
    reference=next_value,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "t/cp:packed", "padded": "n", "real": "n"},
    outputs="t/cp:packed",
    dims={"t": (32,), "n": (4,)},
    draw={"x": values("normal"), "padded": offsets("t", padded=True), "real": offsets("t")},
)


def layout_on(mesh, padded, real):
    return TokenLayout.packed(padded, real, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))


@scheme(**DECLARED)
def shifted_after_sharding(mesh, x, padded, real):
    layout = layout_on(mesh, padded, real)
    place, length = layout.position_ids, layout.cu_real.diff()[layout.sequence_ids]
    return torch.where((place + 1 < length)[layout.local_index], x.roll(-1), 0.0)


wrong = verify_case(shifted_after_sharding, shifted_after_sharding.case(cp=2, dtype="float32", seed=1))
print(wrong)

# %% [markdown]
# Inside a chunk all is well, which is why such a model trains. Where it is wrong, by slot of the stream; black lines
# part sequences:

# %%
tensor = wrong.tensors[0]
figure, panel = plt.subplots(figsize=(8, 2.2), layout="constrained")
owners = tensor.owners["cp"]
panel.bar(
    range(32),
    abs(tensor.got - tensor.want),
    color=[colours.of_rank(rank) for rank in owners],
    edgecolor="0.4",
    linewidth=0.5,
)
panel.set(xlabel="slot of the stream", ylabel="error of the next value", xlim=(-0.6, 31.6))
for border in np.cumsum(wrong.case.lengths["t"]["padded"])[:-1]:
    panel.axvline(border - 0.5, color="black", linewidth=2)
rank_legend(figure, 2)
plt.show()

# %% [markdown]
# With the stream gathered, shifted and sharded again. Whoever has the full ids, as a data loader has, needs no
# collective for it: `layout.shard` is enough.


# %%
@scheme(**DECLARED)
def shifted_before_sharding(mesh, x, padded, real):
    layout = layout_on(mesh, padded, real)
    full = layout.unshard(x, 0, mesh["cp"])
    place, length = layout.position_ids, layout.cu_real.diff()[layout.sequence_ids]
    return layout.shard(torch.where(place + 1 < length, full.roll(-1), 0.0), 0)


print(shifted_before_sharding.verify(examples=20))

# %% [markdown]
# ## Your turn
#
# 1. One sequence of 4,096 tokens over 8 ranks, and each rank shifts what it has. How many targets are wrong in each
#    layout? Why are those of DualChunkSwap not one for each of its 16 chunks but the last?
# 2. DualChunkSwap gives two ranks the same pairs of each padded sequence. Count the pairs of real tokens only: is that
#    still so for 5 tokens padded to 8, and for 4,093 padded to 4,096?
#
# The next cell has the answers.

# %%
for kind in KINDS:
    local = TokenLayout.dense(kind, 4096, cp_size=8, cp_rank=0).index  # a row for each rank
    is_wrong = (local.roll(-1, 1) != local + 1) & (local + 1 < 4096)
    print(f"1. {kind:16} {is_wrong.sum().item():4} wrong, those of each rank: {is_wrong.sum(1).tolist()}")
print("   the chunks of rank 7 are neighbours:", local[7, [0, 255, 256, 511]].tolist())

for length, slots in ((5, 8), (4093, 4096)):
    layout = TokenLayout.packed([0, slots], [0, length], cp_size=2, cp_rank=0)
    keys = torch.where(layout.padding_mask, 0, layout.position_ids + 1)
    pairs = [keys[index].sum().item() for index in layout.index]
    print(f"2. {length} of {slots}: pairs {pairs}, the busiest rank has {2 * max(pairs) / sum(pairs):.3f} fair shares")
