"""Parity of a step's loss: means over tokens and over sequences, cut by dp, ep, cp and microbatches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Bool, Int
from torch import Tensor

from jax_ref.models import aggregated
from parity_tests.parallelizer.families import IGNORED, Chosen, batch, model_of
from parity_tests.parallelizer.training import broken_on_ranks, full_arrays, parallelized
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from shardproof import CaseSpec, Cost, mask, offsets, scheme, values
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from shardproof.judge import bridge
from torch_impl.collectives import accumulator, all_reduce
from torch_impl.layouts import TokenLayout
from torch_impl.models import loss_divisors, normalised, valid_count
from torch_impl.parallelizer.mesh_axes import mesh_axes

INT64 = 8
MODES = ("token_mean", "sequence_mean_of_token_means", "sequence_mean_of_token_sums", "token_sum")
OPTIONS = {"aggregation": MODES, "constant": (1, 7)}
FLOATS = ("float32", "bfloat16", "float64")


def share(mesh, losses, counted, data, microbatches, aggregation, constant, layouts=None, averaged_over=1):
    """This rank's share of the loss, a microbatch of rows at a time; what does not count is NaN."""
    losses = losses.masked_fill(~counted, torch.nan)
    masks = counted.tensor_split(microbatches)
    divisors = loss_divisors(
        list(masks), aggregation, [mesh[axis] for axis in data], mesh["cp"], layouts=layouts, constant=constant
    )
    parts = zip(losses.tensor_split(microbatches), divisors, strict=True)
    shares = torch.stack([normalised(each, count, averaged_over) for each, count in parts])
    assert shares.dtype == accumulator(losses.dtype)
    return shares.sum()


