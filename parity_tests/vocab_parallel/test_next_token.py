"""Parity of vocab_parallel.next_token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from jax_ref.vocab_parallel import next_token_logprob
from parity_tests.parity import parity
from parity_tests.vocab_parallel.chunk_sizes import calls_of_all
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.decided_rows import decided_rows
from parity_tests.vocab_parallel.ignored_rows import SOME_IGNORED, has_no_next, next_is_ignored
from parity_tests.vocab_parallel.shard import group_of_several, owned_range, wants_no_gradient
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp

CUT = dict(
    mesh={"cp": (1, 2), "tp": (1, 2, 3, 4)},
    inputs={"logits": "b s/cp:dual_chunk_swap v/tp:ragged", "target": "b s"},
    outputs="b u tp=I cp=R",
    dims={"u": "s-1", "v": (8, 5, 13)},
    draw={"target": SOME_IGNORED, "logits": values(nan_rows=has_no_next)},
    options={"temperature": (1.0, 0.7)},
    rank_options={"chunk_size": (None, 1, 2, 5)},
    dtypes=("float32", "bfloat16", "float64", "float16"),
    sums="float32",
    reduction=("v",),
    nan_cotangents={"out": next_is_ignored},
)
KINDS = {"ours": vp.TrainingSamplingParams, "any object": SimpleNamespace}  # of sampling parameters
FILTERED = {
    **CUT,
    "draw": {**CUT["draw"], "logits": decided_rows(nan_rows=has_no_next)},
    "options": {
        "top_k": (None, 3, 1),
        "top_p": (1.0, 0.75, 0.0, None),
        "temperature": (1.0, 0.5),
        "min_p": (None, 0.1),
    },
    "rank_options": {**CUT["rank_options"], "kind": tuple(KINDS)},
}


def over_cp(c):
    """Over tp the core's exchange; over cp the scores there and the cotangents back."""
    scores, size = c.b * c.s // c.cp, c.accumulator_itemsize
    return Cost(
        forward=all_gathers(over_tp(c, 3 * scores), over_cp=[(1, scores * size)]),
        backward={"reduce_scatter/cp": (1, c.b * c.s * size)},
    )


def over_cp_by_width(c):
    """The same, and one int64 for the widths of the shards."""
    core = over_cp(c)
    calls, size = core.forward.get("all_gather/tp", (0, 0))
    widths = {"all_gather/tp": (calls + 1, size + 8)} if calls else {}
    return Cost(forward={**core.forward, **widths}, backward=core.backward)


def of_groups(mesh, cp_group, logits, target, chunk_size, kind="ours", **params):
    return vp.from_parallel_logits_to_logprobs(
        logits,
        target,
        *owned_range(mesh),
        mesh["tp"],
        cp_group=cp_group,
        chunk_size=chunk_size and chunk_size + mesh.rank("tp"),  # each rank its own
        sampling_params=None if params == {"temperature": 1.0} else KINDS[kind](**params),
        inference_only=wants_no_gradient(),
    )


@scheme(contract=vp.from_parallel_logits_to_logprobs, reference=next_token_logprob, cost=over_cp, **CUT)
def next_tokens(mesh, logits, target, temperature, chunk_size):
    return of_groups(mesh, mesh["cp"], logits, target, chunk_size, temperature=temperature)


PADDED = {**CUT, "inputs": {**CUT["inputs"], "target": "b n"}, "dims": {**CUT["dims"], "n": "s-3", "u": "n-1"}}


@scheme(contract=vp.from_parallel_logits_to_logprobs, reference=next_token_logprob, cost=over_cp, **PADDED)
def next_tokens_with_padding(mesh, logits, target, temperature, chunk_size):
    return of_groups(mesh, mesh["cp"], logits, target, chunk_size, temperature=temperature)


@scheme(
    contract=vp.from_parallel_logits_to_logprobs, reference=next_token_logprob, **FILTERED
)  # a filter's own cost is declared with the filter
def next_tokens_as_sampled(mesh, logits, target, top_k, top_p, temperature, min_p, chunk_size, kind):
    params = dict(top_k=top_k, top_p=top_p, temperature=temperature, min_p=min_p)
    return of_groups(mesh, group_of_several(mesh, "cp"), logits, target, chunk_size, kind, **params)


@scheme(contract=vp.get_next_token_logprobs_from_logits, reference=next_token_logprob, cost=over_cp_by_width, **CUT)
def next_tokens_by_rank(mesh, logits, target, temperature, chunk_size):
    return vp.get_next_token_logprobs_from_logits(
        target,
        logits,
        vocab_parallel_rank=mesh.rank("tp"),
        vocab_parallel_group=mesh["tp"],
        context_parallel_group=mesh["cp"],
        sampling_params=vp.TrainingSamplingParams(temperature=temperature),
        chunk_size=chunk_size,
    )


WHOLE = {
    **FILTERED,
    "mesh": {"cp": (1, 2, 3)},
    "inputs": {"logits": "b s/cp:dual_chunk_swap v", "target": "b s"},
    "outputs": "b u cp=R",
    "dims": {**CUT["dims"], "b": (2, 1, 3)},
}


