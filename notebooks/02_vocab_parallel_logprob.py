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
# # From softmax to a chunked vocab-parallel log-probability
#
# The last layer of a language model makes the largest tensor of a training step: one logit for each token and each of
# 100,000 and more ids. Its columns are sharded over the ranks. This notebook divides the log-probability of a token
# into the part that one rank can compute alone and the numbers that the ranks must exchange. It combines them in one
# collective, finds a wrong gradient, and counts the cost in bytes and memory.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown

from shardproof import CaseSpec, Cost, LivePeak, colours, ids, parse, run, scheme, values
from shardproof import figure as spec_figure
from torch_impl.collectives import all_gather, all_reduce, all_reduce_max
from torch_impl.vocab_parallel import vocab_parallel_logprob

# %% [markdown]
# ## Who owns which column
#
# Each rank of `tp` has all tokens and some columns of their logits. A target is an id, which exactly one rank owns, or,
# for padding, none. The log-probability is the same number on every rank, and so is its gradient: `tp=I`.

# %%
axes = ("tp",)
tensors = {"logits": parse("b s v/tp", axes), "-> logprob": parse("b s tp=I", axes)}
spec_figure(tensors, {"b": 1, "s": 6, "v": 16}, {"tp": 4})

# %% [markdown]
# ## A softmax over shards
#
# $$\log p_t = z_t - \mathrm{lse}, \qquad \mathrm{lse} = \log \sum_v e^{z_v}$$
#
# A rank that has some of the columns knows the largest of them, $m_r$, and $R_r = \sum_v e^{z_v - m_r} - 1$, the sum
# of all other terms; in code `row_max_r` and `row_sum_m1_r`. From these two numbers of every rank, any rank can compute
# the full softmax:
#
# $$m = \max_r m_r, \qquad 1 + R = \sum_r e^{m_r - m} (1 + R_r), \qquad \mathrm{lse} = m + \log(1 + R)$$

# %%
row = torch.tensor([0.3, 2.0, -1.0, 0.0, 5.0, 1.0, 5.0, -2.0, 0.5, 0.5, 0.5, 0.5, -torch.inf, 1.0, 4.0, 3.0])
row_max_r = torch.stack([shard.max() for shard in row.chunk(4)])
row_sum_m1_r = torch.stack([(shard - shard.max()).exp().sum() - 1 for shard in row.chunk(4)])
row_max = row_max_r.max()
global_lse = row_max + ((row_max_r - row_max).exp() * (1 + row_sum_m1_r)).sum().log()
print("row_max_r  ", row_max_r.tolist())
print("global lse ", global_lse.item())
print("full lse   ", row.logsumexp(0).item())

# %% [markdown]
# ## The reference
#
# JAX, unsharded arrays, no rank in sight. An id outside the vocabulary, as -100 for padding, scores 0 and has no
# gradient.


# %%
def reference(logits, target):
    inside = (target >= 0) & (target < logits.shape[-1])
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.where(inside, target, 0)[..., None], -1)[..., 0]
    return jnp.where(inside, logprob, 0.0)


# %% [markdown]
# ## In chunks, with one collective
#
# Three numbers of each token travel: $m_r$, $R_r$ and the target's logit from its owner. They are gathered once, after
# the last chunk. Backward needs no collective at all: with the saved lse every rank computes the softmax of its own
# columns again, $\partial z = g\,(1[v = t] - p)$, a chunk at a time.


