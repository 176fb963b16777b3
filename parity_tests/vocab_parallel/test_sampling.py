"""Parity of vocab_parallel.sampling: log-probabilities and gradients among the kept tokens."""

import numpy as np
import pytest
import torch

from jax_ref.vocab_parallel import sampled_logprob
from parity_tests.vocab_parallel.chunk_sizes import calls_of_all
from parity_tests.vocab_parallel.decided_rows import decided_rows
from parity_tests.vocab_parallel.ignored_rows import IGNORED_TARGETS, SOME_IGNORED
from parity_tests.vocab_parallel.rounding import equal_to_rounding
from parity_tests.vocab_parallel.shard import owned_range, wants_no_gradient
from shardproof import CaseSpec, Cost, scheme
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl import vocab_parallel as vp

INTEGER = 8  # bytes of a width
DECLARED = dict(
    reference=sampled_logprob,
    inputs={"logits": "b s v/tp:ragged", "target": "b s"},
    outputs="b s tp=I",
    draw={"logits": decided_rows(nan_rows=IGNORED_TARGETS), "target": SOME_IGNORED},
    dtypes=("float32", "float64", "bfloat16", "float16"),
    sums="float32",
    reduction=("v",),
    roundings=2,  # log total, gradient
    nan_cotangents={"out": IGNORED_TARGETS},
)
SMALL = dict(mesh={"tp": (1, 2, 3, 4)}, dims={"b": (1, 2), "s": (3,), "v": (2, 7, 24)})


def filter_cost(c, known_range):
    """The docstring's cost: one exchange of lists, or rounds of 256 sums; a width where the range is not known."""
    token, has_k, has_p = c.b * c.s * c.accumulator_itemsize, c.top_k is not None, c.top_p < 1.0
    integers, widths = 0 if known_range else 1, 0
    if has_k and c.top_k <= 1024:
        gathers, numbers, rounds = 1, c.top_k + 2 + has_p, 0
    elif has_k or has_p:
        gathers, numbers, rounds = 1 + 2 * has_p, 3 + 3 * has_p, c.itemsize * (has_k + has_p)
        widths = has_p
    else:
        gathers, numbers, rounds = 1, 3, 0
    if c.mesh["tp"] == 1:  # one rank has full rows: there is nothing to merge
        gathers = numbers = integers = widths = 0
    sent = numbers * token + integers * INTEGER + widths * c.accumulator_itemsize
    forward = {"all_gather": (gathers + integers, sent)} if gathers + integers else {}
    return Cost(forward=forward | ({"all_reduce": (rounds, rounds * 256 * token)} if rounds else {}))


@scheme(
    contract=vp.DistributedLogprobWithSampling,
    options={"top_k": (None, 1, 5), "top_p": (1.0, 0.5, 0.9), "temperature": (1.0, 0.5)},
    cost=lambda c: filter_cost(c, known_range=False),
    **SMALL,
    **DECLARED,
)
@pytest.mark.cases(8, engine="gloo")
@pytest.mark.cases
def logprob_with_sampling(mesh, logits, target, top_k, top_p, temperature):
    return vp.DistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, wants_no_gradient(), temperature
    )


@scheme(
    contract=vp.ChunkedDistributedLogprobWithSampling,
    options={"top_k": (None, 3), "top_p": (0.3, 1.0, 0.99), "temperature": (2.0,)},
    rank_options={"chunk_size": (None, 1, 2, 5)},
    cost=lambda c: filter_cost(c, known_range=True),
    **SMALL,
    **DECLARED,
)
@pytest.mark.cases
def chunked_logprob_with_sampling(mesh, logits, target, top_k, top_p, temperature, chunk_size):
    own_size = None if chunk_size is None else chunk_size + mesh.rank("tp")  # each rank may have another size
    return vp.ChunkedDistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, own_size, wants_no_gradient(), temperature, *owned_range(mesh)
    )


