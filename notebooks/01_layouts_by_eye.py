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
# # Layouts by eye
#
# Who holds what, on one axis and on two; what a layout costs under a causal mask; what the letters of a spec string say
# about gradients; and how a layout that was not undone is found. Everything runs on this CPU.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import matplotlib.pyplot as plt
import numpy as np
import torch

from jax_ref.layouts import contiguous, dual_chunk_swap, packed, ragged, striped
from shardproof import (
    CaseSpec,
    layout_figure,
    ledger_figure,
    owner_strips,
    parse,
    rank_legend,
    run,
    scheme,
    tiles,
    values,
)
from shardproof import figure as spec_figure
from torch_impl.collectives import all_gather, all_reduce
from torch_impl.layouts import dual_chunk_swap as rank_order
from torch_impl.layouts import inverse

# %% [markdown]
# ## One dim, five orders
#
# A layout says which positions of a dim each rank holds, and in which order. Below, 32 positions over four ranks, each
# rank in its colour, which it keeps in every figure of these notebooks. To the right, the share of the work that each
# rank has in causal attention, where position $i$ sees $i + 1$ keys; the dotted line is an equal share.

# %%
cu_seqlens = [0, 8, 32]
orders = {
    "contiguous": contiguous(32, 4),
    "ragged": ragged(32, 4, [12, 10, 10, 0]),
    "striped": striped(32, 4),
    "dual_chunk_swap": dual_chunk_swap(32, 4),
    "packed": packed(32, 4, cu_seqlens),
}
layout_figure(orders, {"packed": cu_seqlens})

# %% [markdown]
# - *contiguous*: equal blocks. The last rank has over six times the causal work of the first, and all wait for it.
# - *ragged*: blocks of any lengths, empty ones too. DTensor shards a dim that does not divide evenly like this.
# - *striped*: dealt out one by one.
# - *dual_chunk_swap* (zigzag): an early chunk and its mirror image from the end. The same work for all.
# - *packed*: the same inside each sequence of a packed stream; the black bar parts two sequences.
#
# As text, one digit for each position, and as positions, in the order in which rank 1 stores them:

# %%
for name, positions in orders.items():
    owners = np.concatenate([np.full(len(each), rank) for rank, each in enumerate(positions)])
    order = np.concatenate([np.asarray(each, dtype=int) for each in positions]).argsort()
    print(f"{name:16}", "".join(map(str, owners[order])), "  rank 1:", *map(int, positions[1]))

# %% [markdown]
# ## Two axes at once
#
# A spec string names the dims of a tensor and the axes of the mesh that shard them. On a mesh of two axes a rank has
# two coordinates; the number in each tile is the rank, which counts through the last axis first. A dim can be sharded
# twice, left to right: `s/cp/tp` shards over `cp`, and each shard over `tp`.

# %%
SIZES, MESH = {"s": 16, "v": 12}, {"cp": 2, "tp": 2}


def owners_of(text):
    """The rank of each element of a tensor "s v"; -1 where an axis shards nothing, so that several ranks have it."""
    spec, at = parse(text, tuple(MESH)), np.zeros((2, SIZES["s"], SIZES["v"]), dtype=int)
    for strip in owner_strips(spec, SIZES, MESH, {}):
        axis = list(MESH).index(strip.label.split(":")[0].split("/")[-1])
        at[axis] = strip.owners[:, None] if strip.label.startswith("s") else strip.owners
    return at[0] * MESH["tp"] + at[1]


SPECS = ("s/cp v/tp", "s/cp:dual_chunk_swap v/tp", "s/cp/tp v", "s v/tp/cp:striped")
figure, panels = plt.subplots(1, 4, figsize=(10.5, 3.4), sharey=True, layout="constrained")
for panel, text in zip(panels, SPECS, strict=True):
    owners = owners_of(text)
    tiles(panel, owners, 4, text=owners, title=text, xlabel="v")
    panel.title.set(fontsize=9, family="monospace")
panels[0].set_ylabel("s")
rank_legend(figure, 4)
plt.show()

# %% [markdown]
# ## What is replicated
#
# An axis that shards no dim leaves a copy on each of its ranks, and then there is a question that no picture of the
# *values* answers: how do gradients come back? A letter says it.

