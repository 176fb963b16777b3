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
# # One run, every axis
#
# A small hybrid language model (attention and Mamba2 layers) trained on several meshes. The curve must not know which:
# every loss, gradient and weight is compared with one device. Then a bug is injected into a layer, and a trace of the
# first step names the module. Everything runs on this CPU, on the deterministic engine.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import matplotlib.pyplot as plt

from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.patched_modules import PatchedModules
from shardproof import colours
from shardproof.training import ReferenceSteps, Run, first, followed, trace, trace_reference

# %% [markdown]
# ## Four meshes
#
# Two streams of packed documents of unlike lengths, five steps of AdamW, in float64. The reference is flax and optax on
# one device, made once for all runs. One rule makes all factorisations equal: the loss is the sum of the token losses
# over the count of valid tokens of the full step.

# %%
SMALL = {"streams": 2, "length": 48, "steps": 5}
RUNS = {
    "dp_shard=2": Run.on({"dp_shard": 2}, **SMALL),
    "cp=2, ring, heads exchanged": Run.on({"cp": 2}, **SMALL),
    "cp=2 tp=2, Ulysses, states passed": Run.on({"cp": 2, "tp": 2}, mamba="state", attention="ulysses", **SMALL),
    "pp=2, 1F1B": Run.on({"pp": 2}, **SMALL),
}
reference_steps = ReferenceSteps()
judged = {name: followed(run, reference_steps, "lockstep") for name, run in RUNS.items()}

print(f"{'mesh':36}{'loss of step 5':>20}{'largest error / budget':>26}")
for name, steps in judged.items():
    print(f"{name:36}{steps[-1].loss:20.15f}{max(step.worst_ratio for step in steps):26.2g}")
print(f"{'one device':36}{next(iter(judged.values()))[-1].want:20.15f}")

# %% [markdown]
# The error is that of the worst of all numbers: loss, norm, every parameter's gradient and weight. Above, the curves
# lie on one another; below, on a log axis, how far their losses part. The grey line is what rounding accounts for.

# %%
figure, (curves, apart) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
steps = next(iter(judged.values()))
at = [step.index + 1 for step in steps]
curves.plot(at, [step.want for step in steps], color="0.75", linewidth=7, label="one device (JAX)")
for number, (name, steps) in enumerate(judged.items()):
    curves.plot(at, [step.loss for step in steps], **colours.line(number), label=name)
    apart.semilogy(at, [max(step.rows["loss"].error, 1e-17) for step in steps], **colours.line(number))
apart.semilogy(at, [step.rows["loss"].budget for step in steps], color="0.6", linewidth=3, label="budget")
curves.set(ylabel="loss, nats per byte")
apart.set(xlabel="optimiser step", ylabel="relative difference\n(1e-17: none)", xticks=at)
figure.legend(loc="outside right upper", frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# ## A bug in one layer
#
# From the catalogue of injected bugs: one line of a layer, changed in memory. What is printed is the patch, and what
# became of the first steps. The first loss is right.

# %%
bug = next(bug for bug in CATALOGUE if bug.name == "a layer whose residual has no gradient")
injected = PatchedModules.of(bug, [trace.__module__, followed.__module__])
buggy_trace, buggy_run = injected.modules[0].trace, injected.modules[1].followed
run = RUNS["cp=2, ring, heads exchanged"]
with injected:
    broken = buggy_run(run, reference_steps, "lockstep")
print(f"{bug.at}\n- {bug.old}\n+ {bug.new}\n")
for step in broken[:3]:
    wrong = ", ".join(name for name in step.wrong[:3]) or "nothing"
    print(f"step {step.index + 1}: loss {step.loss:.12f}, one device {step.want:.12f}; wrong: {wrong}")

# %% [markdown]
# ## Where it first differs
#
# `trace` records what enters and leaves every module, forward and backward, on both sides; the first tensor beyond its
# budget names the module. `shardproof trace --mesh cp=2` does the same from a terminal. Each stream is a call of its
# own, so its tensors come twice.

# %%
reference = trace_reference(Run(mesh={}, **SMALL))
healthy = trace(run, reference, "lockstep")
with injected:
    lines = buggy_trace(run, reference, "lockstep")
line = first(lines)
print(f"healthy: {len(healthy)} tensors, at most {max(each.ratio for each in healthy):.2g} of the budget")
print(f"with the bug: first to differ: {line.name}; look in {line.home}", *line.notes, sep="\n  ")

# %%
figure, panel = plt.subplots(figsize=(9, 3), layout="constrained")
for number, (name, traced) in enumerate({"healthy": healthy, "with the bug": lines}.items()):
    style = {**colours.line(number), "linestyle": "", "markersize": 3}
    panel.semilogy([max(each.error, 1e-17) for each in traced], **style, label=name)
panel.semilogy([each.budget for each in healthy], color="0.6", linewidth=1, label="budget")
at = lines.index(line)
panel.annotate(line.name, (at, line.error), (at - 5, 1e-6), ha="right", fontsize=9, arrowprops={"arrowstyle": "->"})
backward = next(i for i, each in enumerate(lines) if each.phase != "forward")
panel.axvline(backward - 0.5, color="black", linewidth=0.8, linestyle=":")
panel.text(backward - 2, 1e-9, "forward", ha="right", fontsize=9)
panel.text(backward + 2, 1e-9, "backward", fontsize=9)
panel.set(xlabel="tensor, in the order of execution", ylabel="relative distance", ylim=(1e-18, 1e2))
panel.legend(loc="center left", fontsize=9)
plt.show()

# %% [markdown]
# ## Your turn
#
# 1. In the first step with the bug the loss is right and most gradients are wrong. Which gradients are right, and where
#    in the model are their parameters?
# 2. Train with the bug on `dp_shard=2` as well, and compare this run with that on `cp=2`. Is the bug found without one
#    device?
#
# The next cell has the answers.

# %%
gradients = {name.removeprefix("gradient/"): row.ok for name, row in broken[0].rows.items() if "gradient/" in name}
right = [name for name, is_right in gradients.items() if is_right]
modules = sorted({name.rpartition(".")[0] for name in right})
print(f"1. {len(right)} of {len(gradients)}, those of", ", ".join(modules))
with injected:
    elsewhere = buggy_run(RUNS["dp_shard=2"], reference_steps, "lockstep")
pairs = list(zip(broken, elsewhere, strict=True))
print(f"2. losses of five steps: {max(abs(one.loss - other.loss) for one, other in pairs):.0e} from mesh to mesh,")
print(f"   {max(abs(one.loss - one.want) for one in broken):.2f} from one device")