def over_cp_alone(c):
    size = c.b * c.s * c.accumulator_itemsize
    return Cost(forward={"all_gather": (1, size // c.cp)}, backward={"reduce_scatter": (1, size)})


@scheme(contract=vp.get_next_token_logprobs_from_logits, reference=next_token_logprob, cost=over_cp_alone, **WHOLE)
def next_tokens_of_full_rows(mesh, logits, target, top_k, top_p, temperature, min_p, chunk_size, kind):
    return vp.get_next_token_logprobs_from_logits(
        target,
        logits,
        context_parallel_group=mesh["cp"],
        sampling_params=KINDS[kind](top_k=top_k, top_p=top_p, temperature=temperature, min_p=min_p),
        chunk_size=chunk_size,
    )


SCHEMES = (
    next_tokens,
    next_tokens_with_padding,
    next_tokens_as_sampled,
    next_tokens_by_rank,
    next_tokens_of_full_rows,
)
test_parity = parity(SCHEMES, lockstep=20, gloo=4)


def on_mesh(body, **mesh):
    return run(body, CaseSpec(scheme="vocab_parallel", mesh=mesh))


B, S, V = 2, 8, 6
LOGITS = torch.linspace(-2, 3, B * S * V, dtype=torch.float64).sin().view(B, S, V) * 4
IDS = torch.arange(B * S).view(B, S) * 5 % V


def shard(mesh, logits=LOGITS):
    """This rank's part of full logits."""
    part = vp._get_tokens_on_this_cp_rank(logits, mesh.rank("cp"), mesh.size("cp"))
    return part.chunk(mesh.size("tp"), -1)[mesh.rank("tp")].clone()


def scored(mesh, logits, target=IDS, **options):
    width = logits.shape[-1]
    start = mesh.rank("tp") * width
    return vp.from_parallel_logits_to_logprobs(
        logits, target, start, start + width, mesh["tp"], cp_group=mesh["cp"], **options
    )


def test_the_routes_agree_on_values_and_gradients():
    """A loss on each cp rank gives cp times the gradient where the type is R, and once where it is I."""

    def block(mesh, full):
        return full.chunk(2, 1)[mesh.rank("cp")].chunk(2, -1)[mesh.rank("tp")].clone()

    def body(mesh, case):
        local, stored, full = (x.requires_grad_() for x in (shard(mesh), block(mesh, LOGITS), LOGITS.clone()))
        cut = DTensor.from_local(IDS.chunk(2, 1)[mesh.rank("cp")], mesh.device_mesh["cp"], [Shard(1)])
        start, order = 3 * mesh.rank("tp"), torch.arange(S)
        by_dtensor = vp.dtensor_from_parallel_logits_to_logprobs(
            stored, cut, start, start + 3, mesh["tp"], seq_index=order
        )
        scores = scored(mesh, local), by_dtensor, vp.get_next_token_logprobs_from_logits(IDS, full)
        for y in scores:
            y.sum().backward()
        gradients = local.grad, 2 * shard(mesh, full.grad), stored.grad, block(mesh, full.grad)
        return [x.detach().float().numpy() for x in (*scores, *gradients)]

    for by_group, by_dtensor, plain, of_r, twice, of_i, once in on_mesh(body, cp=2, tp=2).results:
        np.testing.assert_array_equal(by_group, by_dtensor)
        np.testing.assert_array_equal(by_group, plain)
        np.testing.assert_array_equal(of_r, twice)
        np.testing.assert_array_equal(of_i, once)


def test_the_first_id_and_the_last_row_reach_nothing():
    def body(mesh, case):
        last_is_nan = LOGITS.clone()
        last_is_nan[:, -1] = torch.nan
        other_first = torch.cat([IDS[:, :1] + 1, IDS[:, 1:]], dim=1)
        results = []
        for logits, target in ((LOGITS, IDS), (last_is_nan, other_first)):
            leaf = shard(mesh, logits).requires_grad_()
            y = scored(mesh, leaf, target)
            y.sum().backward()
            results.append((y.detach(), leaf.grad))
        return [torch.equal(a, b) for a, b in zip(*results, strict=True)]

    assert on_mesh(body, cp=2, tp=2).results == ([True, True],) * 4


@pytest.mark.parametrize("pad", range(6))
def test_positions_past_the_ids_change_no_score(pad):
    def body(mesh, case):
        leaf = shard(mesh).requires_grad_()
        y = scored(mesh, leaf, IDS[:, : S - pad])
        y.sum().backward()
        padding = vp.allgather_cp_sharded_tensor(leaf.grad, mesh["cp"])[:, max(S - pad - 1, 0) :]
        return torch.equal(y, scored(mesh, shard(mesh))[:, : S - pad - 1]), bool((padding == 0).all())

    assert on_mesh(body, cp=2, tp=1).results == ((True, True),) * 2


def test_one_rank_alone_needs_no_group_and_any_length():
    logits, target = LOGITS[:, :5].float(), IDS[:, :5]
    y = vp.get_next_token_logprobs_from_logits(target, logits)
    picked = logits.double().log_softmax(-1)[:, :4].gather(-1, target[:, 1:, None])[..., 0]
    np.testing.assert_array_equal(np.float16(y.numpy()), np.float16(picked.numpy()))
    assert vp.get_next_token_logprobs_from_logits(target[:, :1], logits).shape == (2, 0)
    assert vp.get_next_token_logprobs_from_logits(target[:, :0], logits[:, :0]).shape == (2, 0)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_no_chunk_size_changes_the_ledger(engine):
    calls = calls_of_all(next_tokens, (None, 1, 3, 9), cp=2, tp=2, b=2, s=8, v=6, seed=3, engine=engine)
    assert {op for op, _ in calls} >= {"all_gather"}
