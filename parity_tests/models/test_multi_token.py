"""Parity of multi-token prediction: losses, and the gradient of one head, of documents that cp and microbatches cut."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from jax_ref.models import multi_token_losses as reference
from jax_ref.vocab_parallel import tokens_ahead as reference_tokens_ahead
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from parity_tests.slow import slow_but
from shardproof import Cost, check_cases, integers, offsets, scheme, values
from torch_impl.collectives import all_reduce
from torch_impl.layouts import TokenLayout
from torch_impl.models import multi_token_losses, multi_token_targets
from torch_impl.vocab_parallel import tokens_ahead

DOCUMENTS = dict(
    dims={"t": (24, 16), "n": (4, 2), "m": (1, 2, 4), "v": (4, 8)},
    draw={
        "hidden_states": values("normal"),
        "weight": values("normal"),
        "targets": integers(-2, 6),  # some outside the vocabulary, which count nowhere
        "cu_padded": offsets("t", padded=True),
        "cu_real": offsets("t"),
    },
)


def losses(mesh, hidden_states, weight, targets, layouts, aggregation, coefficient, constant=1, averaged_over=1):
    """This rank's share of each depth's loss, one microbatch for each of `layouts`."""
    count, v = len(layouts), mesh.total("v")
    pairs = multi_token_targets(
        list(targets.tensor_split(count)),
        layouts,
        len(hidden_states) - 1,
        v,
        aggregation,
        [mesh["dp"]],
        mesh["cp"],
        constant=constant,
    )
    shares = [
        multi_token_losses(states, weight, *pair, mesh["tp"], v, coefficient=coefficient, averaged_over=averaged_over)
        for states, pair in zip(hidden_states.tensor_split(count, 1), pairs, strict=True)
    ]
    return torch.stack(shares).sum(0)


def layout_of(mesh, cu_padded, cu_real, kind):
    return TokenLayout.packed(cu_padded, cu_real, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"), kind=kind)


INPUTS = {"weight": "v/tp d dp=R cp=R", "cu_padded": "n", "cu_real": "n"}


@scheme(
    reference=reference,
    mesh={"dp": (1, 2), "cp": (1, 2, 4), "tp": (1, 2)},
    inputs={"hidden_states": "m b/dp:ragged t/cp:packed d tp=I", "targets": "b/dp:ragged t/cp:packed", **INPUTS},
    outputs="m dp=P cp=P tp=I",
    options={"aggregation": ("token_mean", "token_sum"), "coefficient": (0.3, 0.0), "constant": (1, 7)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("b", "t", "v", "m"),
    roundings=4,  # logits, d logits, this rank's term of d hidden, the result
    **DOCUMENTS,
)
def losses_of_packed_documents(
    mesh,
    hidden_states,
    weight,
    targets: Int[Tensor, "b t"],
    cu_padded: Int[Tensor, "n"],
    cu_real: Int[Tensor, "n"],
    coefficient,
    aggregation,
    constant,
):
    """Ranks have unequally many rows and microbatches, or none."""
    layouts = [layout_of(mesh, cu_padded, cu_real, "packed")] * (1 + mesh.rank("dp"))
    return losses(mesh, hidden_states, weight, targets, layouts, aggregation, coefficient, constant)


def in_rows(hidden_states, weight, targets, coefficient, aggregation):
    whole = jnp.array([0, targets.shape[1]])
    return reference(hidden_states, weight, targets, whole, whole, coefficient, aggregation)


@scheme(
    reference=in_rows,
    mesh={"dp": (1, 2), "cp": (1, 2), "tp": (1,)},
    inputs={
        "hidden_states": "m b/dp s/cp:dual_chunk_swap d tp=I",
        "weight": INPUTS["weight"],
        "targets": "b/dp s/cp:dual_chunk_swap",
    },
    outputs="m dp=P cp=P tp=I",
    dims={"s": (4, 8), "m": (2, 3), "v": (4, 8)},
    draw={"hidden_states": values("normal"), "weight": values("normal"), "targets": integers(-2, 6)},
    options={
        "aggregation": ("sequence_mean_of_token_means", "sequence_mean_of_token_sums", "token_mean"),
        "coefficient": (0.3,),
    },
    dtypes=("float32", "float64"),
    reduction=("b", "s", "v", "m"),
    roundings=4,  # logits, d logits, this rank's term of d hidden, the result
)
def losses_of_rows(mesh, hidden_states, weight, targets: Int[Tensor, "b s"], coefficient, aggregation):
    length, cp = targets.shape[1] * mesh.size("cp"), mesh.size("cp")
    layout = TokenLayout.dense("dual_chunk_swap", length, cp_size=cp, cp_rank=mesh.rank("cp"))
    return losses(mesh, hidden_states, weight, targets, [layout], aggregation, coefficient)


def over_divisors(hidden_states, output_weight, targets, divisors, coefficient):
    """Each token's loss over its own divisor; 0 for a target outside the vocabulary, or a divisor of 0."""
    is_valid = (targets >= 0) & (targets < len(output_weight)) & (divisors > 0)
    logprob = jax.nn.log_softmax(hidden_states @ output_weight.T)
    scores = jnp.take_along_axis(logprob, jnp.where(is_valid, targets, 0)[..., None], -1)[..., 0]
    sums = jnp.where(is_valid, -scores / jnp.maximum(divisors, 1).astype(scores.dtype), 0.0).sum((1, 2))
    return sums.at[1:].multiply(coefficient / max(len(sums) - 1, 1))


