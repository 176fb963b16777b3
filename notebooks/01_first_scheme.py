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
# # A first scheme
#
# From a spec string to a verdict: draw who holds what, write the function of one rank in a cell, verify it against one
# device, break it, and read what kind of mistake it is. Everything runs on this CPU.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import jax
import jax.numpy as jnp
import torch

from parity_tests import scheme, token_below, values
from parity_tests.harness import picture
from parity_tests.harness.spec import parse
from torch_impl.collectives import all_gather, all_reduce, all_reduce_max
from torch_impl.layouts import dual_chunk_swap, inverse

# %% [markdown]
# ## Who holds what
#
# A spec string names the dims of a tensor and the mesh axes that cut them. Below, `s` is cut over `cp` so that each
# rank holds an early chunk and its mirror image from the end, which under a causal mask is the same work for all, and
# `v` is cut over `tp` in order. The result is whole on every rank. What its letters say is how *gradients* come back:
# the same on each `tp` rank (`I`), as terms of a sum from the `cp` ranks (`R`).

# %%
axes = ("cp", "tp")
tensors = {"logits": parse("b s/cp:dual_chunk_swap v/tp", axes), "-> logprob": parse("b s tp=I cp=R", axes)}
picture.figure(tensors, {"b": 2, "s": 16, "v": 12}, {"cp": 2, "tp": 2})


# %% [markdown]
# ## What it means
#
# The reference is JAX on whole arrays. It knows nothing of ranks.


# %%
def reference(logits, target):
    logprob = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logprob, target[..., None], -1)[..., 0]


# %% [markdown]
# ## What each rank does
#
# The function gets the mesh and this rank's pieces. Collectives come with the gradient type of their result.

# %%
declared = dict(
    reference=reference,
    mesh={"cp": (1, 2), "tp": (1, 2)},
    inputs={"logits": "b s/cp:dual_chunk_swap v/tp", "target": "b s/cp:dual_chunk_swap"},
    outputs="b s tp=I cp=R",
    draw={"logits": values("normal", "ties", "neg_inf_mask"), "target": token_below("v")},
    reduction=("v",),
)


def local_logprob(mesh, logits, target):
    """Log-probability of the tokens of this cp rank, on each of its tp ranks."""
    peak = all_reduce_max(logits.float().amax(-1), mesh["tp"])
    shifted = logits.float() - peak[..., None]
    own = target[..., None] == mesh.global_ids("v")
    terms = shifted.exp().sum(-1), torch.where(own, shifted, 0.0).sum(-1)
    total, score = all_reduce(torch.stack(terms), mesh["tp"])
    return score - total.log()


@scheme(**declared)
def sharded_logprob(mesh, logits, target):
    gathered = all_gather(local_logprob(mesh, logits, target), mesh["cp"], out="R", dim=1)
    return gathered[:, inverse(dual_chunk_swap(gathered.shape[1], mesh.size("cp")))]


# %% [markdown]
# ## The verdict
#
# What is not given is drawn: shapes, values, the order in which the ranks run. Each tensor is shown with its worst
# error, the budget computed for it from dtype, number of terms and conditioning, and the headroom between them.

# %%
sharded_logprob.verify(examples=10)

# %% [markdown]
# One case by hand. The figure shows error over budget on the whole tensor: below 0 is inside the budget, and the lines
# are borders of shards.

# %%
sharded_logprob.verify(cp=2, tp=2, b=2, s=8, v=12, dtype="float32")

# %% [markdown]
# The same on real processes, with gloo: the function defined in the cell travels to them by value.

# %%
sharded_logprob.verify(engine="gloo", cp=2, tp=2, b=2, s=8, v=12, dtype="float32")

# %% [markdown]
# ## Break it
#
# Leave the gathered sequence in rank order. Every value is right and stands in the wrong place.


# %%
@scheme(**declared)
def layout_kept(mesh, logits, target):
    return all_gather(local_logprob(mesh, logits, target), mesh["cp"], out="R", dim=1)


broken = layout_kept.verify(cp=2, tp=2, b=2, s=8, v=12, dtype="float32")
display(broken)

# %% [markdown]
# The note names the layout that is still there. A test would raise it, and `python replay_<id>.py` runs this one case
# again, on any engine.

# %%
print(broken.notes["out"][0])
try:
    broken.raise_if_failed()
except AssertionError as error:
    print(type(error).__name__)

# %% [markdown]
# Now a mistake that no output shows: a gradient that is summed over `tp` although each rank already has it.


# %%
@scheme(**declared)
def summed_twice(mesh, logits, target):
    peak = all_reduce_max(logits.float().amax(-1), mesh["tp"])
    shifted = logits.float() - peak[..., None]
    own = target[..., None] == mesh.global_ids("v")
    terms = shifted.exp().sum(-1), torch.where(own, shifted, 0.0).sum(-1)
    total, score = all_reduce(torch.stack(terms), mesh["tp"], out="R")  # its backward sums over tp
    gathered = all_gather(score - total.log(), mesh["cp"], out="R", dim=1)
    return gathered[:, inverse(dual_chunk_swap(gathered.shape[1], mesh.size("cp")))]


summed_twice.verify(cp=2, tp=2, b=2, s=8, v=12, dtype="float32")

# %% [markdown]
# And the collectives of one rank, forward and backward, as the ledger has them.

# %%
report = sharded_logprob.verify(cp=2, tp=2, b=1, s=4, v=4, dtype="float32")
print("\n".join(str(row) for row in report.ledger.of(0)))