# %%
tensors = {
    "logits": parse("b s/cp:dual_chunk_swap v/tp", tuple(MESH)),
    "-> logprob": parse("b s tp=I cp=R", tuple(MESH)),
}
spec_figure(tensors, {"b": 2, **SIZES}, MESH)

# %% [markdown]
# Two ranks add up `x` and get the same sum. Then rank 0 uses it once and rank 1 ten times. What is the gradient of each
# addend? If both ranks' uses are parts of one loss, it is 11 (`R`, the cotangents are addends). If both ranks compute
# the same thing, as after a loss that is replicated, cotangents are equal, and one of them is the gradient
# (`I`). A collective cannot know which it is. It has to be declared.


# %%
def gradient_of(letter, used):
    def body(mesh, case):
        x = torch.ones((), requires_grad=True)
        (used[mesh.rank("tp")] * all_reduce(x, mesh["tp"], out=letter)).backward()
        return x.grad.item()

    return run(body, CaseSpec("letters", {"tp": 2})).results


print("R, cotangents 1 and 10: ", gradient_of("R", (1, 10)), " their sum, on both")
print("I, cotangents 10 and 10:", gradient_of("I", (10, 10)), " either of them")
print("I, cotangents 1 and 10: ", gradient_of("I", (1, 10)), " wrong on both, and nothing is raised")
print("R, cotangents 10 and 10:", gradient_of("R", (10, 10)), " twice what it should be")

# %% [markdown]
# The last two lines are the most common silent bug of sharded training: the forward is right. A scheme has the letter
# in its spec string, so that the harness gives each rank the cotangents that the letter promises, and checks what comes
# back.
#
# ## A layout that was not undone
#
# Gather a sequence that was sharded by DualChunkSwap. The reference is the identity. Here the shards stay in rank
# order.


# %%
DECLARED = dict(
    reference=lambda x: x,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "b s/cp:dual_chunk_swap"},
    outputs="b s cp=R",
    draw={"x": values("normal")},
)


@scheme(**DECLARED)
def left_in_rank_order(mesh, x):
    return all_gather(x, mesh["cp"], out="R", dim=1)


left_in_rank_order.verify(cp=4, b=2, s=16, dtype="float32")

# %% [markdown]
# The figure shows error over budget on the full tensor: above 0 is a mismatch, black lines are borders of shards.
# Every value is right and most stand in the wrong place. The note names the layout that is still there. With it undone:


# %%
@scheme(**DECLARED)
def in_global_order(mesh, x):
    gathered = all_gather(x, mesh["cp"], out="R", dim=1)
    return gathered[:, inverse(rank_order(gathered.shape[1], mesh.size("cp")))]


report = in_global_order.verify(cp=4, b=2, s=16, dtype="float32")
print(report)
print(in_global_order.verify(examples=12))

# %% [markdown]
# And what was sent, forward and backward. `R` has a sum to make on the way back.

# %%
ledger_figure(report.ledger, "in_global_order")

# %% [markdown]
# ## Your turn
#
# 1. Attention now has a causal window: a query sees its own position and the three before it. Which of the first four
#    orders gives its busiest rank the most work? Is DualChunkSwap still worth its permutation?
# 2. `R` in place of `I` gave twice the gradient on two ranks. What does it give on one, two and four, and on which of
#    these meshes does a test not see the mistake?
#
# The next cell has the answers.

# %%
for window in (32, 4):
    keys = np.minimum(np.arange(32) + 1, window)
    busiest = {name: max(keys[np.asarray(shard, int)].sum() for shard in orders[name]) for name in list(orders)[:4]}
    shares = ", ".join(f"{name} {4 * most / keys.sum():.2f}" for name, most in busiest.items())
    print(f"1. window {window:2}, the busiest rank in fair shares: {shares}")


def factor_on(tp):
    def body(mesh, case):
        x = torch.ones((), requires_grad=True)
        all_reduce(x, mesh["tp"], out="R").backward()  # every rank has the full cotangent, 1: that is type I
        return x.grad.item()

    return run(body, CaseSpec("factor", {"tp": tp})).results[0]


print("2. times the right gradient:", *(f"tp={tp}: {factor_on(tp):g}" for tp in (1, 2, 4)))
