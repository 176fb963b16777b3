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
# # A sharded Muon step
#
# AdamW steps every number by itself, so that a rank can step its shard. Muon brings all singular values of a matrix
# near 1, and for that it needs the matrix. What the iteration does, two ways to do it over shards and which sends
# less, both verified against one device, and the mistake that every loss curve forgives. Everything runs on this CPU.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import matplotlib.pyplot as plt
import torch
from torch.distributed.tensor import DTensor, Shard

from jax_ref.optimizers import muon
from shardproof import ledger_figure, scheme, values
from torch_impl.optimizers import Muon, fewest_bytes, newton_schulz

# %% [markdown]
# ## Newton-Schulz on a matrix
#
# Each step is an odd polynomial of the matrix, so that singular vectors stay and each singular value goes its own
# way. Five steps bring all but the smallest between 0.7 and 1.2; no decomposition is computed.

# %%
matrix = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -2, 64)
figure, panel = plt.subplots(figsize=(8, 3), layout="constrained")
for steps in (1, 2, 3, 5):
    panel.plot(torch.linalg.svdvals(newton_schulz(matrix, steps=steps)), label=f"{steps} step{'s' * (steps > 1)}")
panel.plot(torch.linalg.svdvals(matrix / matrix.norm()), color="black", linestyle=":", label="before")
panel.set(xlabel="singular value, by size", yscale="log")
panel.legend()
plt.show()

# %% [markdown]
# ## A shard is no smaller matrix
#
# Rows of a matrix, orthogonalized by themselves, are not the rows of the orthogonalized matrix: they know nothing of
# the other ranks' rows. The angle between the two updates grows with the number of ranks.

# %%
update = newton_schulz(matrix)
for ranks in (1, 2, 4, 8):
    by_shards = torch.cat([newton_schulz(shard) for shard in matrix.chunk(ranks)])
    cosine = (update * by_shards).sum() / (update.norm() * by_shards.norm())
    print(f"{ranks} rank{'s' * (ranks > 1)}: cosine {cosine:.3f}, norm {by_shards.norm() / update.norm():.2f} times")

# %% [markdown]
# ## Two routes
#
# `owners`: each matrix travels to one rank, which does the work, and back; owners take turns. `sharded`: the matrix
# stays where it is, and in each step the ranks add up its Gram matrix, of which a triangle is enough. The first grows
# with the matrix, the second with the square of its shorter dim.

# %%
K, RANKS = 64, 8
lengths = [2**n for n in range(6, 17)]
owners = [2 * (RANKS - 1) / RANKS * length * K / RANKS * 4 / 1e6 for length in lengths]
sharded = [2 * (RANKS - 1) / RANKS * (8 + 5 * K * (K + 1) / 2 * 4) / 1e6] * len(lengths)
figure, panel = plt.subplots(figsize=(8, 3), layout="constrained")
panel.plot(lengths, owners, label="owners")
panel.plot(lengths, sharded, label="sharded")
border = next(length for length in range(lengths[0], lengths[-1]) if fewest_bytes(length, K, RANKS) == "sharded")
panel.axvline(border, color="grey", linestyle=":", label="fewest_bytes takes sharded from here on")
panel.set(xlabel=f"rows of a matrix of {K} columns over {RANKS} ranks", ylabel="MB that a rank sends")
panel.set(xscale="log", yscale="log")
panel.legend()
plt.show()

# %% [markdown]
# ## Verified
#
# State in, state out: weight, gradient and momentum before the step, weight and momentum after it. The optimizer has
# DTensors, as FSDP2 leaves them; the reference has the matrix.


# %%
def one_device(weight, gradient, momentum):
    weight, momentum = muon(weight, gradient, momentum, lr=0.02)
    return {"weight": weight, "momentum": momentum}


DECLARED = dict(
    reference=one_device,
    mesh={"dp": (1, 2, 4)},
    inputs=dict.fromkeys(("weight", "gradient", "momentum"), "a/dp k"),
    outputs=dict.fromkeys(("weight", "momentum"), "a/dp k"),
    dims={"a": (8, 16), "k": (2, 3)},
    draw=dict.fromkeys(("weight", "gradient", "momentum"), values("normal")),
    nograd=("weight", "gradient", "momentum"),
    rank_options={"route": ("owners", "sharded")},
    dtypes=("float32", "float64"),
    reduction=("a", "k"),
)


def after_a_step(parameter, momentum, route):
    optimizer = Muon([parameter], lr=0.02, route=route)
    optimizer.state[parameter]["momentum_buffer"] = momentum
    optimizer.step()
    return {"weight": parameter.detach(), "momentum": momentum}


@scheme(**DECLARED)
def muon_over_dp(mesh, weight, gradient, momentum, route):
    def placed(shard):
        return DTensor.from_local(shard.clone(), mesh.device_mesh, [Shard(0)])

    parameter = torch.nn.Parameter(placed(weight))
    parameter.grad = placed(gradient)
    after = after_a_step(parameter, placed(momentum), route)
    return {name: x.to_local() for name, x in after.items()}


print(muon_over_dp.verify(examples=12))

# %%
SIZES = dict(dp=4, a=16, k=3, dtype="float32")
ledger_figure(muon_over_dp.verify(route="owners", **SIZES).ledger, "owners")

# %%
ledger_figure(muon_over_dp.verify(route="sharded", **SIZES).ledger, "sharded")

# %% [markdown]
# ## Each shard for itself
#
# The same step on plain tensors: every rank orthogonalizes its rows. Nothing is sent and nothing raises; the momentum
# is right, the weights move, the loss falls.


# %%
@scheme(**DECLARED)
def muon_of_shards(mesh, weight, gradient, momentum, route):
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    return after_a_step(parameter, momentum.clone(), route)


print(muon_of_shards.verify(dp=4, a=16))

# %% [markdown]
# ## Your turn
#
# Query, key and value weights are often one parameter, one above the other. Are they one matrix to Muon? Compare the
# update of `torch.cat([q, k, v])` with those of q, k and v by themselves, and find the argument of `Muon` that says
# which is meant. The next cell has the answer.

# %%
q, k, v = (torch.randn(heads * 8, 64, generator=torch.Generator().manual_seed(heads)) for heads in (8, 2, 2))


def stepped(rows):
    fused = torch.nn.Parameter(torch.zeros(96, 64))
    fused.grad = torch.cat([q, k, v])
    Muon([fused], lr=1.0, rows=rows).step()
    return fused.detach()


as_one, as_three = stepped(None), stepped((64, 16, 16))
print("cosine of the two updates:", f"{torch.cosine_similarity(as_one.flatten(), as_three.flatten(), dim=0):.3f}")
print("rows=(64, 16, 16) are those of each matrix:", torch.equal(as_three[:64], stepped((64, 32))[:64]))
