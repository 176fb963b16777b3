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
# # Context parallelism by eye
#
# Who holds which token, how much causal work that makes, how packed sequences are cut, what attention sends from rank
# to rank, and what a wrong layout looks like. Everything runs on this CPU.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import matplotlib.pyplot as plt
import torch

from jax_ref.context_parallel.attention import dense_attention, packed_attention
from parity_tests import offsets, scheme, values
from torch_impl.context_parallel import attention_bytes, context_parallel_attention, fewest_bytes
from torch_impl.layouts import TokenLayout

# %% [markdown]
# ## Who holds which token
#
# One digit for each position: the rank that holds it.

# %%
KINDS = ("contiguous", "striped", "dual_chunk_swap")
for kind in KINDS:
    print(f"{kind:16}", TokenLayout.dense(kind, 32, cp_size=4, cp_rank=0).draw())

# %% [markdown]
# ## Causal work
#
# Under a causal mask position i sees i + 1 keys. In blocks the last rank has most to do and all wait for it.
# DualChunkSwap gives each rank an early chunk and its mirror image from the end: the same work for all.

# %%
work = {}
for kind in KINDS:
    layout = TokenLayout.dense(kind, 4096, cp_size=4, cp_rank=0)
    work[kind] = (layout.index + 1).sum(1)
    print(f"{kind:16}", *(f"{share:.1%}" for share in (work[kind] / work[kind].sum()).tolist()))

figure, axes = plt.subplots(1, 3, figsize=(9, 2.2), sharey=True)
for ax, (kind, pairs) in zip(axes, work.items(), strict=True):
    ax.bar(range(4), pairs / 1e6, color=[f"C{rank}" for rank in range(4)])
    ax.set(title=kind, xlabel="rank", xticks=range(4))
axes[0].set_ylabel("million (query, key) pairs")
plt.show()

# %% [markdown]
# ## Packed sequences
#
# Several sequences in one stream (THD), each padded to a multiple of 2 * cp and cut by itself. Bars part sequences.

# %%
padded, real = [0, 8, 24, 32], [0, 5, 21, 22]
packed = [TokenLayout.packed(padded, real, cp_size=2, cp_rank=rank) for rank in range(2)]
print(packed[0].draw())
print("".join(".P"[mask] for mask in packed[0].padding_mask.int().tolist()), " P: padding")

# %% [markdown]
# Which query sees which key, coloured by the rank that holds the query. Sequences never see each other; padding is
# never seen and sees nothing.

# %%
everyone, place = packed[0].sequence_ids, packed[0].position_ids
real_token = ~packed[0].padding_mask
seen = (everyone[:, None] == everyone) & (place[:, None] >= place) & real_token[:, None] & real_token
holder = torch.zeros(32)
for rank, layout in enumerate(packed):
    holder[layout.local_index] = rank
plt.figure(figsize=(3.4, 3.4))
plt.imshow(torch.where(seen, holder[:, None], torch.nan), cmap="Set1", vmin=0, vmax=8)
plt.xlabel("key")
plt.ylabel("query")
plt.show()

# %% [markdown]
# ## Attention over it
#
# The reference is dense attention under that mask, on one device. Each rank attends from its own queries; K and V
# travel around a ring, are gathered at once, or heads are exchanged for positions. A scheme holds all three against the
# reference, values and gradients.