# %%
class ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, start, chunk_size, group):
        width, statistics = logits.shape[-1], []
        column = target - start
        owned = (column >= 0) & (column < width)
        for z, t, is_local in zip(*(x.split(chunk_size, 1) for x in (logits.float(), column, owned)), strict=True):
            row_max = z.amax(-1)
            row_sum_m1 = (z - row_max[..., None]).exp().sum(-1) - 1
            z_t = z.gather(-1, t.clamp(0, width - 1)[..., None])[..., 0]
            statistics.append(torch.stack([row_max, row_sum_m1, torch.where(is_local, z_t, torch.inf)]))
        of_ranks = all_gather(torch.cat(statistics, 2)[None], group, out="I", dim=0)  # the only collective
        row_max_r, row_sum_m1_r, z_t = of_ranks.unbind(1)
        row_max = row_max_r.amax(0)
        lse = row_max + ((row_max_r - row_max).exp() * (1 + row_sum_m1_r)).sum(0).log()
        z_t = z_t.amin(0)
        column = torch.where(owned, column, -1)
        column = torch.where(z_t == torch.inf, -2, column)  # out of vocabulary
        ctx.save_for_backward(logits, column, lse)
        ctx.chunk_size = chunk_size
        return torch.where(z_t == torch.inf, 0.0, z_t - lse)

    @staticmethod
    def backward(ctx, g):
        logits, column, lse = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        chunks = zip(*(x.split(ctx.chunk_size, 1) for x in (gradient, logits, column, lse, g)), strict=True)
        for out, z, t, lse_, g_ in chunks:
            ours = torch.arange(z.shape[-1]) == t[..., None]
            dz = (ours.float() - (z.float() - lse_[..., None]).exp()) * g_[..., None]
            out.copy_(torch.where(t[..., None] == -2, 0.0, dz))
        return gradient, None, None, None, None


declared = dict(
    reference=reference,
    mesh={"tp": (1, 2, 4)},
    inputs={"logits": "b s v/tp", "target": "b s"},
    outputs="b s tp=I",
    draw={"logits": values("normal", "ties"), "target": ids("v", ignore=-100)},
    rank_options={"chunk_size": (1, 2, 5)},  # each rank its own
    reduction=("v",),
    cost=lambda c: Cost(forward={"all_gather": (1, 3 * c.b * c.s * 4)}),
)


@scheme(**declared)
def chunked_logprob(mesh, logits, target, chunk_size):
    start = mesh.rank("tp") * logits.shape[-1]
    return ChunkedLogprob.apply(logits, target, start, chunk_size, mesh["tp"])


print(chunked_logprob.verify(examples=10))

# %% [markdown]
# The chunk size is local to a rank: every rank draws its own, and the ledger still has the one declared collective.

# %%
for chunk_size in (1, 2, 5):
    report = chunked_logprob.verify(tp=2, b=1, s=8, v=8, chunk_size=chunk_size, dtype="float32")
    print(f"chunk_size={chunk_size}:", "; ".join(str(row) for row in report.ledger.of(0)))

# %% [markdown]
# ## A wrong gradient
#
# Many implementations mask the one-hot of a target outside a rank's shard and are done. For a token whose target is
# outside the vocabulary, the term $-p$ then stays: every padded position pushes all logits down. The loss of such a
# position is masked later, so the value of the loss does not show the mistake.


# %%
class PaddingPushes(ChunkedLogprob):
    @staticmethod
    def backward(ctx, g):
        logits, column, lse = ctx.saved_tensors
        one_hot = torch.arange(logits.shape[-1]) == column[..., None]
        p = (logits.float() - lse[..., None]).exp()
        return ((one_hot.float() - p) * g[..., None]).to(logits.dtype), None, None, None, None


@scheme(**declared)
def padding_pushes(mesh, logits, target, chunk_size):
    start = mesh.rank("tp") * logits.shape[-1]
    return PaddingPushes.apply(logits, target, start, chunk_size, mesh["tp"])


padding_pushes.verify(examples=10)

# %% [markdown]
# Found at the first padded token that was drawn, with the output right and its gradient not.
#
# ## What it costs
#
# Four ways to the same number, forward and backward, on two ranks. Memory is the peak of all tensors besides the
# inputs, in units of one rank's logits: 4 MiB of bfloat16.


# %%
def gathered_logits(mesh, logits, target):
    full = all_gather(logits, mesh["tp"], out="I", dim=2)
    return torch.log_softmax(full.float(), -1).gather(-1, target[..., None])[..., 0]


def three_reductions(mesh, logits, target):
    row_max = all_reduce_max(logits.float().amax(-1), mesh["tp"])
    shifted = logits.float() - row_max[..., None]
    is_local = target[..., None] == mesh.rank("tp") * logits.shape[-1] + torch.arange(logits.shape[-1])
    score = all_reduce(torch.where(is_local, shifted, 0.0).sum(-1), mesh["tp"])
    return score - all_reduce(shifted.exp().sum(-1), mesh["tp"]).log()


