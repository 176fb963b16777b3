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
# # Ring and Ulysses attention
#
# Attention over a sequence that is sharded: every query must meet every earlier key, wherever it lives. Keys can travel
# around a ring, or heads can be exchanged for positions. This notebook draws each rank's work in each step, verifies
# both ways against dense attention, counts the bytes that each sends, and finds a wrong layout. Everything runs on this
# CPU.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import matplotlib.pyplot as plt
import torch

from jax_ref.context_parallel import dense_attention, packed_attention
from shardproof import colours, ledger_figure, offsets, rank_legend, scheme, tiles, values
from torch_impl.context_parallel import attention_bytes, context_parallel_attention, fewest_bytes
from torch_impl.layouts import TokenLayout

CP, S = 4, 64

# %% [markdown]
# ## A ring, step by step
#
# Each rank keeps its queries. Keys and values travel from rank to rank until every rank has seen all of them. A row
# below is a rank, a column a step. The colour names the rank that the keys come from. The number is the share of all
# pairs (query, key) under the causal mask that the rank computes in the step. A step takes as long as its busiest rank.


# %%
def ring(kind):
    """(the rank whose keys each rank has in each step, the share of all pairs that it computes in that step)."""
    index = TokenLayout.dense(kind, S, cp_size=CP, cp_rank=0).index
    source = (torch.arange(CP)[:, None] - torch.arange(CP)) % CP
    pairs = (index[:, :, None, None] >= index[None, None]).sum((1, 3))  # [rank of queries, rank of keys]
    return source, pairs.gather(1, source) / pairs.sum()


figure, panels = plt.subplots(1, 3, figsize=(10.5, 2.9), sharey=True, layout="constrained")
for panel, kind in zip(panels, ("contiguous", "striped", "dual_chunk_swap"), strict=True):
    source, share = ring(kind)
    time = share.amax(0).sum() * CP
    labels = [[f"{100 * x:.0f} %" for x in row] for row in share.tolist()]
    tiles(panel, source, CP, text=labels, title=f"{kind}\n{time:.2f} times a fair share", xlabel="step")
panels[0].set_ylabel("rank (its queries)")
rank_legend(figure, CP, "keys of rank")
plt.show()

# %% [markdown]
# With contiguous blocks the ranks wait for each other in every step, and the first rank has no work after its first
# step. DualChunkSwap gives all ranks the same work in every step, and only the first step has a little more.
#
# ## Heads for positions
#
# Before attention, an all-to-all gives each rank all positions of some heads in place of some positions of all heads.
# Every rank then runs ordinary attention, and a second all-to-all restores the first sharding.

