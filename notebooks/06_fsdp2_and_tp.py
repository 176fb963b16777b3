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
# # One model, four meshes, the same loss
#
# A small Qwen3 under FSDP2 and tensor parallelism, compared with JAX on one device; then a mistake that no loss curve
# shows, and how it is found. Everything runs on this CPU.

# %%
# %matplotlib inline
import logging
import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import jax
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.func import functional_call

from parity_tests.parallelizer.families import Chosen, empty
from parity_tests.parallelizer.reference import reference
from parity_tests.parallelizer.training import Training, deviation, on_mesh
from shardproof import colours, parse, scheme, values
from shardproof import figure as spec_figure
from torch_impl.parallelizer import (
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    nvfsdp_strategy_parallelize,
    translate_to_torch_parallel_style,
)
from torch_impl.parallelizer.tp_plan import apply_plan

logging.disable(logging.WARNING)  # DTensor's advice on how to gather faster
warnings.filterwarnings("ignore", message="IProgress not found")  # of a progress bar that nothing here shows
QWEN3 = Chosen("qwen3", tied=True)

# %% [markdown]
# ## The plan that the model brings along
#
# Each entry is a style: how the module's parameters are sharded, and what happens to its input and output. The
# vocabulary of the embedding is sharded as that of the head: they are one parameter, and stay one.

# %%
for key, style in get_hf_tp_shard_plan(empty(QWEN3, device="meta")).items():
    print(f"{key:34} {type(style).__name__}")

# %% [markdown]
# ## Who holds what of two weights
#
# FSDP2 shards every parameter by rows, tensor parallelism some by rows and some by columns. On a mesh of both, a weight
# that is sharded by rows is sharded twice: `dp_shard` shards what `tp` left. Strips show one dim each.

# %%
AXES = ("dp_shard", "tp")
weights = {"up_proj": "f/tp/dp_shard d", "down_proj": "d/dp_shard f/tp", "q_norm": "p/dp_shard tp=I"}
tensors = {f"{name}.weight": parse(text, AXES) for name, text in weights.items()}
spec_figure(tensors, {"f": 16, "d": 16, "p": 16}, {"dp_shard": 2, "tp": 2})

# %% [markdown]
# ## Four meshes
#
# Three steps of AdamW on 12 rows, two microbatches each. A rank's loss is its share of the sum of token losses over all
# tokens, so the mesh does not matter. The reference is a decoder in JAX that takes its parameters by name.


# %%
def sharded(model, mesh):
    """FSDP2, after the model's plan where the mesh has an axis for it."""
    plan = get_hf_tp_shard_plan(model) if "tp" in mesh.mesh_dim_names else None
    return fsdp2_strategy_parallelize(model, mesh, tp_shard_plan=plan)


def worst(ranks, want):
    """The largest deviation of any parameter, on any rank."""
    return max(deviation(rank[name], want[name]) for rank in ranks for name in want)


