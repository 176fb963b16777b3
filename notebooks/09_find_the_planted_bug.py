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
# # Find the planted bug
#
# A small language model, cut over two tensor-parallel ranks, with one wrong line in it. Its loss is right to the last
# bits and it trains. You will find the line by comparing gradients, then with a trace, the timeline of collectives,
# a scheme and a replay; and see at the end what the loss curve would have told. Everything runs on this CPU.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

import subprocess
import sys
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

from jax_ref.models.layer import Embed
from jax_ref.models.layer import Norm as WholeNorm
from parity_tests import CaseSpec, scheme, values
from parity_tests.harness import colours, ledger_picture
from parity_tests.harness.engines.run import run
from parity_tests.tracing.flax_side import traced
from parity_tests.tracing.lines import Found, first, lines
from parity_tests.tracing.torch_side import recorded
from torch_impl.collectives import all_reduce
from torch_impl.vocab_parallel import vocab_parallel_logprob

VOCAB, D, HIDDEN, TP = 128, 16, 32, 2

# %% [markdown]
# ## The model
#
# Two gated blocks and a head, on bytes of Python's own language reference; each byte predicts the next. `up`, `gate`
# and the head are cut by rows, so each rank computes some of their outputs; `down` is cut by columns, so each rank
# computes an addend of every output. Somewhere in this cell is the bug. Do not look for it yet.


# %%
class Shared(torch.autograd.Function):
    """Every rank uses x: forward nothing, backward the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient, ctx.group), None


class Cut(nn.Module):
    """A linear layer, cut by rows (its output is this rank's part) or by columns (its output is the ranks' sum)."""

    def __init__(self, weight, rank, dim):
        super().__init__()
        self.weight = nn.Parameter(weight.chunk(TP, dim)[rank].clone())


class Rows(Cut):
    def __init__(self, weight, rank, group):
        super().__init__(weight, rank, 0)
        self.group = group

    def forward(self, x):
        return F.linear(Shared.apply(x, self.group), self.weight)


class Columns(Cut):
    def __init__(self, weight, rank, group, out):
        super().__init__(weight, rank, 1)
        self.group, self.out = group, out

    def forward(self, x):
        return all_reduce(F.linear(x, self.weight), self.group, out=self.out)


class Norm(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    """x + down(silu(gate(n)) * up(n)), n = norm(x)."""

    def __init__(self, weights, name, rank, group, is_last):
        super().__init__()
        self.norm = Norm(weights[f"{name}.norm.weight"])
        self.gate = Rows(weights[f"{name}.gate.weight"], rank, group)
        self.up = Rows(weights[f"{name}.up.weight"], rank, group)
        # The head, which follows the last block, is cut: what comes back from it is an addend on each rank.
        self.down = Columns(weights[f"{name}.down.weight"], rank, group, out="R" if is_last else "I")

    def forward(self, x):
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self, weights, rank, group):
        super().__init__()
        self.group, self.first_id = group, rank * VOCAB // TP
        self.embed = nn.Embedding.from_pretrained(weights["embed.weight"].clone(), freeze=False)
        self.lower = Block(weights, "lower", rank, group, is_last=False)
        self.upper = Block(weights, "upper", rank, group, is_last=True)
        self.norm = Norm(weights["norm.weight"])
        self.head = Rows(weights["head.weight"], rank, group)

    def forward(self, ids):
        return self.head(self.norm(self.upper(self.lower(self.embed(ids)))))

    def loss(self, ids, target):
        end = self.first_id + VOCAB // TP
        logprob = vocab_parallel_logprob(
            self(ids), target, self.group, vocab_start_index=self.first_id, vocab_end_index=end
        )
        return -logprob.mean()


# %% [markdown]
# The reference is the same in flax, whole.


# %%
class WholeBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = WholeNorm(D, 1e-5)
        self.gate, self.up = (nnx.Linear(D, HIDDEN, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(HIDDEN, D, use_bias=False, rngs=rngs)

    def __call__(self, x):
        n = self.norm(x)
        return x + self.down(jax.nn.silu(self.gate(n)) * self.up(n))


class WholeModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = Embed(VOCAB, D)
        self.lower, self.upper = WholeBlock(rngs), WholeBlock(rngs)
        self.norm = WholeNorm(D, 1e-5)
        self.head = nnx.Linear(D, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.norm(self.upper(self.lower(self.embed(ids)))))


def whole_model(weights):
    """The flax model with weights by PyTorch's names: a kernel is a weight turned round."""
    model = nnx.eval_shape(lambda: WholeModel(nnx.Rngs(0)))
    for name, weight in weights.items():
        module = model
        for part in name.split(".")[:-1]:
            module = getattr(module, part)
        if isinstance(module, nnx.Linear):
            module.kernel = nnx.Param(weight.T)
        elif isinstance(module, Embed):
            module.embedding = nnx.Param(weight)
        else:
            module.weight = nnx.Param(weight)
    return model