@scheme(
    contract=vp.DistributedLogprobWithSampling,
    mesh={"tp": (1, 2, 4)},
    dims={"b": (1,), "s": (2,), "v": (1030, 2100)},
    options={"top_k": (1025, None, 2000), "top_p": (1.0, 0.9, 0.5), "temperature": (1.0, 0.7)},
    cost=lambda c: filter_cost(c, known_range=True),
    **DECLARED,
)
@pytest.mark.cases(12)
def logprob_with_wide_sampling(mesh, logits, target, top_k, top_p, temperature):
    return vp.DistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, wants_no_gradient(), temperature, *owned_range(mesh)
    )


@scheme(
    contract=vp.DistributedLogprobWithSampling,
    mesh={"tp": (1, 2)},
    dims={"b": (1,), "s": (1, 2), "v": (8450, 12800)},
    options={"top_k": (1025, None, 3000), "top_p": (1.0, 0.5), "temperature": (1.0, 0.7)},
    cost=lambda c: filter_cost(c, known_range=True),
    # Of equal logits top-p keeps half, exactly; of large ones it keeps few.
    **{**DECLARED, "draw": {**DECLARED["draw"], "logits": decided_rows("large", "zeros", "ones")}},
)
@pytest.mark.cases(12)
def sampling_of_long_rows(mesh, logits, target, top_k, top_p, temperature):
    return vp.DistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, wants_no_gradient(), temperature, *owned_range(mesh)
    )


def one_peaked_row(generator, shape):
    """Top-p keeps a single token in the first row of a sequence, and many tokens in the other rows."""
    logits = 3 * generator.standard_normal(shape)
    logits[..., 0, generator.integers(shape[-1])] = 40.0
    return logits


@scheme(
    contract=vp.DistributedLogprobWithSampling,
    mesh={"tp": (1, 2, 3)},
    dims={"b": (1, 2), "s": (3,), "v": (300, 2100, 8450)},
    options={"top_k": (None, 1025), "top_p": (0.3, 0.9), "temperature": (1.0, 0.7)},
    cost=lambda c: filter_cost(c, known_range=True),
    **{**DECLARED, "draw": {**DECLARED["draw"], "logits": one_peaked_row}, "dtypes": ("float32", "float64")},
)
@pytest.mark.cases(20)
def sampling_beside_a_peaked_row(mesh, logits, target, top_k, top_p, temperature):
    return vp.DistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, wants_no_gradient(), temperature, *owned_range(mesh)
    )


@scheme(
    contract=vp.DistributedLogprobWithSampling,
    mesh={"tp": (1, 2)},
    dims={"b": (1,), "s": (2, 3), "v": (12800, 16896)},
    options={"top_k": (None, 9000), "top_p": (0.5, 0.9), "temperature": (1.0, 0.25)},
    cost=lambda c: filter_cost(c, known_range=True),
    **{**DECLARED, "draw": {**DECLARED["draw"], "logits": decided_rows("normal")}, "dtypes": ("float64",)},
)
@pytest.mark.cases(12)
def sampling_of_flat_and_peaked_rows(mesh, logits, target, top_k, top_p, temperature):
    """Rows so long that top-p keeps tokens of probability below (1 - p) / TAIL in flat rows."""
    return vp.DistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, wants_no_gradient(), temperature, *owned_range(mesh)
    )


@pytest.mark.slow
def test_no_chunk_size_changes_the_ledger():
    sizes = dict(tp=2, b=2, s=3, v=12, seed=3, dtype="float32")
    for limits in ({"top_k": 3, "top_p": 0.99}, {"top_k": None, "top_p": 0.3}):
        calls = calls_of_all(chunked_logprob_with_sampling, (None, *range(1, 9)), **sizes, **limits)
        assert {phase for _, phase in calls} == {"fwd"}


LIMITS = {"top-k": (3, 1.0), "top-p": (None, 0.7), "both": (4, 0.7), "long top-k": (2000, 1.0), "all": (2000, 0.7)}
every_limit = pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)


def on_ranks(body, tp=2):
    return run(body, CaseSpec(scheme="sampling", mesh={"tp": tp})).results


def normal(*shape):
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=[7, 0])).standard_normal(shape))


def shard(mesh, full):
    """This rank's equal share of the columns, a leaf of its own."""
    return full.chunk(mesh.size("tp"), dim=-1)[mesh.rank("tp")].clone().requires_grad_()