# %%
@scheme(
    reference=packed_attention,
    mesh={"cp": (1, 2, 4)},
    inputs={
        "q": "b h t/cp:packed p",
        "k": "b g t/cp:packed p",
        "v": "b g t/cp:packed p",
        "padded": "n",
        "real": "n",
    },
    outputs="b h t/cp:packed p",
    dims={"b": (1,), "h": (4,), "g": (4,), "t": (32,), "p": (4,), "n": (4,)},
    draw={
        **dict.fromkeys("qkv", values("normal")),
        "padded": offsets("t", padded=True),
        "real": offsets("t"),
    },
    rank_options={"exchange": ("ring", "all_gather", "ulysses")},
    reduction=("t", "p"),
    roundings=6,
)
def packed_ring(mesh, q, k, v, padded, real, exchange):
    layout = TokenLayout.packed(padded, real, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
    return context_parallel_attention(q, k, v, group=mesh["cp"], layout=layout, exchange=exchange)


packed_ring.verify(examples=12)

# %% [markdown]
# ## One wrong layout
#
# The output of all ranks is put together, in an order that is an option below. Where it is that of blocks while the
# batch was cut by DualChunkSwap, shapes fit, every message is the same, and values stand in the wrong places.


# %%
@scheme(
    reference=dense_attention,
    mesh={"cp": (2, 4)},
    inputs={name: f"b {heads} s/cp:dual_chunk_swap p" for name, heads in (("q", "h"), ("k", "g"), ("v", "g"))},
    outputs="b h s p cp=R",
    dims={"b": (1,), "h": (2,), "g": (2,), "s": (32,), "p": (4,)},
    draw=dict.fromkeys("qkv", values("normal")),
    rank_options={"order": ("dual_chunk_swap", "contiguous")},
    reduction=("s", "p"),
    roundings=6,
)
def whole_output(mesh, q, k, v, order):
    out = context_parallel_attention(q, k, v, group=mesh["cp"], layout="dual_chunk_swap")
    layout = TokenLayout.dense(order, 32, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
    return layout.unshard(out, 2, mesh["cp"])


broken = whole_output.verify(cp=2, order="contiguous", dtype="float32", examples=1)
display(broken)

# %% [markdown]
# The note names the layout that is still there. With it undone:

# %%
print(broken.notes["out"][0])
whole_output.verify(cp=2, order="dual_chunk_swap", dtype="float32", examples=1)

# %% [markdown]
# ## What each exchange sends
#
# Bytes that one rank sends in a layer, forward and backward, over the number of ranks, for 64 query heads and 64, 8 or
# 1 KV heads. Rings send keys, which are few where heads are grouped; Ulysses sends everything, but an n-th of it.

# %%
SHAPE = dict(b=1, s=131072, h=64, p=128, itemsize=2)
WORLDS = (2, 4, 8, 16, 32)
NAMES = ("ring", "all_gather", "ulysses", "usp")

figure, axes = plt.subplots(1, 3, figsize=(10, 2.8), sharey=True)
for ax, kv_heads in zip(axes, (64, 8, 1), strict=True):
    for name, style in zip(NAMES, ("o-", "x--", "s-", "d:"), strict=True):
        found = {
            n: min(
                (t.total for t in attention_bytes(hk=kv_heads, cp_size=n, **SHAPE) if t.exchange == name), default=None
            )
            for n in WORLDS
        }
        drawn = {n: total / 2**30 for n, total in found.items() if total is not None}
        ax.plot(drawn.keys(), drawn.values(), style, label=name)
    ax.set(title=f"{kv_heads} KV heads", xlabel="ranks", xscale="log", yscale="log", xticks=WORLDS, xticklabels=WORLDS)
    ax.minorticks_off()
axes[0].set_ylabel("GiB sent by a rank")
axes[2].legend()
plt.show()

# %% [markdown]
# Which sends least, `a` the ranks that exchange heads where it is usp:

# %%
print("KV heads ", *(f"cp={n:<12}" for n in WORLDS))
for kv_heads in (64, 16, 8, 4, 1):
    best = [fewest_bytes(hk=kv_heads, cp_size=n, **SHAPE) for n in WORLDS]
    named = [t.exchange if t.exchange != "usp" else f"usp a={t.heads_size}" for t in best]
    print(f"{kv_heads:8} ", *(f"{name:15}" for name in named))

# %% [markdown]
# A causal window over contiguous rows is a halo: the ring makes only the hops that it reaches.

# %%
for window in (None, 65536, 16384, 4096, 1):
    traffic = fewest_bytes(hk=8, cp_size=16, layout="contiguous", window=window, **SHAPE)
    print(f"window {window!s:7} {traffic.exchange:10} {traffic.total / 2**20:8.0f} MiB")
