"""Parity of vocab_parallel.stored_order: ids and logits as DTensors, with positions in any order."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from jax_ref.vocab_parallel import next_token_logprob_of_stored
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.ignored_rows import SOME_IGNORED, has_no_next_as_stored
from parity_tests.vocab_parallel.rounding import equal_to_rounding
from parity_tests.vocab_parallel.shard import ceil, dtensor_of_shards, owned_range
from shardproof import CaseSpec, Cost, integers, scheme, values
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl import vocab_parallel as vp
from torch_impl.collectives import all_gather

STORED = dict(
    mesh={"cp": (1, 2, 3), "tp": (1, 2, 4)},
    outputs="b u tp=I cp=I",
    dims={"u": "s-1", "v": (8, 4, 12)},
    draw={
        "target": SOME_IGNORED,
        "logits": values(nan_rows=has_no_next_as_stored),
        "keys": integers(0, 9),
        "columns": integers(0, 0),
    },
    options={"temperature": (1.0, 0.7)},
    rank_options={"chunk_size": (None, 2)},
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    reduction=("v",),
    excluded_conditions=("inference_mode", "int32"),  # ids are sent in their dtype; the cost counts 8 bytes each
)


def stored_order_cost(c):
    """Forward gathers ids and scores over cp, and the core's statistics over tp; backward sends nothing."""
    n = c.b * c.s // c.cp
    return Cost(forward=all_gathers(over_tp(c, 3 * n), over_cp=[(1, 8 * n), (1, n * c.accumulator_itemsize)]))


def params(temperature):
    return SimpleNamespace(top_k=None, top_p=None, temperature=temperature)  # any object with these attributes


def ids_and_placement(mesh, target, has_all):
    """A rank's ids, or all ids, gathered at the cost of the function's own exchange; and their placement over cp."""
    return (all_gather(target, mesh["cp"], out="I", dim=1), Replicate()) if has_all else (target, Shard(1))


def stored_logprob(logits, target, keys, columns, temperature):
    return next_token_logprob_of_stored(logits, target, jnp.argsort(keys), temperature)


@scheme(
    reference=stored_logprob,
    contract=vp.dtensor_from_parallel_logits_to_logprobs,
    inputs={"logits": "b s/cp v/tp:ragged", "target": "b s/cp", "keys": "s", "columns": "v"},
    cost=stored_order_cost,
    **{**STORED, "rank_options": {**STORED["rank_options"], "has_all_ids": (False, True)}},
)
def stored_next_tokens(mesh, logits, target, keys, columns, temperature, chunk_size, has_all_ids):
    ids, over_cp = ids_and_placement(mesh, target, has_all_ids)
    return vp.dtensor_from_parallel_logits_to_logprobs(
        logits,
        DTensor.from_local(ids, mesh.device_mesh["cp"], [over_cp]),
        *owned_range(mesh),
        mesh["tp"],
        seq_index=keys.argsort(stable=True),
        chunk_size=chunk_size,
        sampling_params=params(temperature),
    )


@scheme(
    reference=stored_logprob,
    contract=vp.get_logprobs_from_vocab_parallel_logits,
    inputs={"logits": "b s/cp v/tp:ceil", "target": "b s/cp", "keys": "s", "columns": "v"},
    layouts={"ceil": ceil},
    cost=stored_order_cost,
    **{**STORED, "rank_options": {**STORED["rank_options"], "by_route": (False, True), "has_all_ids": (False, True)}},
)
def next_tokens_of_a_dtensor(mesh, logits, target, keys, columns, temperature, chunk_size, by_route, has_all_ids):
    logits = dtensor_of_shards(mesh, logits, len(keys), len(columns))
    ids, over_cp = ids_and_placement(mesh, target, has_all_ids)
    target = DTensor.from_local(ids, mesh.device_mesh, [over_cp, Replicate()])
    options = dict(seq_index=keys.argsort(stable=True), chunk_size=chunk_size, sampling_params=params(temperature))
    if by_route:
        return vp.get_next_token_logprobs_from_logits(target, logits, **options)
    return vp.get_logprobs_from_vocab_parallel_logits(logits, target, **options)


test_parity = parity([stored_next_tokens, next_tokens_of_a_dtensor], lockstep=20, gloo=4)


@pytest.mark.fast_values(3)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("v", [5, 7, 16])
def test_uneven_shards_follow_the_ceil_rule(v, tp):
    for cp in (1, 2):
        case = next_tokens_of_a_dtensor.case(cp=cp, tp=tp, b=2, s=6, v=v, dtype="float32", seed=v)
        verify_case(next_tokens_of_a_dtensor, case).raise_if_failed()


def on_mesh(body, **mesh):
    return run(body, CaseSpec(scheme="vocab_parallel", mesh=mesh or {"cp": 2, "tp": 2})).results


LOGITS = torch.linspace(-2, 3, 2 * 8 * 6, dtype=torch.float64).sin().view(2, 8, 6) * 4
IDS = torch.arange(16).view(2, 8) * 5 % 6
ORDER = torch.tensor([3, 0, 7, 4, 1, 6, 5, 2])


