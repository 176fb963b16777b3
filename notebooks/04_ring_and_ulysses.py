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
# around a ring, or heads can be exchanged for positions. What each rank does in each step, what each way sends, both
# verified against dense attention, and a layout mistake found. Everything runs on this CPU.

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
# Each rank keeps its queries. Its keys and values go to the next rank, and on, until every rank has seen all. A row
# below is a rank, a column a step; the colour is the rank whose keys are there, and the number is how many pairs of
# query and key count under the causal mask, as a share of all. A step takes as long as its busiest rank.


# %%
def ring(kind):
    """(whose keys each rank has in each step, the share of pairs that it computes then)."""
    index = TokenLayout.dense(kind, S, cp_size=CP, cp_rank=0).index
    source = (torch.arange(CP)[:, None] - torch.arange(CP)) % CP
    pairs = (index[:, :, None, None] >= index[None, None]).sum((1, 3))  # of the queries of one rank, keys of another
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
# Over blocks the ranks wait for each other in every step, and late steps are empty for the first rank. DualChunkSwap
# gives each rank the same work in each step but the first.
#
# ## Heads for positions
#
# Ulysses turns the picture by an all-to-all: from some positions of all heads to all positions of some heads. Attention
# then is the ordinary one, on every rank, and the result is turned back.

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
# scheme: the ring, an all-gather of keys and values, and Ulysses. Values and gradients of all must be those of the
# reference.


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
# What goes over the wire for one case, with the ring and with Ulysses. All ranks send at once, so a column is what each
# of them sends or receives; in the ring the gradients of the keys follow the keys, and go home.

# %%
SIZES = dict(cp=4, b=1, h=4, g=4, t=32, p=4, n=4, dtype="float32")
reports = {how: packed_attention_over_cp.verify(exchange=how, **SIZES) for how in ("ring", "ulysses")}
ledger_figure(reports["ulysses"].ledger, "ulysses")

# %%
ledger_figure(reports["ring"].ledger, "ring")

# %% [markdown]
# ## One wrong layout
#
# The output of all ranks is gathered, in an order that is an option below. Where it is that of blocks while the
# batch was sharded by DualChunkSwap, shapes fit, every message is the same, and values stand in the wrong places.


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
# The note names the layout that is still there. With it undone:

# %%
print(broken.notes["out"][0])
full_output.verify(cp=2, order="dual_chunk_swap", dtype="float32", examples=1)

# %% [markdown]
# ## What each exchange sends
#
# Bytes that one rank sends in a layer, forward and backward, over the number of ranks, for 64 query heads and 64, 8 or
# 1 KV heads of width 128, and 131,072 tokens in bfloat16. Rings send keys, which are few where heads are grouped;
# Ulysses sends everything, but an n-th of it. An all-gather sends at once what a ring may. `usp` is a ring of
# groups that exchange heads inside.

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
# Which sends least, `a` the ranks that exchange heads where it is usp:

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
# 1. The titles of the first figure are for 64 tokens. Which of the three comes nearer to a fair share as the sequence
#    grows, and to what does each go?
# 2. How many times the bytes of forward does each exchange send in backward on 8 ranks, in bfloat16 and in float32?
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
    print("   bytes of a number of a gradient:", itemsize * (gathered.backward / gathered.forward - 1))