OTHERS = {"other_states": "m b/dp o/cp d tp=I", "other_targets": "b/dp o/cp", "other_padded": "p", "other_real": "p"}
DRAW_OF_OTHERS = {
    **{"other_states": values("normal"), "other_targets": integers(-2, 6)},
    **{"other_padded": offsets("o", padded=True), "other_real": offsets("o")},
}


def of_unlike_documents(
    hidden_states,
    targets,
    weight,
    cu_padded,
    cu_real,
    other_states,
    other_targets,
    other_padded,
    other_real,
    coefficient,
):
    """Each depth's sum over both microbatches, divided by its number of valid targets."""
    depth = len(hidden_states) - 1

    def by_depth(ids, padded, real):
        return jnp.stack([ids, *(reference_tokens_ahead(ids, padded, real, depth, -100) if depth else ())])

    ids = (by_depth(targets, cu_padded, cu_real), by_depth(other_targets, other_padded, other_real))
    states, ids = jnp.concatenate([hidden_states, other_states], 1), jnp.concatenate(ids, 1)
    counts = ((ids >= 0) & (ids < len(weight))).sum((1, 2), keepdims=True)
    return over_divisors(states, weight, ids, jnp.broadcast_to(counts, ids.shape), coefficient)


@scheme(
    reference=of_unlike_documents,
    mesh={"dp": (1, 2), "cp": (1, 3, 8), "tp": (1, 2)},
    inputs={"hidden_states": "m b/dp t/cp d tp=I", "targets": "b/dp t/cp", **INPUTS, **OTHERS},
    outputs="m dp=P cp=P tp=I",
    dims={**DOCUMENTS["dims"], "o": "t", "p": (3,)},
    draw={**DOCUMENTS["draw"], **DRAW_OF_OTHERS},
    options={"coefficient": (0.3,)},
    dtypes=("float64", "float32"),
    reduction=("b", "t", "v", "m"),
    roundings=4,  # logits, d logits, this rank's term of d hidden, the result
)
def losses_of_contiguous_documents(
    mesh,
    hidden_states,
    targets: Int[Tensor, "b t"],
    weight,
    cu_padded: Int[Tensor, "n"],
    cu_real: Int[Tensor, "n"],
    other_states,
    other_targets: Int[Tensor, "b o"],
    other_padded: Int[Tensor, "p"],
    other_real: Int[Tensor, "p"],
    coefficient,
):
    """Two microbatches with documents of their own, unlike in number."""
    offsets_of = ((cu_padded, cu_real), (other_padded, other_real))
    layouts = [layout_of(mesh, *each, "contiguous") for each in offsets_of]
    states, ids = torch.cat([hidden_states, other_states], 1), torch.cat([targets, other_targets])
    return losses(mesh, states, weight, ids, layouts, "token_mean", coefficient)


def head_cost(c):
    """Over tp, one exchange for all depths: three statistics of a token, and the gradient of its states."""
    rows, wide = c.m * c.b // c.dp * c.t // c.cp, c.accumulator_itemsize
    forward = {"all_gather/tp": (1, 3 * rows * wide)} if c.tp > 1 else {}
    return Cost(forward=forward, backward={"all_reduce/tp": (1, rows * c.d * wide)})


