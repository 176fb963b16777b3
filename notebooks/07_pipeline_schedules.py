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
# # Pipeline schedules by eye
#
# Seven schedules on paper, what they leave idle and what they keep in memory; what a slow stage or a slow network
# does to them; a schedule of your own as a file, rejected where it is wrong and run where it is right.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from shardproof import CaseSpec, colours
from shardproof import run as on_ranks
from torch_impl.pipelining import Times, draw, read_csv, schedule_order, simulate, stage_to_rank, write_csv
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.schedule import build_pipeline_schedule, executed_actions
from torch_impl.pipelining.simulation import paint

# %% [markdown]
# ## Seven schedules
#
# Four ranks, eight micro-batches. Each rank has one chunk of the model, or two; a bar on top marks the second. All
# have the same work to do: a chunk of a rank that has two is half as long. Numbers are micro-batches.

# %%
P, N = 4, 8


def run(name, p=P, n=N, f=1.0, i=1.0, w=1.0, p2p=0.0):
    chunks = RULES[name].stages or 2
    times = Times(f / chunks, i / chunks, w / chunks, p2p)
    return simulate(schedule_order(name, p, n, chunks), stage_to_rank(p, p * chunks, RULES[name].style), times)


runs = {name: run(name) for name in RULES}
longest = max(timeline.makespan for timeline in runs.values())
figure, axes = plt.subplots(len(runs), 1, figsize=(11, 11), layout="constrained")
for ax, (name, timeline) in zip(axes, runs.items(), strict=True):
    paint(ax, timeline, f"{name}: {timeline.makespan:g} units, {timeline.bubble[0]:.1%} idle")
    ax.set(xlim=(0, longest), xlabel="")
axes[-1].set_xlabel("time; 1 is the forward of one rank's layers")
plt.show()

# %% [markdown]
# ## Bubbles and memory
#
# Idle time as a share of the total, and the most activations that a rank holds at once, in whole ranks' worth of
# layers (a chunk of two counts half). GPipe and LoopedBFS hold all micro-batches; the others let go of them.

# %%
print(f"{'schedule':24}{'idle':>8}   activations held by ranks 0 to 3")
for name, timeline in runs.items():
    chunks = RULES[name].stages or 2
    print(f"{name:24}{timeline.bubble[0]:8.1%}   " + "  ".join(f"{live / chunks:4g}" for live in timeline.peak_live))

# %%
figure, panels = plt.subplots(1, len(runs), figsize=(11, 2.4), sharey=True, layout="constrained")
for panel, (name, timeline) in zip(panels, runs.items(), strict=True):
    chunks = RULES[name].stages or 2
    panel.bar(range(P), [live / chunks for live in timeline.peak_live], color=colours.of_ranks(P), edgecolor="0.4")
    panel.set(xlabel="rank", xticks=range(P))
    panel.set_title(name, fontsize=8)
panels[0].set_ylabel("activations held\n(ranks' worth of layers)")
plt.show()

# %% [markdown]
# More micro-batches make the bubble smaller. How fast differs by kind of schedule.

# %%
counts = (8, 16, 32, 64)
idle = {name: tuple(100 * run(name, n=n).bubble[0] for n in counts) for name in RULES}
alike = {}
for name, shares in idle.items():  # schedules whose lines are one and the same
    alike.setdefault(tuple(round(share, 6) for share in shares), []).append(name)
figure, panel = plt.subplots(figsize=(7, 3.4), layout="constrained")
for number, (shares, names) in enumerate(alike.items()):
    panel.plot(counts, shares, **colours.line(number), label=", ".join(names))
panel.set(xscale="log", xlabel="micro-batches", ylabel="idle, %", ylim=(0, None))
panel.set_xticks(counts, counts)
panel.minorticks_off()
panel.legend(fontsize=9)
plt.show()

# %% [markdown]
# ## What "zero bubble" needs
#
# Weight gradients fill the time in which a rank would wait. That works out where forward and both halves of the
# backward take the same. Attention makes the input gradient dearer; then the fill no longer fits. And messages are
# not free: each hop waits for one, there and back.

# %%
print(f"{'schedule':24}{'f=i=w':>9}{'i=1.5':>9}{'p2p=0.2':>9}")
for name in RULES:
    same, dearer, slower = (max(run(name, **times).bubble) for times in ({}, {"i": 1.5, "w": 0.5}, {"p2p": 0.2}))
    print(f"{name:24}{same:9.1%}{dearer:9.1%}{slower:9.1%}")