def drawn_weights():
    draw = np.random.default_rng(0).standard_normal
    found = {"embed.weight": draw((VOCAB, D)), "norm.weight": np.ones(D), "head.weight": draw((VOCAB, D)) / 4}
    for name in ("lower", "upper"):
        found |= {f"{name}.norm.weight": np.ones(D), f"{name}.down.weight": draw((D, HIDDEN)) / 4}
        found |= {f"{name}.{part}.weight": draw((HIDDEN, D)) / 4 for part in ("gate", "up")}
    return found


TEXT = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore"), np.uint8)


def batch(step):
    """Eight passages of 32 bytes, and the byte that comes after each."""
    at = np.random.default_rng(step).integers(0, len(TEXT) - 33, size=(8, 1)) + np.arange(33)
    return TEXT[at[:, :-1]].astype(np.int64), TEXT[at[:, 1:]].astype(np.int64)


WEIGHTS = drawn_weights()

# %% [markdown]
# ## The loss is right
#
# One step on two ranks and on one device. `traced` runs the reference once and keeps every tensor on the way, forward
# and backward, with how far each moves when the reference itself is rounded.


# %%
def model_of(mesh, made=Model):
    weights = {name: torch.from_numpy(array) for name, array in WEIGHTS.items()}
    return made(weights, mesh.rank("tp"), mesh["tp"])


def one_step(mesh, made=Model):
    """What a rank saw of one step: its loss, every module's tensors, its gradients."""
    model = model_of(mesh, made)
    ids, target = (torch.from_numpy(x) for x in batch(0))
    with recorded(model) as seen:
        loss = model.loss(ids, target)
        loss.backward()
    return loss.item(), seen, {name: p.grad.numpy() for name, p in model.named_parameters()}


def reference_loss(model):
    ids, target = batch(0)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(model(ids)), target[..., None], -1)
    LOSS.append(-logprob.mean())
    return LOSS[-1]


LOSS = []
known = traced(whole_model, reference_loss, WEIGHTS, "float64")
with jax.enable_x64(True):
    want = float(reference_loss(whole_model({name: jnp.asarray(x) for name, x in WEIGHTS.items()})))
ranks = run(lambda mesh, case: one_step(mesh), CaseSpec("step", {"tp": TP}))
print(f"one device  {want:.15f}")
for rank, (loss, _, _) in enumerate(ranks.results):
    print(f"rank {rank}      {loss:.15f}")

# %% [markdown]
# ## Its gradients are not
#
# Put together from the ranks' parts, and held against the reference's.

# %%
CUT = {"gate.weight": 0, "up.weight": 0, "head.weight": 0, "down.weight": 1}


def whole_gradients(ranks):
    parts = [gradients for _, _, gradients in ranks.results]
    found = {}
    for name in parts[0]:
        dim = next((dim for end, dim in CUT.items() if name.endswith(end)), None)
        found[name] = parts[0][name] if dim is None else np.concatenate([part[name] for part in parts], dim)
    return found


