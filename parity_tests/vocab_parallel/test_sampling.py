"""Parity of vocab_parallel.sampling: log-probabilities and gradients among the kept tokens."""

from hypothesis import given, settings

from jax_ref.vocab_parallel.sampling import sampled_logprob
from parity_tests import Cost, check, every_case, ids, scheme
from parity_tests.harness.judge import judge
from parity_tests.vocab_parallel.decided_rows import decided_rows
from parity_tests.vocab_parallel.shard import owned_range
from torch_impl import vocab_parallel as vp

INTEGER = 8  # bytes of a width
DECLARED = dict(
    reference=sampled_logprob,
    inputs={"logits": "b s v/tp:ragged", "target": "b s"},
    outputs="b s tp=I",
    draw={"logits": decided_rows(), "target": ids("v", ignore=-100)},
    dtypes=("float32", "float64", "bfloat16", "float16"),
    reduction=("v",),
    roundings=2,  # log total, gradient
)
SMALL = dict(mesh={"tp": (1, 2, 3, 4)}, dims={"b": (1, 2), "s": (1, 3), "v": (2, 7, 12, 24)})


def filter_cost(c, known_range):
    """What the docstring says: one exchange of lists, or rounds of 256 sums; a width where the range is not known."""
    token, has_k, has_p = c.b * c.s * c.accumulator_itemsize, c.top_k is not None, c.top_p < 1.0
    integers = 0 if known_range else 1
    if has_k and c.top_k <= 1024:
        gathers, numbers, rounds = 1, c.top_k + 2 + has_p, 0
    elif has_k or has_p:
        gathers, numbers, rounds = 1 + has_p, 3 + 2 * has_p, c.itemsize * (has_k + has_p)
        integers += has_p
    else:
        gathers, numbers, rounds = 1, 3, 0
    forward = {"all_gather": (gathers + integers, numbers * token + integers * INTEGER)}
    return Cost(forward=forward | ({"all_reduce": (rounds, rounds * 256 * token)} if rounds else {}))


@scheme(
    options={"top_k": (None, 1, 5), "top_p": (1.0, 0.5, 0.9), "temperature": (1.0, 0.5)},
    cost=lambda c: filter_cost(c, known_range=False),
    **SMALL,
    **DECLARED,
)
def logprob_with_sampling(mesh, logits, target, top_k, top_p, temperature):
    return vp.DistributedLogprobWithSampling.apply(logits, target, mesh["tp"], top_k, top_p, False, temperature)


@scheme(
    options={"top_k": (None, 3), "top_p": (1.0, 0.3, 0.99), "temperature": (1.0, 2.0)},
    rank_options={"chunk_size": (None, 1, 2, 5)},
    cost=lambda c: filter_cost(c, known_range=True),
    **SMALL,
    **DECLARED,
)
def chunked_logprob_with_sampling(mesh, logits, target, top_k, top_p, temperature, chunk_size):
    own_size = None if chunk_size is None else chunk_size + mesh.rank("tp")  # chunks are nobody else's business
    return vp.ChunkedDistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, own_size, False, temperature, *owned_range(mesh)
    )


@scheme(
    mesh={"tp": (1, 2, 4)},
    dims={"b": (1,), "s": (2,), "v": (1030, 2100)},
    options={"top_k": (1025, None, 2000), "top_p": (1.0, 0.9, 0.5), "temperature": (1.0, 0.7)},
    cost=lambda c: filter_cost(c, known_range=True),
    **DECLARED,
)
def logprob_with_wide_sampling(mesh, logits, target, top_k, top_p, temperature):
    return vp.DistributedLogprobWithSampling.apply(
        logits, target, mesh["tp"], top_k, top_p, False, temperature, *owned_range(mesh)
    )


@given(every_case(logprob_with_sampling))
def test_parity(case):
    check(case)


@given(every_case(chunked_logprob_with_sampling))
def test_parity_in_chunks(case):
    check(case)


@given(every_case(logprob_with_wide_sampling))
@settings(max_examples=12)
def test_parity_of_a_wide_vocabulary(case):
    check(case)


@given(every_case(logprob_with_sampling, engine="gloo"))
@settings(max_examples=8)
def test_parity_on_gloo(case):
    check(case)


def test_no_chunk_size_changes_the_ledger():
    for limits in ({"top_k": 3, "top_p": 0.99}, {"top_k": None, "top_p": 0.3}):
        rows = set()
        for chunk_size in (None, *range(1, 9)):
            case = chunked_logprob_with_sampling.case(
                tp=2, b=2, s=3, v=12, seed=3, chunk_size=chunk_size, temperature=1.0, dtype="float32", **limits
            )
            report = judge(chunked_logprob_with_sampling, case)
            report.raise_if_failed()
            rows.add(tuple((row.rank, row.op, row.dtypes, row.shapes, row.phase) for row in report.ledger.rows))
        assert len(rows) == 1 and {row[-1] for row in next(iter(rows))} == {"fwd"}