training = Training(QWEN3, accumulation=2)
want = reference(QWEN3, training.batches)
MESHES = ({"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})

print(f"{'':36} loss of step 1       gradients   weights after 3 steps")
print(f"{'JAX, one device':36} {float(want.steps[0].loss):.16f}")
for mesh in MESHES:
    ranks, _ = on_mesh(mesh, training, sharded)
    loss = sum(rank.losses[0] for rank in ranks if rank.is_counted)
    gradients = worst([rank.gradients for rank in ranks], want.steps[0].gradients)
    weights = worst([rank.weights for rank in ranks], want.parameters)
    print(f"{mesh!s:36} {loss:.16f}   {gradients:.1e}     {weights:.1e}")

# %% [markdown]
# The strategies of Megatron-FSDP are the same contract: what is sharded between steps differs, the gradients do not.

# %%
LAYER = "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer"
for strategy in ("optim_grads_params", "optim_grads", "optim", "no_shard"):

    def sharded_by_strategy(model, mesh, strategy=strategy):
        return nvfsdp_strategy_parallelize(model, mesh, [LAYER], None, strategy)

    ranks, ledger = on_mesh({"dp_shard": 2}, training, sharded_by_strategy)
    sent = {op: calls for op, (calls, _) in ledger.cost(0, "bwd").items()}
    print(f"{strategy:20} gradients {worst([r.gradients for r in ranks], want.steps[0].gradients):.1e}   {sent}")

# %% [markdown]
# ## The bug: two norms left out of the plan
#
# Qwen3 normalises each head's query and key. The weights of these norms are replicated, but a rank's norms see
# its heads alone, so the gradient is a sum over the ranks. A plan that leaves them out computes every logit right.


# %%
def sharded_without_norms(model, mesh):
    plan = {key: style for key, style in get_hf_tp_shard_plan(model).items() if "norm" not in key}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fsdp2_strategy_parallelize(model, mesh, tp_shard_plan=plan)
    WARNINGS.extend(str(warning.message) for warning in caught)
    return model


WARNINGS = []
once = Training(QWEN3, steps=1)
(step,) = reference(QWEN3, once.batches).steps
deviations = {}
for name, parallelize in (("with the norms", sharded), ("without", sharded_without_norms)):
    ranks, _ = on_mesh({"tp": 2}, once, parallelize)
    loss = ranks[0].losses[0]
    deviations[name] = {each: deviation(ranks[0].gradients[each], step.gradients[each]) for each in step.gradients}
    worst_gradient = max(deviations[name].values())
    print(f"{name:16} loss {abs(loss / float(step.loss) - 1):.0e} off, gradients {worst_gradient:.0e} off")
print("\n" + WARNINGS[0])

# %%
figure, panel = plt.subplots(figsize=(9, 3), layout="constrained")
names = list(step.gradients)
for number, (label, of_plan) in enumerate(deviations.items()):
    drawn = {**colours.line(number), "linestyle": "", "markersize": 8 - 3 * number}
    panel.semilogy(range(len(names)), [max(of_plan[name], 1e-17) for name in names], **drawn, label=label)
for number, name in enumerate(names):
    if deviations["without"][name] > 1e-10:
        layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
        label = f"layer {layer}: {part.rpartition('.')[2]}"
        panel.annotate(label, (number, 3e-3), rotation=90, ha="center", va="top", fontsize=9)
panel.set(ylabel="gradient: relative distance\nfrom one device", xlabel="parameter, in the model's order")
panel.set(ylim=(1e-17, 100))
panel.legend(loc="center left", title="plan")
plt.show()

# %% [markdown]
# ## Found by `verify`
#
# The norm alone, as a scheme: its input is sharded over tp by heads, its weight is the same on each rank, and so must
# be its gradient. `replicate` is the style of modules that see the same input on each rank, which this one does not.


# %%
class Norm(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def norm(x, weight):
    return weight[None, None] * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def under(style, mesh, x, weight):
    module = Norm(weight)
    apply_plan(module, {"": translate_to_torch_parallel_style(style)}, mesh.device_mesh)
    replicated = DTensor.from_local(weight, mesh.device_mesh, [Replicate()], run_check=False)
    return functional_call(module, {"weight": replicated}, (x,))


DECLARED = dict(
    reference=norm,
    mesh={"tp": (2,)},
    inputs={"x": "b h/tp p", "weight": "p tp=I"},
    outputs="b h/tp p",
    draw={"x": values("normal"), "weight": values("normal")},
    dtypes=("float64",),
    roundings=4,
)


@scheme(**DECLARED)
def norm_that_is_replicated(mesh, x, weight):
    return under("replicate", mesh, x, weight)


@scheme(**DECLARED)
def norm_of_local_heads(mesh, x, weight):
    return under("replicated_with_grad_allreduce", mesh, x, weight)


print(norm_that_is_replicated.verify(b=2, h=4, p=3, examples=3))

# %%
print(norm_of_local_heads.verify(b=2, h=4, p=3, examples=3))

# %% [markdown]
# ## Your turn
#
# 1. Take the gradient of one `q_norm` under the plan that leaves the norms out. What does each rank have, and what
#    would a sum over `tp` give? Why is a mean not right?
# 2. `up_proj` is `f/tp/dp_shard d`. Rank 1 is `dp_shard=0, tp=1`: which of the 16 rows does it have? Which would it
#    have under `f/dp_shard/tp d`, where tensor parallelism shards what FSDP2 left?
#
# The next cell has the answers.

# %%
name = "model.layers.0.self_attn.q_norm.weight"
addends = [rank.gradients[name] for rank in ranks]  # of the last run above: without the norms
of_all = {"rank 0": addends[0], "rank 1": addends[1], "mean": sum(addends) / 2, "sum": sum(addends)}
print("1. off by", *(f"{label} {deviation(each, step.gradients[name]):.0e};" for label, each in of_all.items()))
coordinates = {"dp_shard": 0, "tp": 1}  # of rank 1; each axis has two ranks
for order in ("tp/dp_shard", "dp_shard/tp"):
    rows = torch.arange(16)
    for axis in order.split("/"):
        rows = rows.chunk(2)[coordinates[axis]]  # each axis shards what the one before it left
    print(f"2. f/{order} d: rank 1 has rows {rows.tolist()}")