def off(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


gradients = whole_gradients(ranks)
deviation = {name: off(gradients[name], known.of_weights[name]) for name in gradients}
figure, panel = plt.subplots(figsize=(8, 3.4), layout="constrained")
for label, colour, is_shown in (("as on one device", colours.RIGHT, False), ("wrong", colours.WRONG, True)):
    shown = {name: value if (value > 1e-9) is is_shown else np.nan for name, value in deviation.items()}
    panel.barh(list(shown), list(shown.values()), color=colour, label=label)
panel.set(xscale="log", xlim=(1e-18, 10), xlabel="gradient: relative distance from one device", title="tp=2, one step")
panel.invert_yaxis()
panel.legend(loc="lower right")
plt.show()

# %% [markdown]
# Most are wrong, by much. None of this could be seen from the loss. Which of them is the cause?
#
# ## Trace: the first tensor that differs
#
# A gradient is wrong because one that came before it is. So go through the step in the order of execution, forward
# and then backward, and stop at the first tensor beyond its budget.


# %%
def positions(rank, event, whole, local):
    """What of a whole tensor a rank has: all, or its part of the last dim."""
    at = [np.arange(size) for size in whole]
    if whole[-1] != local[-1]:
        at[-1] = np.array_split(at[-1], TP)[rank]
    return at


def trace(ranks):
    found = Found([seen for _, seen, _ in ranks.results], whole_gradients(ranks))
    return lines(known, found, positions, "float64", {"tp": TP})


found = trace(ranks)
line = first(found)
at = found.index(line)
for each in found[at - 4 : at + 3]:
    print(f"{each.phase:9} {each.name:36} {each.error:8.1e} of {each.budget:.1e}  {'equal' if each.ok else 'DIFFERS'}")
print(f"\nfirst to differ: {line.name}; look in {line.home}")
print(*line.notes, sep="\n")

# %% [markdown]
# The gradient that arrives at the output of `upper.down` is right and the one that leaves it is twice too large. All
# that lies below has it from there.

# %%
figure, panel = plt.subplots(figsize=(8, 3.2), layout="constrained")
for number, phase in enumerate(("forward", "backward", "weight")):
    drawn = {i: max(each.error, 1e-17) for i, each in enumerate(found) if each.phase == phase}
    panel.semilogy(list(drawn), list(drawn.values()), **{**colours.line(number), "linestyle": ""}, label=phase)
panel.semilogy([each.budget for each in found], color="0.6", linewidth=1, label="budget")
panel.annotate(line.name, (at, line.error), (at - 3, 1e-5), ha="right", arrowprops={"arrowstyle": "->"})
panel.set(xlabel="tensor, in the order of execution", ylabel="relative distance", ylim=(1e-18, 10))
panel.legend(loc="upper left", fontsize=8)
plt.show()

# %% [markdown]
# ## Timeline: one collective too many
#
# Every collective of the step. Backward there should be a sum for each layer that is cut by rows and so shares its
# input: one for the head, two for each block, five in all.

# %%
ledger_picture.figure(ranks.ledger, "one step, tp=2")

# %% [markdown]
# There are six on grey. The second of them comes from another line of the model's cell than the others: from the
# `all_reduce` of `Columns.forward`, whose backward should be silent, as it is in the lower block.
#
# ## A scheme for the suspect
#
# The layer alone, in both of the ways in which the model makes it. Its output is whole on each rank, and so is the
# gradient that comes back (`tp=I`): the head has summed it already, in `Shared`.


# %%
DECLARED = dict(
    reference=lambda x, weight: jnp.einsum("bsf,df->bsd", x, weight),
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "b s f/tp", "weight": "d f/tp"},
    outputs="b s d tp=I",
    draw={"x": values("normal"), "weight": values("normal")},
)