# %%
HEADS = 8
index = TokenLayout.dense("dual_chunk_swap", 32, cp_size=CP, cp_rank=0).index
holder = torch.arange(CP).repeat_interleave(32 // CP)[index.flatten().argsort()]
before = holder.expand(HEADS, -1)
inside = (torch.arange(HEADS) * CP // HEADS)[:, None].expand(-1, 32)
figure, panels = plt.subplots(1, 3, figsize=(10.5, 2.5), sharey=True, layout="constrained")
named = {"q, k, v as they come": before, "in attention": inside, "the output": before}
for panel, (title, owners) in zip(panels, named.items(), strict=True):
    tiles(panel, owners, CP, title=title, xlabel="position")
panels[0].set_ylabel("head")
rank_legend(figure, CP)
plt.show()

# %% [markdown]
# ## All three, verified
#
# The reference is dense attention under the mask of packed sequences, on one device. The exchange is an option of the
# scheme: the ring, an all-gather of keys and values, or Ulysses. With each of them, values and gradients must equal the
# reference's.


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
def packed_attention_over_cp(mesh, q, k, v, padded, real, exchange):
    layout = TokenLayout.packed(padded, real, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
    return context_parallel_attention(q, k, v, group=mesh["cp"], layout=layout, exchange=exchange)


print(packed_attention_over_cp.verify(examples=12))

# %% [markdown]
# The messages of one case, with Ulysses and with the ring. All ranks send at the same time, so a column shows one
# message of every rank. In the ring, the gradients of the keys follow the keys and return to the keys' own rank.

# %%
SIZES = dict(cp=4, b=1, h=4, g=4, t=32, p=4, n=4, dtype="float32")
reports = {how: packed_attention_over_cp.verify(exchange=how, **SIZES) for how in ("ring", "ulysses")}
ledger_figure(reports["ulysses"].ledger, "ulysses")

# %%
ledger_figure(reports["ring"].ledger, "ring")

# %% [markdown]
# ## One wrong layout
#
# The output of all ranks is gathered, in an order that is an option below. The batch is sharded by DualChunkSwap. If
# the output is gathered in the order of contiguous blocks, all shapes fit, every message is the same, and values stand
# in the wrong places.


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
def full_output(mesh, q, k, v, order):
    out = context_parallel_attention(q, k, v, group=mesh["cp"], layout="dual_chunk_swap")
    layout = TokenLayout.dense(order, 32, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
    return layout.unshard(out, 2, mesh["cp"])


broken = full_output.verify(cp=2, order="contiguous", dtype="float32", examples=1)
display(broken)

# %% [markdown]
# The note names the layout whose order the output still has. Gathered in the order of that layout, it is right:

# %%
print(broken.notes["out"][0])
full_output.verify(cp=2, order="dual_chunk_swap", dtype="float32", examples=1)

# %% [markdown]
# ## What each exchange sends
#
# The figure shows the bytes that one rank sends in a layer, forward plus backward, for 64 query heads and 64, 8 or 1 KV
# heads of width 128, and 131,072 tokens in bfloat16. A ring sends keys and values, which are few if heads are grouped.
# Ulysses also sends queries and outputs, but on n ranks only about an n-th of each full tensor. An all-gather sends all
# keys and values at once; a ring sends at most as many bytes. `usp` is a ring of groups that exchange heads inside.

# %%
SHAPE = dict(b=1, s=131072, h=64, p=128, itemsize=2)
WORLDS = (2, 4, 8, 16, 32)
NAMES = {"ring": "ring, all_gather", "ulysses": "ulysses", "usp": "usp"}

figure, panels = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
for panel, kv_heads in zip(panels, (64, 8, 1), strict=True):
    for number, (name, label) in enumerate(NAMES.items()):
        sent = {
            n: [t.total for t in attention_bytes(hk=kv_heads, cp_size=n, **SHAPE) if t.exchange == name] for n in WORLDS
        }
        least_bytes = {n: min(totals) / 2**30 for n, totals in sent.items() if totals}
        panel.plot(least_bytes.keys(), least_bytes.values(), **colours.line(number), label=label)
    panel.set(title=f"{kv_heads} KV head{'s' * (kv_heads > 1)}", xlabel="ranks of cp", xscale="log", yscale="log")
    panel.set_xticks(WORLDS, WORLDS)
    panel.minorticks_off()
    panel.grid(axis="y", color="0.9")
panels[0].set_ylabel("GiB sent by a rank")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# The exchange that sends the fewest bytes; for usp, `a` is the number of ranks that exchange heads:

# %%
print("KV heads ", *(f"cp={n:<12}" for n in WORLDS))
for kv_heads in (64, 16, 8, 4, 1):
    best = [fewest_bytes(hk=kv_heads, cp_size=n, **SHAPE) for n in WORLDS]
    named = [t.exchange if t.exchange != "usp" else f"usp a={t.heads_size}" for t in best]
    print(f"{kv_heads:8} ", *(f"{name:15}" for name in named))

# %% [markdown]
# A causal window over contiguous rows is a halo: only the rows that it reaches are sent.

# %%
for window in (None, 65536, 16384, 4096, 1):
    traffic = fewest_bytes(hk=8, cp_size=16, layout="contiguous", window=window, **SHAPE)
    print(f"window {window!s:7} {traffic.exchange:10} {traffic.total / 2**20:8.0f} MiB")

# %% [markdown]
# ## Your turn
#
# 1. The titles of the first figure are for 64 tokens. Which of the three layouts comes nearer to a fair share as the
#    sequence grows, and which value does each approach?
# 2. On 8 ranks, what is the ratio of backward bytes to forward bytes for each exchange, in bfloat16 and in float32?
#    What travels around the ring beside keys and values, and in which dtype?
#
# The next cell has the answers.

# %%
for S in (16, 64, 256, 1024):  # `ring` reads it
    times = {kind: CP * ring(kind)[1].amax(0).sum().item() for kind in ("contiguous", "striped", "dual_chunk_swap")}
    print(f"1. {S:4} tokens:", ", ".join(f"{kind} {time:.3f}" for kind, time in times.items()))

for itemsize in (2, 4):
    traffic = attention_bytes(hk=8, cp_size=8, **{**SHAPE, "itemsize": itemsize})
    ratios = [f"{each.exchange} {each.backward / each.forward:.2f}" for each in traffic if each.exchange != "usp"]
    print(f"2. numbers of {itemsize} bytes, backward over forward:", ", ".join(ratios))
    gathered = next(each for each in traffic if each.exchange == "all_gather")
    print("   bytes per element of a gradient:", itemsize * (gathered.backward / gathered.forward - 1))