def cost_of_counts(c):
    """A message over each axis with ranks: the lengths of all sequences, or one count."""
    if c.aggregation == "token_sum":
        return Cost()
    rows = -(-c.b // c.dp)
    of_cp = INT64 * (1 if c.aggregation == "token_mean" else rows)
    return Cost(forward={"all_reduce/cp": (1, of_cp), "all_reduce/dp": (1, INT64)})


@scheme(
    reference=aggregated,
    mesh={"dp": (1, 2, 3, 4), "cp": (1, 2)},
    inputs={"losses": "b/dp:ragged s/cp:dual_chunk_swap", "mask": "b/dp:ragged s/cp:dual_chunk_swap"},
    outputs="dp=P cp=P",
    draw={"losses": values("normal", "ties", "huge"), "mask": mask("s")},
    options=OPTIONS,
    dtypes=FLOATS,
    reduction=("b", "s"),
)
def loss_of_unequal_rows(mesh, losses, mask: Bool[Tensor, "b s"], aggregation, constant):
    """Ranks have unequally many rows and microbatches, or none."""
    return share(mesh, losses, mask, ["dp"], 1 + mesh.rank("dp"), aggregation, constant)


@scheme(
    reference=aggregated,
    mesh={"dp": (1, 2), "cp": (1, 2, 4)},
    inputs={"losses": "b/dp s/cp", "mask": "b/dp s/cp"},
    outputs="dp=P cp=P",
    draw={"losses": values("normal"), "mask": mask("s")},
    options=OPTIONS,
    rank_options={"microbatches": (1, 2, 3)},
    dtypes=FLOATS,
    reduction=("b", "s"),
    cost=cost_of_counts,
)
def loss_of_equal_rows(mesh, losses, mask: Bool[Tensor, "b s"], aggregation, constant, microbatches):
    return share(mesh, losses, mask, ["dp"], microbatches, aggregation, constant)


@scheme(
    reference=aggregated,
    mesh={"dp": (1, 2), "ep": (1, 2), "cp": (1, 2)},
    inputs={"losses": "b/dp/ep s/cp", "mask": "b/dp/ep s/cp"},
    outputs="dp=I ep=I cp=I",
    draw={"losses": values("normal"), "mask": mask("s")},
    options=OPTIONS,
    dtypes=("float64", "float32"),
    reduction=("b", "s"),
)
def loss_that_is_averaged(mesh, losses, mask: Bool[Tensor, "b s"], aggregation, constant):
    """As FSDP averages: the mean of the ranks' shares, each times the number of ranks."""
    axes = ("dp", "ep", "cp")
    ranks = mesh.size("dp") * mesh.size("ep") * mesh.size("cp")
    total = share(mesh, losses, mask, ["dp", "ep"], 1, aggregation, constant, averaged_over=ranks)
    for axis in axes:
        total = all_reduce(total, mesh[axis]) / mesh.size(axis)
    return total


def documents_as_rows(losses, mask, cu_padded, cu_real):
    """Each document of each row as a row of its own, with the other documents masked."""
    token = jnp.arange(losses.shape[1])
    end = cu_padded[:-1] + jnp.diff(cu_real)
    is_inside = (token[None] >= cu_padded[:-1, None]) & (token[None] < end[:, None])  # [document, token]
    return jnp.repeat(losses, len(end), 0), (mask[:, None] & is_inside[None]).reshape(-1, len(token))


def of_documents(
    losses, mask, cu_padded, cu_real, other_losses, other_mask, other_padded, other_real, aggregation, constant
):
    both = (
        documents_as_rows(losses, mask, cu_padded, cu_real),
        documents_as_rows(other_losses, other_mask, other_padded, other_real),
    )
    return aggregated(*(jnp.concatenate(rows) for rows in zip(*both, strict=True)), aggregation, constant)


@scheme(
    reference=of_documents,
    mesh={"dp": (1, 2), "cp": (1, 2, 4)},
    inputs={
        **{"losses": "b/dp t/cp:packed", "mask": "b/dp t/cp:packed", "cu_padded": "q", "cu_real": "q"},
        **{"other_losses": "b/dp o/cp:packed", "other_mask": "b/dp o/cp:packed"},
        **{"other_padded": "fewer", "other_real": "fewer"},
    },
    outputs="dp=P cp=P",
    draw={
        **{"losses": values("normal"), "mask": mask("t"), "cu_padded": offsets("t", padded=True)},
        **{"other_losses": values("normal"), "other_mask": mask("o"), "other_padded": offsets("o", padded=True)},
        **{"cu_real": offsets("t"), "other_real": offsets("o")},
    },
    dims={"t": (16,), "o": "t", "q": (4, 5), "fewer": (3,)},
    options=OPTIONS,
    dtypes=("float64", "float32"),
    reduction=("b", "t"),
)
def loss_of_packed_documents(
    mesh,
    losses,
    mask: Bool[Tensor, "b t"],
    cu_padded: Int[Tensor, "q"],
    cu_real: Int[Tensor, "q"],
    other_losses,
    other_mask: Bool[Tensor, "b o"],
    other_padded: Int[Tensor, "fewer"],
    other_real: Int[Tensor, "fewer"],
    aggregation,
    constant,
):
    """Two microbatches with documents of their own, unlike in number."""
    layouts = [
        TokenLayout.packed(padded, real, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
        for padded, real in ((cu_padded, cu_real), (other_padded, other_real))
    ]
    counted = [
        each & ~layout.padding_mask[layout.local_index]
        for each, layout in zip((mask, other_mask), layouts, strict=True)
    ]
    rows = torch.cat([losses, other_losses])
    return share(mesh, rows, torch.cat(counted), ["dp"], 2, aggregation, constant, layouts)


SCHEMES = (loss_of_unequal_rows, loss_of_equal_rows, loss_that_is_averaged, loss_of_packed_documents)
test_parity = parity(SCHEMES, lockstep=20)


def on_one_rank(losses, counted, aggregation, constant=1):
    """(the loss, its gradient) on one rank and in one microbatch."""

    def body(mesh, case):
        leaf = losses.clone().requires_grad_()
        (count,) = loss_divisors([counted], aggregation, [mesh["dp"]], mesh["cp"], constant=constant)
        value = normalised(leaf, count)
        value.backward()
        return value.item(), leaf.grad

    return run(body, CaseSpec(scheme="loss", mesh={"dp": 1, "cp": 1})).results[0]


@pytest.mark.parametrize("aggregation", MODES)
@settings(max_examples=few(25))
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2), st.data())
def test_padding_changes_nothing(aggregation, rows, length, columns, more, drawn):
    """Neither columns of padding nor rows of it, whatever they hold; to the bit."""
    bits = drawn.draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length))
    counted = torch.tensor(bits).view(rows, length)
    losses = torch.arange(rows * length).double().view(rows, length) * 27720  # a multiple of all that divides it here
    filling = drawn.draw(st.sampled_from([0.0, torch.nan, torch.inf]))
    padded = F.pad(losses, (0, columns, 0, more), value=filling)
    value, gradient = on_one_rank(losses, counted, aggregation)
    of_padded, padded_gradient = on_one_rank(padded, F.pad(counted, (0, columns, 0, more)), aggregation)
    assert of_padded == value
    assert padded_gradient.equal(F.pad(gradient, (0, columns, 0, more)))


def test_the_mean_over_tokens_is_that_of_the_count_of_targets():
    """`valid_count`, where the targets are told; and the sum over a count that the caller has."""
    losses = torch.arange(6.0).double().view(2, 3)
    targets = torch.tensor([[1, IGNORED, 2], [IGNORED, 0, IGNORED]])

    def body(mesh, case):
        count = valid_count([targets], [mesh["dp"], mesh["cp"]])
        of_count = normalised(losses * (targets >= 0), count)
        shares = [
            normalised(losses, *loss_divisors([targets >= 0], mode, [mesh["dp"]], mesh["cp"], constant=constant))
            for mode, constant in (("token_mean", 1), ("token_sum", count), ("token_sum", 3))
        ]
        return [of_count.item(), *(each.item() for each in shares)]

    (shares,) = run(body, CaseSpec(scheme="loss", mesh={"dp": 1, "cp": 1})).results
    assert shares == [2.0] * 4


@pytest.mark.parametrize("aggregation", MODES)
def test_a_step_without_tokens_has_no_loss(aggregation):
    losses, counted = torch.full((2, 3), torch.nan, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.bool)
    value, gradient = on_one_rank(losses, counted, aggregation)
    assert value == 0.0 and gradient.equal(torch.zeros(2, 3))