def test_the_gradient_is_a_dtensor_with_the_placements_of_the_logits():
    def body(mesh, case):
        part = LOGITS.chunk(2, 1)[mesh.rank("cp")].chunk(2, 2)[mesh.rank("tp")].contiguous()
        logits = DTensor.from_local(part, mesh.device_mesh, [Shard(1), Shard(2)]).requires_grad_()
        target = DTensor.from_local(IDS.chunk(2, 1)[mesh.rank("cp")], mesh.device_mesh["cp"], [Shard(1)])
        y = vp.get_logprobs_from_vocab_parallel_logits(logits, target, ORDER)
        with torch.no_grad():
            silent = vp.get_logprobs_from_vocab_parallel_logits(logits, target, ORDER)
        y.sum().backward()
        gradient = logits.grad
        return gradient.placements == logits.placements, silent.requires_grad, torch.equal(silent, y)

    assert on_mesh(body) == ((True, False, True),) * 4


def test_the_stored_order_changes_no_score():
    def body(mesh, case):
        def scores(order):
            part = LOGITS[:, order].chunk(2, 1)[mesh.rank("cp")]
            ids = IDS[:, order].chunk(2, 1)[mesh.rank("cp")]
            target = DTensor.from_local(ids, mesh.device_mesh["cp"], [Shard(1)])
            return vp.dtensor_from_parallel_logits_to_logprobs(part, target, 0, 6, mesh["tp"], seq_index=order)

        return torch.equal(scores(ORDER), scores(torch.arange(8)))

    assert on_mesh(body, cp=2, tp=1) == (True, True)


def test_ids_may_be_replicated_over_cp_or_on_a_mesh_without_cp():
    def body(mesh, case):
        part = LOGITS[:, ORDER].chunk(2, 1)[mesh.rank("cp")]
        replicated = DTensor.from_local(IDS[:, ORDER], mesh.device_mesh["cp"], [Replicate()])
        stored = vp.dtensor_from_parallel_logits_to_logprobs(part, replicated, 0, 6, mesh["tp"], seq_index=ORDER)
        on_tp = DTensor.from_local(IDS, mesh.device_mesh["tp"], [Replicate()])
        from_full = vp.dtensor_from_parallel_logits_to_logprobs(LOGITS, on_tp, 0, 6, mesh["tp"])
        plain = vp.dtensor_from_parallel_logits_to_logprobs(LOGITS, IDS, 0, 6, mesh["tp"])
        return torch.equal(stored, from_full), torch.equal(plain, from_full)

    assert on_mesh(body, cp=2, tp=1) == ((True, True), (True, True))


def test_logits_and_ids_may_both_be_replicated_over_cp():
    """Positions are in their original order, without an index; every rank of cp has every score."""
    want = LOGITS[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:].unsqueeze(-1)).squeeze(-1)

    def body(mesh, case):
        part = LOGITS.chunk(2, 2)[mesh.rank("tp")].contiguous()
        logits = DTensor.from_local(part, mesh.device_mesh, SHARDED_OVER_TP)
        ids = DTensor.from_local(IDS, mesh.device_mesh, [Replicate(), Replicate()])
        start = 3 * mesh.rank("tp")
        return [
            equal_to_rounding(scores, want)
            for scores in (
                vp.get_logprobs_from_vocab_parallel_logits(logits, ids),
                vp.get_next_token_logprobs_from_logits(ids, logits),
                vp.dtensor_from_parallel_logits_to_logprobs(part, ids, start, start + 3, mesh["tp"]),
            )
        ]

    assert on_mesh(body) == ([True] * 3,) * 4


def sharded_ids(mesh, axis="cp", placement=None):
    local_ids = IDS.chunk(2, 1)[mesh.rank(axis)] if placement is None else IDS
    return DTensor.from_local(local_ids, mesh.device_mesh[axis], [placement or Shard(1)])


def on_unnamed(mesh, *placements):
    """Ids over the same ranks, on a mesh whose dims have no names."""
    unnamed = DeviceMesh("cpu", mesh.device_mesh.mesh, _init_backend=False)
    return DTensor.from_local(IDS[:, :4], unnamed, placements, run_check=False)


def local(mesh, target, seq_index=None, logits=LOGITS[:, :4]):
    return vp.dtensor_from_parallel_logits_to_logprobs(logits, target, 0, 6, mesh["tp"], seq_index=seq_index)


SHARDED_OVER_TP = (Replicate(), Shard(2))


def score_dtensor(mesh, ids=IDS, placements=SHARDED_OVER_TP, seq_index=None, axes=("cp", "tp")):
    device_mesh = mesh.device_mesh[axes] if len(axes) == 1 else mesh.device_mesh
    logits = DTensor.from_local(LOGITS[:, :4], device_mesh, placements)
    return vp.get_logprobs_from_vocab_parallel_logits(logits, ids, seq_index)