@scheme(
    reference=over_divisors,
    contract=multi_token_losses,
    mesh={"dp": (1, 2), "cp": (1, 2), "tp": (1, 2, 4)},
    inputs={
        "hidden_states": "m b/dp t/cp d tp=I",
        "output_weight": "v/tp d dp=R cp=R",
        "targets": "m b/dp t/cp",
        "divisors": "m b/dp t/cp",
    },
    outputs="m dp=P cp=P tp=I",
    dims={"t": (8, 4), "m": (1, 2, 4), "v": (4, 8)},
    draw=dict.fromkeys(("hidden_states", "output_weight"), values("normal", "ties"))
    | {"targets": integers(-2, 6), "divisors": integers(0, 5)},
    options={"coefficient": (0.3, 0.0)},
    rank_options={"chunk_size": (None, 3)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("b", "t", "v", "m"),
    roundings=4,  # logits, d logits, this rank's term of d hidden, the result
    cost=head_cost,
)
def losses_over_divisors(
    mesh,
    hidden_states,
    output_weight,
    targets: Int[Tensor, "m b t"],
    divisors: Int[Tensor, "m b t"],
    coefficient,
    chunk_size,
):
    v = mesh.total("v")
    return multi_token_losses(
        hidden_states, output_weight, targets, divisors, mesh["tp"], v, coefficient=coefficient, chunk_size=chunk_size
    )


DEPTH = 2


def loss_of_tied_model(weight, ids, targets, cu_padded, cu_real):
    """The state of depth k adds the embedding of the token k places ahead; embedding and head are one weight."""
    states = [weight[ids]]
    for further in reference_tokens_ahead(ids, cu_padded, cu_real, DEPTH):
        states.append(jnp.tanh(states[-1] + weight[further]))
    return reference(jnp.stack(states), weight, targets, cu_padded, cu_real, 0.3).sum()


@scheme(
    reference=loss_of_tied_model,
    mesh={"dp": (1, 2), "cp": (1, 2), "tp": (1,)},
    inputs={"weight": "v/tp d dp=R cp=R", "ids": "b/dp t/cp:packed", "targets": "b/dp t/cp:packed"}
    | {"cu_padded": "n", "cu_real": "n"},
    outputs="dp=P cp=P tp=I",
    dims={"t": (24, 16), "n": (4, 2), "v": (10, 12)},
    draw={
        "weight": values("normal"),
        "ids": integers(0, 9),
        "targets": integers(-2, 9),
        "cu_padded": offsets("t", padded=True),
        "cu_real": offsets("t"),
    },
    dtypes=("float32", "float64"),
    reduction=("b", "t", "v"),
    roundings=2 * DEPTH + 4,  # the weight is used by the head, and by the embedding of each depth
)
def loss_of_shared_weight(
    mesh,
    weight,
    ids: Int[Tensor, "b t"],
    targets: Int[Tensor, "b t"],
    cu_padded: Int[Tensor, "n"],
    cu_real: Int[Tensor, "n"],
):
    layout = layout_of(mesh, cu_padded, cu_real, "packed")
    states = [F.embedding(ids, weight)]
    for further in tokens_ahead(ids, layout, mesh["cp"], DEPTH):
        states.append(torch.tanh(states[-1] + F.embedding(further, weight)))
    return losses(mesh, torch.stack(states), weight, targets, [layout], "token_mean", 0.3).sum()


@scheme(
    reference=reference,
    mesh={"dp": (1, 2), "cp": (1, 4), "tp": (1,)},
    inputs={"hidden_states": "m b/dp t/cp:packed d tp=I", "targets": "b/dp t/cp:packed", **INPUTS},
    outputs="m dp=I cp=I tp=I",
    options={"aggregation": ("token_mean",), "coefficient": (0.3,)},
    dtypes=("float64",),
    reduction=("b", "t", "v", "m"),
    **DOCUMENTS,
)
def losses_that_are_averaged(
    mesh,
    hidden_states,
    weight,
    targets: Int[Tensor, "b t"],
    cu_padded: Int[Tensor, "n"],
    cu_real: Int[Tensor, "n"],
    coefficient,
    aggregation,
):
    """As FSDP averages: the mean of the ranks' shares, each times the number of ranks."""
    ranks = mesh.size("dp") * mesh.size("cp")
    layout = layout_of(mesh, cu_padded, cu_real, "packed")
    total = losses(mesh, hidden_states, weight, targets, [layout], aggregation, coefficient, averaged_over=ranks)
    for axis in ("dp", "cp"):
        total = all_reduce(total, mesh[axis]) / mesh.size(axis)
    return total


SCHEMES = (
    losses_over_divisors,
    losses_of_packed_documents,
    losses_of_contiguous_documents,
    losses_of_rows,
    losses_that_are_averaged,
    loss_of_shared_weight,
)
test_parity = parity(slow_but([losses_of_rows], SCHEMES), lockstep=20)


@pytest.mark.slow
def test_parity_on_processes():
    check_cases(losses_of_packed_documents, 4, engine="gloo")


# ---- Arguments

LAYOUT = TokenLayout.packed([0, 8], cp_size=1, cp_rank=0)
IDS = torch.zeros(2, 8, dtype=torch.int64)


def targets_of(**changes):
    """A call on each rank, with these arguments in place of right ones."""
    arguments = dict(targets=[IDS], layouts=[LAYOUT], depth=2, vocab_size=4, aggregation="token_mean") | changes
    return lambda mesh: multi_token_targets(dp_groups=[mesh["dp"]], cp_group=mesh["cp"], **arguments)


def losses_of(**changes):
    """As `targets_of`, for two depths on two ranks of tp."""
    arguments = dict(
        hidden_states=torch.zeros(2, 2, 8, 3),
        output_weight=torch.zeros(4, 3),
        targets=IDS.expand(2, 2, 8),
        divisors=IDS.expand(2, 2, 8),
        vocab_size=8,
    )
    return lambda mesh: multi_token_losses(tp_group=mesh["tp"], **(arguments | changes))


test_rejection = rejected(
    {"dp": 2, "cp": 1},
    [
        (
            "a layout too few",
            targets_of(targets=[IDS, IDS]),
            "models.multi_token_targets: layouts has 1 for 2 targets; pass one for each microbatch",
        ),
        (
            "targets that are no ids",
            targets_of(targets=[IDS.float()]),
            "models.multi_token_targets: targets[0] is float32; ids must be int32 or int64",
            TypeError,
        ),
        (
            "targets of other columns",
            targets_of(targets=[IDS[:, :5]]),
            "models.multi_token_targets: targets[0] is [2, 5] but its layout has 8 local tokens; pass [b, t/cp]",
        ),
        ("a depth below 0", targets_of(depth=-1), "models.multi_token_targets: depth=-1 must be at least 0"),
        (
            "an unknown mode",
            targets_of(aggregation="mean"),
            "models.multi_token_targets: aggregation='mean' is not one of token_mean, sequence_mean_of_token_means, "
            "sequence_mean_of_token_sums, token_sum",
        ),
    ],
)

test_rejection_of_losses = rejected(
    {"tp": 2},
    [
        (
            "no depth",
            losses_of(hidden_states=torch.zeros(0, 2, 8, 3), targets=IDS.expand(0, 2, 8), divisors=IDS.expand(0, 2, 8)),
            "models.multi_token_losses: targets has no depth; pass depth 0, the next tokens, or more",
        ),
        (
            "a weight of other rows",
            losses_of(output_weight=torch.zeros(8, 3)),
            tuple(
                "models.multi_token_losses: output_weight has 8 rows but "
                f"rank {rank} of tp=2 has 4 of vocab_size=8; pass this rank's rows"
                for rank in range(2)
            ),
        ),
        (
            "a weight of another dtype",
            losses_of(output_weight=torch.zeros(4, 3).bfloat16()),
            "models.multi_token_losses: output_weight is bfloat16 but hidden_states are float32; convert one of them",
        ),
        (
            "divisors of other depths",
            losses_of(divisors=IDS.expand(3, 2, 8)),
            "models.multi_token_losses: divisors is [3, 2, 8] but hidden_states has m=2: m differs, 3 and 2",
        ),
        (
            "a coefficient below 0",
            losses_of(coefficient=-0.1),
            "models.multi_token_losses: coefficient=-0.1 must be at least 0",
        ),
    ],
)