def score(mesh, logits, target, limits, **options):
    start = mesh.rank("tp") * logits.shape[-1]
    options = {"inference_only": False, "temperature": 1.0} | options
    owned = start, start + logits.shape[-1]
    return vp.DistributedLogprobWithSampling.apply(logits, target, mesh["tp"], *limits, *options.values(), *owned)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_without_limits_it_is_the_plain_function_to_the_bit(temperature):
    target = torch.tensor([[0, 3, 7, -100]])

    def body(mesh, case):
        local, rank = shard(mesh, normal(1, 4, 8).float()), mesh.rank("tp")
        pairs = []
        for off in ((None, 1.0), (0, None), (-1, 1)):
            y = score(mesh, local, target, off, temperature=temperature)
            pairs.append([y, *torch.autograd.grad(y.sum(), local)])
        y = vp.DistributedLogprob.apply(local, target, 4 * rank, 4 * rank + 4, mesh["tp"], False, temperature)
        plain = [y, *torch.autograd.grad(y.sum(), local)]
        return all(torch.equal(a, b) for pair in pairs for a, b in zip(pair, plain, strict=True))

    ranks = run(body, CaseSpec(scheme="sampling", mesh={"tp": 2}))
    assert all(ranks.results)
    assert len({(row.op, row.shapes) for row in ranks.ledger.rows}) == 1


@every_limit
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_targets_within_filtered_and_out_of_vocabulary(tp, limits):
    # All limits keep id 7. Only a top-k above the vocabulary's size, without top-p, keeps ids 0 to 2.
    target = torch.tensor([[7, 6, 5, 0, 1, 2, -100, 8, 15, 2**40]])
    logits = (2.0 * torch.arange(8.0)).expand(1, 10, 8)
    within, filtered, ignored = slice(0, 1), slice(3, 6), slice(6, 10)
    if limits[0] == 2000 and limits[1] == 1.0:
        within, filtered = slice(0, 6), slice(0, 0)

    def body(mesh, case):
        local = shard(mesh, logits)
        y = score(mesh, local, target, limits)
        (slope,) = torch.autograd.grad(y, local, torch.ones_like(y))
        return y.detach().numpy()[0], slope.numpy()[0]

    results = on_ranks(body, tp)
    slopes = np.concatenate([slope for _, slope in results], axis=-1)
    for y, _ in results:
        np.testing.assert_array_equal(y, results[0][0])
        assert np.isfinite(y[within]).all()
        assert (y[filtered] == -np.inf).all() and (y[ignored] == 0.0).all()
    assert (slopes[ignored] == 0.0).all()
    assert (slopes[filtered] <= 0.0).all() and (slopes[filtered, :3] == 0.0).all()  # -p g on kept columns alone
    assert (slopes[filtered, 7] < -0.5).all()


@every_limit
@pytest.mark.parametrize("mask", [[0, 3, 4, 7], [0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3, 4, 6, 7]])
def test_masked_columns(mask, limits):
    logits = normal(1, 8, 8).float()
    logits[..., mask] = -torch.inf

    def body(mesh, case):
        local = shard(mesh, logits)
        y = score(mesh, local, torch.arange(8).view(1, 8), limits)
        (slope,) = torch.autograd.grad(y, local, torch.ones_like(y))
        return y.detach().numpy()[0], slope.numpy()

    for y, slope in on_ranks(body):
        assert not np.isnan(y).any() and not np.isnan(slope).any()
        assert (y[mask] == -np.inf).all()


@every_limit
def test_a_row_without_a_softmax_stays_visible(limits):
    logits = normal(1, 5, 8).float()
    logits[0, 0], logits[0, 1, 6], logits[0, 2, 1] = -torch.inf, torch.nan, torch.inf
    logits[0, 4] = torch.nan  # its target is ignored

    def body(mesh, case):
        local = shard(mesh, logits)
        y = score(mesh, local, torch.tensor([[0, 0, 0, 0, -100]]), limits)
        (slope,) = torch.autograd.grad(y, local, torch.ones_like(y))
        return np.isnan(y.detach().numpy()[0]).tolist(), np.isnan(slope.numpy()[0]).all(-1).tolist()

    assert on_ranks(body) == (([True, True, True, False, False],) * 2,) * 2