# %% [markdown]
# A head with a large vocabulary makes the last stage slow, and all wait for it.

# %%
slow = Times(f=[1, 1, 1, 2], i=[1, 1, 1, 2], w=[1, 1, 1, 2])
draw(simulate(schedule_order("1F1B", P, N, 1), range(P), slow), "1F1B, the last stage twice as long")

# %% [markdown]
# ## As text
#
# What `shardproof schedule zbv --pp 4 --microbatches 4` prints.

# %%
print(simulate(schedule_order("ZBVZeroBubble", 4, 4, 2), stage_to_rank(4, 8, "v")))

# %% [markdown]
# ## A schedule of your own
#
# One row for each rank, one action in each cell. This one is 1F1B on two ranks with its backwards split in two, and
# weight gradients put off to where ranks would wait.

# %%
mine = """\
0F0,0F1,0I0,0F2,0I1,0W0,0I2,0W1,0W2
1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2
"""
Path("mine.csv").write_text(mine)
read = read_csv("mine.csv")
ours = simulate(read.order, read.stage_to_rank)
known = simulate(schedule_order("1F1B", 2, 3, 1), read.stage_to_rank)
figure, axes = plt.subplots(2, 1, figsize=(11, 3.4), layout="constrained")
paint(axes[0], known, f"1F1B: {known.makespan:g} units, activations {known.peak_live}")
paint(axes[1], ours, f"mine.csv: {ours.makespan:g} units, activations {ours.peak_live}")
axes[1].set_xlim(axes[0].get_xlim())
plt.show()

# %% [markdown]
# A file that cannot run is rejected, and the message names the cell.

# %%
for old, new in (("1F1,1I1", "1I1,1F1"), ("0F2,", ""), ("0F0,", "1F0,"), ("0W2", "0w2")):
    Path("wrong.csv").write_text(mine.replace(old, new))
    try:
        read_csv("wrong.csv")
    except ValueError as rejection:
        print(str(rejection).partition("wrong.csv' ")[2])

# %% [markdown]
# ## Run
#
# The file as torch runs it, on two ranks of the lockstep engine, with two layers and gradients by autograd. What
# each rank did is noted; it is what was drawn.


# %%
def layer(stage):
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def batch():
    return torch.linspace(-1, 1, 24).view(6, 4)


def step(mesh, case):
    rank = mesh.rank("pp")
    stage = PipelineStage(layer(rank), rank, 2, torch.device("cpu"), group=mesh["pp"])
    schedule = build_pipeline_schedule("mine.csv", None, 2, 6, [stage], lambda y, target: (y - target).square().sum())
    with executed_actions([stage]) as actions:
        schedule.step(*([batch()] if rank == 0 else []), **({"target": batch()} if rank == 1 else {}))
    return [str(action) for action in actions], stage.submod[0].weight.grad.tolist()


ranks = on_ranks(step, CaseSpec("mine", {"pp": 2}))
for rank, (actions, _) in enumerate(ranks.results):
    print(f"rank {rank}:", *actions)
    assert actions == [str(event.action) for event in ours.of(rank)]

# %% [markdown]
# The gradients are those of one device that takes the micro-batches one after the other, bit by bit.

# %%
unsplit = nn.Sequential(layer(0), layer(1))
for part in batch().split(2):
    (unsplit(part) - part).square().sum().backward()
for stage, (_, gradient) in enumerate(ranks.results):
    print(f"stage {stage}: equal bits", gradient == unsplit[stage][0].weight.grad.tolist())

# %% [markdown]
# Any schedule can be written as a file, to start from.

# %%
write_csv(schedule_order("DualPipeV", 2, 4, 2), "dualpipev.csv")
print(Path("dualpipev.csv").read_text())

# %% [markdown]
# ## Your turn
#
# 1. How many micro-batches, in multiples of four, does each schedule need on four ranks to be idle for less than 5 %?
# 2. A message takes a short time. How many of them, one after the other, does each schedule wait for with eight
#    micro-batches? Why does 1F1B, as idle as GPipe, wait for more?
#
# The next cell has the answers.

# %%
for name in RULES:
    enough = next(n for n in range(2 * P, 100, P) if max(run(name, n=n).bubble) < 0.05)
    waits = round((run(name, p2p=0.001).makespan - run(name).makespan) / 0.001)
    print(f"{name:24}1. {enough:3} micro-batches   2. {waits:3} messages")