LOCAL, GLOBAL = (
    f"vocab_parallel.{name}"
    for name in ("dtensor_from_parallel_logits_to_logprobs", "get_logprobs_from_vocab_parallel_logits")
)
REJECTED = [
    (
        lambda m: local(m, sharded_ids(m)),
        f"{LOCAL}: seq_index is None but target is sharded over cp=2; pass the [s] index of stored positions",
    ),
    (
        lambda m: local(m, sharded_ids(m), torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])),
        f"{LOCAL}: seq_index is not a permutation of 0..7",
    ),
    (lambda m: local(m, sharded_ids(m), torch.arange(7)), f"{LOCAL}: seq_index is not a permutation of 0..7"),
    (
        lambda m: score_dtensor(m, sharded_ids(m), (Shard(1), Shard(2)), torch.arange(8, device="meta")),
        f"{GLOBAL}: seq_index is on meta, without values; pass the index of stored positions",
    ),
    (
        lambda m: local(m, IDS[:, :4], torch.arange(4)),
        f"{LOCAL}: seq_index is given but target has no mesh dim 'cp'; pass it as a DTensor of such a mesh, "
        "or no seq_index",
    ),
    (
        lambda m: local(m, sharded_ids(m), torch.arange(10), LOGITS[:, :5]),
        f"{LOCAL}: target has 8 positions but vocab_parallel_logits covers 10; a stored order is not padded",
    ),
    (
        lambda m: local(m, sharded_ids(m), ORDER, LOGITS[:, :3]),
        f"{LOCAL}: target has 8 positions but vocab_parallel_logits covers 6 (3 per rank, cp=2)",
    ),
    (
        lambda m: local(m, sharded_ids(m, "tp"), ORDER),
        f"{LOCAL}: target is Shard(dim=1) over tp; redistribute to Shard(0) or Replicate",
    ),
    (
        lambda m: local(m, sharded_ids(m, placement=Partial()), ORDER),
        f"{LOCAL}: target is Partial(sum) over cp; redistribute to Shard(1) or Replicate",
    ),
    (
        lambda m: local(m, on_unnamed(m, Shard(1), Replicate())),
        f"{LOCAL}: target is Shard(dim=1) over dim 0 of a mesh without names; pass mesh_dim_names to the mesh, or "
        "redistribute to Shard(0) or Replicate",
    ),
    (
        lambda m: local(m, on_unnamed(m, Replicate(), Partial())),
        f"{LOCAL}: target is Partial(sum) over dim 1 of a mesh without names; pass mesh_dim_names to the mesh, or "
        "redistribute to Shard(0) or Replicate",
    ),
    (
        lambda m: score_dtensor(m, axes=("cp",), placements=[Shard(1)]),
        f"{GLOBAL}: vocab_parallel_logits has no mesh dim 'tp' (mesh dims: cp); name the one that shards the "
        "vocabulary 'tp'",
    ),
    (
        lambda m: score_dtensor(m, placements=(Replicate(), Replicate())),
        f"{GLOBAL}: vocab_parallel_logits is Replicate over tp; redistribute to Shard(-1)",
    ),
    (
        lambda m: score_dtensor(m, placements=(Partial(), Shard(2))),
        f"{GLOBAL}: vocab_parallel_logits is Partial(sum) over cp; redistribute to Shard(1) or Replicate",
    ),
    (
        lambda m: score_dtensor(m, placements=(Shard(1), Shard(2)), seq_index=ORDER),
        f"{GLOBAL}: vocab_parallel_logits is sharded over cp but input_ids is a plain tensor; pass a DTensor",
    ),
    (
        lambda m: score_dtensor(m, sharded_ids(m, placement=Replicate()), seq_index=ORDER),
        f"{GLOBAL}: seq_index is given but vocab_parallel_logits is Replicate over cp; drop it, or shard the logits "
        "over cp",
    ),
    (
        lambda m: score_dtensor(m, sharded_ids(m)),
        f"{GLOBAL}: input_ids is sharded over cp but vocab_parallel_logits is Replicate; redistribute one of them",
    ),
    (
        lambda m: score_dtensor(m, sharded_ids(m, placement=Replicate()), (Shard(1), Shard(2))),
        f"{GLOBAL}: seq_index is None but vocab_parallel_logits is sharded over cp=2; pass the [s] index of stored "
        "positions",
    ),
    (
        lambda m: local(m, sharded_ids(m, placement=Replicate())),
        f"{LOCAL}: target has 8 positions but vocab_parallel_logits covers 4; where cp=2 shards the logits, pass "
        "seq_index",
    ),
    (
        lambda m: score_dtensor(m, axes=("tp",), placements=[Shard(2)], seq_index=ORDER),
        f"{GLOBAL}: seq_index is given but the mesh has no dim 'cp' (mesh dims: tp)",
    ),
]


test_rejection = rejected({"cp": 2, "tp": 2}, [(text[15:90], call, text) for call, text in REJECTED])


def test_logits_that_are_not_a_dtensor_are_rejected():
    with pytest.raises(TypeError) as caught:
        vp.get_logprobs_from_vocab_parallel_logits(LOGITS, IDS)
    assert str(caught.value) == (f"{GLOBAL}: vocab_parallel_logits is a Tensor; pass a DTensor with a mesh dim 'tp'")
