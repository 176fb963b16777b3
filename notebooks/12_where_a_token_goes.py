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
# # Where a token goes
#
# The experts of a mixture of experts are sharded over `ep`. A router chooses k experts for each token. The token
# travels to the ranks of its experts, and each of these ranks sends back the sum of its experts' outputs. This notebook
# shows who sends how much to whom and which exchange sends less. It verifies the layer against a reference that runs
# every expert on every token, and then loses a gradient on purpose. Everything runs on this CPU.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import matplotlib.pyplot as plt
import torch

from jax_ref import expert_parallel as one_device
from shardproof import ledger_figure, rank_legend, scheme, tiles, values
from torch_impl.expert_parallel import fewest_exchange_bytes, routed_experts, softmax_top_k

EP, E, K, T = 4, 8, 2, 24  # ranks, experts, experts of a token, tokens of all ranks

# %% [markdown]
# ## From choices to messages
#
# Each rank has T / EP tokens and E / EP experts. Below, a column is a token, its two rows are its choices, the number
# is the expert, and the colour is the rank that has it. Black lines separate the tokens of the ranks.

# %%
logits = torch.randn(T, E, generator=torch.Generator().manual_seed(3))
gates, experts, probabilities = softmax_top_k(logits, K, norm_topk_prob=True)
rank_of_expert = experts // (E // EP)

figure, panel = plt.subplots(figsize=(10.5, 1.7), layout="constrained")
numbers = [[str(expert) for expert in row] for row in experts.T.tolist()]
tiles(panel, rank_of_expert.T, EP, text=numbers, title="the experts of each token", xlabel="token")
for rank in range(1, EP):
    panel.axvline(rank * T // EP - 0.5, color="black", linewidth=1.5)
panel.set_ylabel("choice")
rank_legend(figure, EP, "expert on rank")
plt.show()

# %% [markdown]
# Rank i sends to rank j those of its tokens that have an expert on j, each token once, however many of its experts are
# there. This is an uneven all-to-all. The counts travel first, so that each rank knows how many rows to expect.


# %%
def count_sent(rank_of_expert):
    """At [i, j] the number of rank i's tokens that have an expert on rank j."""
    of_rank = rank_of_expert.view(EP, -1, rank_of_expert.shape[1])
    return torch.stack([(of_rank == j).any(-1).sum(1) for j in range(EP)], 1)


counts = count_sent(rank_of_expert)
print("rows from rank (row) to rank (column):", *counts.tolist(), sep="\n  ")
print("rows that travel to another rank or stay:", counts.sum().item(), "for", experts.numel(), "choices")
print("rows that the experts of each rank compute:", rank_of_expert.flatten().bincount(minlength=EP).tolist())

# %% [markdown]
# ## Which exchange sends less
#
# A token travels to the ranks of its experts, and a sum comes back from each. This traffic grows with k until every
# rank has an expert of every token. The alternative gathers all tokens on all ranks and scatters the sums, whatever the
# choices are; its sums travel in float32. If tokens have two bytes per number, the alternative always sends more. With
# four bytes both send about the same once every token goes to every rank.

# %%
figure, panels = plt.subplots(1, 2, figsize=(10.5, 3), sharey=True, layout="constrained")
for panel, ranks in zip(panels, (4, 16), strict=True):
    several = range(1, 33)
    costs = [
        fewest_exchange_bytes(tokens=4096, k=k, width=2048, num_experts=64, ep_size=ranks, element_size=2)
        for k in several
    ]
    panel.plot(several, [cost.all_to_all / 1e6 for cost in costs], label="all_to_all")
    panel.plot(several, [cost.all_gather / 1e6 for cost in costs], label="all_gather")
    panel.set(title=f"4096 tokens of width 2048 over {ranks} ranks", xlabel="experts of a token", yscale="log")
panels[0].set_ylabel("MB to other ranks, one layer")
panels[0].legend()
plt.show()

# %% [markdown]
# ## The layer, verified
#
# The reference has no dispatch: it runs every expert on every token and multiplies by a gate, which is 0 if the expert
# was not chosen. The layer must have the reference's values and its gradients of tokens, router logits and both
# weights. Each rank returns the output of its own tokens; their number differs between ranks, and may be 0.


# %%
def on_one_device(x, logits, gate_up, down, k):
    gates, experts, _ = one_device.softmax_top_k(logits, k, norm_topk_prob=True)
    return one_device.mixture(x, gates, experts, gate_up, down)


DECLARED = dict(
    reference=on_one_device,
    mesh={"ep": (1, 2, 4)},
    inputs={"x": "t/ep:ragged d", "logits": "t/ep:ragged e", "gate_up": "e/ep d two f", "down": "e/ep f d"},
    outputs="t/ep:ragged d",
    dims={"e": (4, 8), "d": (4,), "f": (4,), "two": (2,)},
    draw=dict.fromkeys(("x", "logits", "gate_up", "down"), values("normal")),
    options={"k": (2, 1, 3)},
    roundings=6,
    reduction=("d", "e", "f"),
)


@scheme(**DECLARED)
def mixture_over_ep(mesh, x, logits, gate_up, down, k):
    gates, experts, _ = softmax_top_k(logits, k, norm_topk_prob=True)
    return routed_experts(x, gates, experts, gate_up.flatten(2), down, mesh["ep"])


print(mixture_over_ep.verify(examples=12))

# %% [markdown]
# One case on four ranks: the counts, the rows to their experts, the rows back, and the same for the gradients.

# %%
report = mixture_over_ep.verify(ep=4, e=8, k=2, dtype="float32")
ledger_figure(report.ledger, "one layer of experts")

# %% [markdown]
# ## A gradient that is lost
#
# The gates leave the router with a `detach`, as they would if the weights of the sum were computed under `no_grad`.
# Every output stays as it is, the experts learn, and the router learns nothing.


# %%
@scheme(**DECLARED)
def mixture_without_a_router_gradient(mesh, x, logits, gate_up, down, k):
    gates, experts, _ = softmax_top_k(logits, k, norm_topk_prob=True)
    return routed_experts(x, gates.detach(), experts, gate_up.flatten(2), down, mesh["ep"])


print(mixture_without_a_router_gradient.verify(ep=2, e=4, k=2))

# %% [markdown]
# ## Your turn
#
# 1. With one expert for each token and gates divided by their sum (`k=1`, `norm_topk_prob=True`) the mistake above is
#    not seen. Why?
# 2. All tokens choose expert 0. How many rows does rank 0 compute, and what do the other ranks send?
#
# The next cell has the answers.

# %%
single, first, _ = softmax_top_k(logits, 1, norm_topk_prob=True)
print("1. a gate divided by itself is 1 and has no gradient:", single.unique().tolist())
lonely = torch.zeros_like(experts[:, :1])
print("2. rows from rank to rank:", count_sent(lonely // (E // EP)).tolist())