# ---- Models of transformers


def whole_gradients(chosen, ids, targets, aggregation):
    """The gradient of every parameter on one device; the reference is linear in the losses, which it weighs."""
    bridge.start()
    weights = jax.grad(aggregated)(jnp.zeros(targets.shape), jnp.asarray(targets >= 0), aggregation, 3)
    model = model_of(chosen)
    losses = token_losses(model, torch.from_numpy(ids), torch.from_numpy(targets))
    (losses * torch.from_numpy(np.array(weights))).sum().backward()
    return full_arrays(model, gradients=True)


def token_losses(model, ids, targets):
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED).view_as(ids)


def rank_gradients(view, chosen, ids, targets, aggregation, accumulation):
    """The gradients that FSDP leaves, of ranks with unequally many rows in unequal microbatches."""
    axes = mesh_axes(view.device_mesh)
    rank, data = axes.loss_mesh.get_local_rank(), axes.loss_mesh.get_group()
    own = [torch.from_numpy(x).tensor_split(axes.data_size)[rank].tensor_split(accumulation) for x in (ids, targets)]
    model = parallelized()(model_of(chosen), view.device_mesh)
    masks = [each >= 0 for each in own[1]]
    nobody = view.device_mesh["cp"].get_group()  # the sequence is whole on each rank
    divisors = loss_divisors(masks, aggregation, [data], nobody, constant=3)
    for number, (tokens, target, count) in enumerate(zip(*own, divisors, strict=True)):
        model.set_requires_gradient_sync(number == accumulation - 1)
        normalised(token_losses(model, tokens, target), count, axes.data_size).backward()
    return full_arrays(model, gradients=True)


MESHES = {"dp_replicate": 2, "dp_shard": 2, "cp": 1}, {"dp_shard": 3, "cp": 1, "tp": 2}


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", MODES[1:3] + MODES[:1])
@pytest.mark.parametrize(
    ("family", "mesh", "accumulation"), [("llama", MESHES[0], 2), ("gemma", MESHES[1], 1), ("phi3", MESHES[0], 1)]
)
def test_gradients_under_fsdp_are_those_of_one_device(family, mesh, accumulation, aggregation):
    chosen = Chosen(family, changes=(("num_hidden_layers", 1),))
    ids, targets = batch(chosen, 10, 5)
    want = whole_gradients(chosen, ids, targets, aggregation)
    body = partial(
        rank_gradients, chosen=chosen, ids=ids, targets=targets, aggregation=aggregation, accumulation=accumulation
    )
    ranks = run(lambda view, case: body(view), CaseSpec(scheme="loss", mesh=mesh, dtype="float64")).results
    assert broken_on_ranks(ranks, want, mesh) == []


# ---- Arguments

LAYOUT = TokenLayout.packed([0, 4], cp_size=1, cp_rank=0)
BOOLS = torch.ones(2, 4, dtype=torch.bool)


def divisors(**changes):
    """A call on each rank, with these arguments in place of right ones."""
    arguments = {"masks": [BOOLS], "aggregation": "token_mean"} | changes
    return lambda mesh: loss_divisors(dp_groups=[mesh["dp"]], cp_group=mesh["cp"], **arguments)


test_rejection = rejected(
    {"dp": 2, "cp": 1},
    [
        ("no mask", divisors(masks=[]), "models.loss_divisors: masks is empty; pass one for each microbatch"),
        (
            "masks of integers",
            divisors(masks=[BOOLS, BOOLS.long()]),
            "models.loss_divisors: masks[1] is int64; pass bools, such as targets >= 0",
            TypeError,
        ),
        (
            "a mask without rows",
            divisors(masks=[BOOLS[0]]),
            "models.loss_divisors: masks[0] is [4]; pass [b, s/cp]",
        ),
        (
            "a layout too few",
            divisors(masks=[BOOLS, BOOLS], layouts=[LAYOUT]),
            "models.loss_divisors: layouts has 1 for 2 masks; pass one for each microbatch",
        ),
        (
            "a layout of other columns",
            divisors(masks=[BOOLS[:, :3]], layouts=[LAYOUT]),
            "models.loss_divisors: masks[0] is [2, 3] but its layout has 4 local tokens; pass [b, t/cp]",
        ),
        (
            "a constant of each row",
            divisors(constant=torch.ones(2)),
            "models.loss_divisors: constant is [2]; pass one number for the full step",
        ),
        ("a constant of 0", divisors(constant=0), "models.loss_divisors: constant=0 must be at least 1"),
        (
            "an unknown mode",
            divisors(aggregation="mean"),
            "models.loss_divisors: aggregation='mean' is not one of token_mean, sequence_mean_of_token_means, "
            "sequence_mean_of_token_sums, token_sum",
        ),
        (
            "a count for each column",
            lambda mesh: normalised(torch.zeros(2, 3), torch.ones(3, dtype=torch.long)),
            "models.normalised: count is [3] but losses has leading shape [2, 3]",
        ),
    ],
)