def ours(mesh, logits, target, **options):
    start = mesh.rank("tp") * logits.shape[-1]
    owned = dict(vocab_start_index=start, vocab_end_index=start + logits.shape[-1])
    return vocab_parallel_logprob(logits, target, mesh["tp"], chunk_size=2, **owned, **options)


def in_place(mesh, logits, target):
    return ours(mesh, logits, target, inplace_gradient=True)


def peak(way):
    def body(mesh, case):
        generator = torch.Generator().manual_seed(mesh.rank("tp"))
        logits = torch.randn(1, 256, 8192, generator=generator).bfloat16().requires_grad_()
        target = torch.arange(256)[None] * 61 % (2 * logits.shape[-1])
        with LivePeak() as memory:
            logprob = way(mesh, logits, target)
            torch.autograd.grad(logprob, logits, torch.ones_like(logprob))
        return memory.most / logits.nbytes

    ranks = run(body, CaseSpec(scheme="cost", mesh={"tp": 2}))
    rows = ranks.ledger.of(0)
    return max(ranks.results), rows


ways = {
    "logits gathered, then unsharded": gathered_logits,
    "three reductions": three_reductions,
    "vocab_parallel_logprob": ours,
    "the same, gradient in place": in_place,
}
measured = {name: peak(way) for name, way in ways.items()}


def line(name):
    memory, rows = measured[name]
    of_phase = {phase: [row for row in rows if row.phase == phase] for phase in ("fwd", "bwd")}
    operations = [", ".join(row.op for row in rows) or "none" for rows in of_phase.values()]
    return f"| {name} | {operations[0]} | {operations[1]} | {sum(row.payload for row in rows):,} | {memory:.2f} |"


head = "| | forward | backward | bytes of a rank | memory |\n|---|---|---|---|---|\n"
Markdown(head + "\n".join(line(name) for name in ways))

# %%
figure, (memory_panel, sent) = plt.subplots(1, 2, figsize=(10, 2.4), sharey=True, layout="constrained")
bars = memory_panel.barh(list(ways), [memory for memory, _ in measured.values()], color=colours.LINES[0])
memory_panel.bar_label(bars, fmt="%.2f", padding=3)
memory_panel.set(xlim=(0, 15), xlabel="memory at the worst moment, in one rank's logits")
kibibytes = [sum(row.payload for row in rows) / 1024 for _, rows in measured.values()]
bars = sent.barh(list(ways), kibibytes, color=colours.LINES[2])
sent.bar_label(bars, fmt="%.0f", padding=3)
sent.set(xscale="log", xlim=(1, 2e4), xlabel="KiB that a rank hands to collectives")
memory_panel.invert_yaxis()
plt.show()

# %% [markdown]
# ## Your turn
#
# 1. The target's logit is 0, and the only other logit, on the other rank, is -20. What does `log(1 + R)` give in
#    float32? What can be computed instead if ranks send $R$ and not $1 + R$?
# 2. The vocabulary grows from 8 ids to 64. What does the ledger count then? If 8 ranks gathered bfloat16 logits of
#    131,072 ids instead, by which factor would the bytes of one rank grow?
#
# The next cell has the answers.

# %%
pair = torch.tensor([[[0.0, -20.0]]])
R = pair[0, 0, 1].exp()
sure = run(
    lambda mesh, case: ours(mesh, pair.chunk(2, -1)[mesh.rank("tp")], torch.zeros(1, 1, dtype=torch.long)).item(),
    CaseSpec("sure", {"tp": 2}),
)
print("1. float64:               ", torch.log_softmax(pair.double(), -1)[0, 0, 0].item())
print("   -log(1 + R), -log1p(R):", -(1 + R).log().item(), -R.log1p().item())
print("   vocab_parallel_logprob:", *sure.results)
for v in (8, 64):
    report = chunked_logprob.verify(tp=2, b=1, s=8, v=v, chunk_size=2, dtype="float32", examples=1)
    assert report.ok
    print(f"2. v={v:<2} {report.ledger.cost(0, 'fwd')}")
print(f"   of 131,072 ids on 8 ranks: {2 * 131072 // 8 / (3 * 4):,.0f} times as many bytes for each token")