@every_limit
def test_any_strides_and_an_expanded_cotangent(limits):
    def body(mesh, case):
        rank = mesh.rank("tp")
        wide = normal(3, 5, 2, 16).float()[:, 1:, 0, 4 * rank : 4 * rank + 4]
        target = torch.arange(12).remainder(8).view(4, 3).t()
        results = []
        for local, ids_ in (
            (wide, target),
            (wide.contiguous(), target.contiguous()),
            (wide.flatten(0, 1), target.reshape(12)),
        ):
            local = local.detach().requires_grad_()
            before = local.detach().clone()
            y = score(mesh, local, ids_, limits)
            (slope,) = torch.autograd.grad(y, local, torch.ones(()).expand(y.shape))
            assert torch.equal(local, before)
            results.append((y.reshape(-1), slope.reshape(12, 4)))
        return all(equal_to_rounding(a, b) for one in results[1:] for a, b in zip(one, results[0], strict=True))

    assert all(on_ranks(body))


@every_limit
def test_no_tokens_and_no_columns(limits):
    def body(mesh, case):
        empty = torch.zeros(2, 0, 4, requires_grad=True)
        y = score(mesh, empty, torch.zeros(2, 0, dtype=torch.int64), limits)
        y.sum().backward()
        nothing = vp.DistributedLogprobWithSampling.apply(torch.zeros(3, 0), torch.arange(3), mesh["tp"], *limits)
        return tuple(y.shape), tuple(empty.grad.shape), nothing.tolist()

    assert on_ranks(body) == (((2, 0), (2, 0, 4), [0.0, 0.0, 0.0]),) * 2


@every_limit
def test_five_numbers_per_token_are_saved_beside_the_logits(limits):
    def body(mesh, case):
        local, saved = shard(mesh, normal(2, 3, 40)), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            score(mesh, local, torch.zeros(2, 3, dtype=torch.int64), limits)
        extra = [x for x in saved if x.data_ptr() != local.data_ptr()]
        return len(saved) - len(extra), sum(x.numel() for x in extra)

    assert on_ranks(body) == ((1, 5 * 6),) * 2


@every_limit
def test_a_backward_is_prepared_unless_declined(limits):
    def body(mesh, case):
        local, target = shard(mesh, normal(2, 3, 40)), torch.zeros(2, 3, dtype=torch.int64)
        function = vp.DistributedLogprobWithSampling
        function.apply(local, target, mesh["tp"], *limits).sum().backward()
        return local.grad is not None

    assert all(on_ranks(body))


@every_limit
def test_no_backward_after_inference_or_an_edit_of_the_logits(limits):
    def body(mesh, case):
        local, target = shard(mesh, normal(2, 3, 40)), torch.zeros(2, 3, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="inference_only=True saved nothing for backward"):
            score(mesh, local, target, limits, inference_only=True).sum().backward()
        y = score(mesh, local, target, limits)
        with torch.no_grad():
            local += 1.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return local.grad is None

    assert all(on_ranks(body))


@pytest.mark.slow
@every_limit
def test_gradcheck(limits):
    target = torch.tensor([[4, 0, -100], [2, 2, 1]])
    full = normal(2, 3, 5)
    target[0, 0], target[1, 1] = full[0, 0].argmax(), full[1, 1].argmax()
    target[target >= 0] = full.argmax(-1)[target >= 0]  # a filtered target's -inf has no difference quotient

    def body(mesh, case):
        leaf = full.clone().requires_grad_()
        return torch.autograd.gradcheck(lambda z: score(mesh, z, target, limits, temperature=0.7), leaf)

    assert on_ranks(body, tp=1) == (True,)


@pytest.mark.slow
def test_tokens_need_not_be_sharded_equally():
    for route in (logprob_with_sampling, chunked_logprob_with_sampling):
        for limits in ({"top_k": None, "top_p": 0.5}, {"top_k": 5, "top_p": 0.9}):
            verify_case(route, route.case(tp=4, b=1, s=3, v=12, dtype="float32", **limits)).raise_if_failed()