@scheme(**DECLARED)
def down_of_the_lower_block(mesh, x, weight):
    return all_reduce(F.linear(x, weight), mesh["tp"], out="I")


@scheme(**DECLARED)
def down_of_the_upper_block(mesh, x, weight):
    return all_reduce(F.linear(x, weight), mesh["tp"], out="R")


print(down_of_the_lower_block.verify(examples=8))
report = down_of_the_upper_block.verify(tp=2, b=2, s=4, f=4, d=8, dtype="float32")
display(report)

# %% [markdown]
# ## Replay
#
# The failure left a file with the case in it. It runs alone, on real processes too, and says the same.

# %%
again = subprocess.run([sys.executable, report.replay, "--engine", "gloo"], capture_output=True, text=True, check=False)
print(again.stdout)

# %% [markdown]
# ## The line
#
# `out="R" if is_last else "I"`. Its comment is true of a head that leaves its ranks' addends as they are. This one is
# made of `Rows`, which adds them up. Two authors, each of whom took care of the same sum.


# %%
class Mended(Model):
    def __init__(self, weights, rank, group):
        super().__init__(weights, rank, group)
        self.upper.down.out = "I"


mended = run(lambda mesh, case: one_step(mesh, Mended), CaseSpec("step", {"tp": TP}))
told = trace(mended)
print(f"first to differ: {first(told)}; largest of {len(told)} tensors: {max(line.ratio for line in told):.2g} budgets")

# %% [markdown]
# ## What the loss curve would have shown
#
# Sixty steps of AdamW from the same weights on the same bytes, with the bug and without.


# %%
def norm_of(gradients, group):
    """Of the whole gradient: what is cut is added up over the ranks, what each rank has whole counts once."""
    squares = {name: x.square().sum() for name, x in gradients.items()}
    cut = sum(square for name, square in squares.items() if name.endswith(tuple(CUT)))
    whole = sum(square for name, square in squares.items() if not name.endswith(tuple(CUT)))
    return (all_reduce(cut, group) + whole).sqrt().item()


def trained(made, steps=60):
    def body(mesh, case):
        model = model_of(mesh, made)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses, norms = [], []
        for step in range(steps):
            loss = model.loss(*(torch.from_numpy(x) for x in batch(step)))
            loss.backward()
            norms.append(norm_of({name: p.grad for name, p in model.named_parameters()}, mesh["tp"]))
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, norms

    return run(body, CaseSpec("train", {"tp": TP})).results[0]


(right, right_norm), (buggy, buggy_norm) = trained(Mended), trained(Model)
figure, (curves, apart, norms) = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
curves.plot(right, color=colours.RIGHT, linewidth=3, alpha=0.5, label="mended")
curves.plot(buggy, color=colours.WRONG, linewidth=1, label="with the bug")
curves.set(xlabel="step", ylabel="loss, nats per byte", title="the curves")
curves.legend(fontsize=8)
apart.semilogy([max(abs(x - y), 1e-17) for x, y in zip(right, buggy, strict=True)], color="black", linewidth=1)
apart.set(xlabel="step", ylabel="|difference| of the losses", title="how far apart")
norms.plot(right_norm, color=colours.RIGHT, label="mended")
norms.plot(buggy_norm, color=colours.WRONG, label="with the bug")
norms.set(xlabel="step", ylabel="norm of the gradient", title="what was wrong")
norms.legend(fontsize=8)
plt.show()
difference, change = abs(np.subtract(right, buggy)), abs(np.diff(right))
print(f"the two losses differ by {difference[0]:.0e} in step 1, by {difference.mean():.3f} on average;")
print(f"one loss changes from step to step by {change[-30:].mean():.3f} on average, by its batch alone")

# %% [markdown]
# The first loss is the same. Later ones differ by less than one batch from the next, and Adam, whose steps do not
# change when a gradient is scaled, hides most of the factor. The norm of the gradient is too large, but nothing says
# how large it should be. Only a comparison with a reference does.
