"""Parity of vocab_parallel.long_rows: rows of at least 4,096 columns on a CPU, which are computed in tiles."""

import math

import numpy as np
import pytest
import torch
from hypothesis import settings

from jax_ref.vocab_parallel import logprob, logprob_and_negative_entropy
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.ignored_rows import SOME_IGNORED
from parity_tests.vocab_parallel.shard import owned_range
from shardproof import CaseSpec, Cost, scheme
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp
from torch_impl.vocab_parallel import long_rows


def masked_or_rising_logits(generator, shape):
    """Normal logits as they are, with a tenth of them -inf, with all but a few at one end -inf, or rising."""
    logits, drawn, place = generator.standard_normal(shape), generator.integers(4), np.arange(shape[-1])
    if drawn == 0:
        return np.where(generator.random(shape) < 0.1, -np.inf, logits)
    if drawn == 1:  # some ranks have no logit but -inf
        kept = place if generator.integers(2) else place[::-1]
        return np.where(kept < generator.integers(1, 99), logits, -np.inf)
    return logits + (drawn == 2) * np.linspace(0.0, 200.0, shape[-1])


# Of 8,190 columns one rank of two has less than a long row; of 4,225 the last span has 129.
LONG = dict(
    mesh={"tp": (2, 3)},
    inputs={"logits": "b s v/tp:ragged", "target": "b s"},
    dims={"b": (1,), "s": (1, 2, 0), "v": (8190, 8450, 12800)},
    draw={
        "target": SOME_IGNORED,
        "logits": masked_or_rising_logits,
    },
    options={"temperature": (1.0, 0.7)},
    reduction=("v",),
)
SPECIAL = ("ties", "maximum last", "-inf", "one finite", "+inf", "nan")


@scheme(
    contract=vp.vocab_parallel_logprob,
    reference=logprob,
    dtypes=("float32", "float64", "bfloat16"),
    sums="float32",
    rank_options={"chunk_size": (None, 1)},
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 3 * c.b * c.s))),
    **LONG,
)
@pytest.mark.cases(settings().max_examples // 4)
def logprob_of_long_rows(mesh, logits, target, temperature, chunk_size):
    start, end = owned_range(mesh)
    options = dict(vocab_start_index=start, vocab_end_index=end, temperature=temperature, chunk_size=chunk_size)
    return vp.vocab_parallel_logprob(logits, target, mesh["tp"], **options)


@scheme(
    contract=vp.vocab_parallel_logprob,
    reference=logprob_and_negative_entropy,
    outputs=("b s tp=I", "b s tp=I"),
    dtypes=("float32", "bfloat16"),
    sums="float32",
    roundings=3,  # log total, mean shifted logit, gradient
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 4 * c.b * c.s))),
    **LONG,
)
@pytest.mark.cases(settings().max_examples // 4)
def logprob_with_entropy_of_long_rows(mesh, logits, target, temperature):
    start, end = owned_range(mesh)
    options = dict(vocab_start_index=start, vocab_end_index=end, temperature=temperature, with_entropy=True)
    return vp.vocab_parallel_logprob(logits, target, mesh["tp"], **options)


def drawn_rows(width, dtype):
    return torch.randn(7, width, generator=torch.Generator().manual_seed(width)).mul_(4.0).to(dtype)


def sums_and_gradients(rows):
    """All that the module computes of some rows, one after another in a list."""
    row_max, row_sum_m1, weighted_sum = long_rows.row_sums(rows, 0.7, True)
    factors = torch.linspace(-1.0, 2.0, 2 * len(rows), dtype=row_max.dtype).view(2, -1, 1)
    plain, scaled, in_place = torch.empty_like(rows), torch.empty_like(rows), rows.clone()
    long_rows.write_terms(plain, rows, row_max, 0.7, factors[0], None)
    long_rows.write_terms(scaled, rows, row_max, 0.7, *factors)
    long_rows.write_terms(in_place, in_place, row_max, 0.7, *factors)
    assert torch.equal(in_place, scaled)
    return [row_max, row_sum_m1, weighted_sum, *long_rows.row_sums(rows, 0.7, False)[:2], plain, scaled]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [4096, 4096 + 256, 5056])
def test_rows_do_not_depend_on_their_tile(monkeypatch, dtype, width):
    rows = drawn_rows(width, dtype)
    in_one_tile = sums_and_gradients(rows)
    for tile_rows in (1, 3):
        monkeypatch.setattr(long_rows, "TILE_BYTES", tile_rows * 2 * 8 * width)
        assert all(map(torch.equal, sums_and_gradients(rows), in_one_tile))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_expression_that_is_compiled_is_equal_to_the_tiles(dtype):
    rows = drawn_rows(5056, dtype)
    rows[0, :7] = -math.inf
    row_max = long_rows.row_sums(rows, 0.7, False)[0]
    intercept, slope = torch.linspace(-1.0, 2.0, 2 * len(rows), dtype=row_max.dtype).view(2, -1, 1)
    for row_slope in (None, slope):
        tiled, fused = torch.empty_like(rows), torch.empty_like(rows)
        long_rows.write_terms(tiled, rows, row_max, 0.7, intercept, row_slope)
        long_rows.write_fused_terms(fused, rows, row_max, 0.7, intercept, row_slope)
        assert torch.equal(tiled, fused)


def test_masked_logits_add_nothing_to_the_weighted_sum():
    """A tile in which one row has -inf beside rows that have none; in base 2, whole logits have sums that are exact."""
    rows = torch.randint(-8, 8, (7, 4352), generator=torch.Generator().manual_seed(0)).double()
    rows[3, 1::2] = -math.inf
    shifted = rows - rows.amax(-1, keepdim=True)
    expected = [sum(2.0**b * b for b in row if b > -math.inf) for row in shifted.tolist()]
    _, _, weighted_sum = long_rows.row_sums(rows, long_rows.LOG2_E, True)
    assert weighted_sum[:, 0].tolist() == expected


def test_strided_rows_are_equal_to_contiguous_ones():
    rows = drawn_rows(8192, torch.float32)
    for strided in (rows[:, 64:4352], rows[::2]):
        assert all(map(torch.equal, sums_and_gradients(strided), sums_and_gradients(strided.contiguous())))


@pytest.mark.parametrize("width", [4096, 4100, 4096 + 255])
def test_rows_whose_sums_are_known(width):
    """Rows of zeros and -inf have integer sums; that a row of +inf or NaN has none is said by its maximum."""
    x = torch.full((len(SPECIAL), width), -math.inf)
    x[0] = 0.0
    x[1], x[1, -1] = 0.0, 1000.0
    x[3, width // 2] = -7.0
    x[4], x[4, 5] = 0.0, math.inf
    x[5], x[5, 5] = 0.0, math.nan
    row_max, row_sum_m1, weighted_sum = long_rows.row_sums(x, 1.0, True)
    assert row_max[:5, 0].tolist() == [0.0, 1000.0, -math.inf, -7.0, math.inf] and row_max[5].isnan()
    assert row_sum_m1[:4, 0].tolist() == [width - 1, 0.0, 0.0, 0.0]
    assert weighted_sum[:4, 0].tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("width", "rows"), [(4096, 128), (65536, 64), (1 << 21, 64)])
def test_rows_of_a_block(width, rows):
    """One tile of short rows; of longer rows so many that the fixed cost of each block is small."""
    assert long_rows.rows_per_block(width, torch.float32) == rows


NO_IDS = torch.zeros(2, 0, dtype=torch.int64)
WIDTHS = (4096, 4)


def range_of(group):
    return (0, WIDTHS[0]) if group.rank() == 0 else (WIDTHS[0], sum(WIDTHS))


TOP_K = vp.TrainingSamplingParams(top_k=3)
# Of logits z [2, 0, v/tp] and weights w [v/tp, 3], on a group g.
OF_NO_ROWS = {
    "log-softmax": lambda z, w, g: vp.vocab_parallel_log_softmax(z, g),
    "log-probability": lambda z, w, g: vp.DistributedLogprob.apply(z, NO_IDS, *range_of(g), g),
    "entropy": lambda z, w, g: vp.ChunkedDistributedEntropy.apply(z, None, g),
    "KL": lambda z, w, g: vp.vocab_parallel_kl(z, z.detach(), g),
    "cross entropy": lambda z, w, g: vp.DistributedCrossEntropy.apply(z, z.detach(), g),
    "top-k": lambda z, w, g: vp.get_next_token_logprobs_from_logits(
        NO_IDS, z, None, g.rank(), g, sampling_params=TOP_K
    ),
    "hidden states": lambda z, w, g: vp.from_parallel_hidden_states_to_logprobs(
        torch.zeros(0, 2, 3), w, w, False, NO_IDS, *range_of(g), g
    ),
    "next token": lambda z, w, g: vp.get_next_token_logprobs_from_logits(NO_IDS, z, None, g.rank(), g),
}


@pytest.mark.parametrize("call", OF_NO_ROWS.values(), ids=OF_NO_ROWS)
def test_no_rows(call):
    """Of 4,096 columns on one rank and 4 on the other, both compute nothing, and a gradient of the logits' shape."""

    def body(mesh, case):
        width = WIDTHS[mesh.rank("tp")]
        z, w = torch.zeros(2, 0, width, requires_grad=True), torch.zeros(width, 3, requires_grad=True)
        y = call(z, w, mesh["tp"])
        y.sum().backward()
        leaf = z if w.grad is None else w
        return y.numel(), leaf.grad.shape == leaf.shape, bool(leaf.grad.any())

    assert run(body, CaseSpec(scheme="long rows", mesh={"tp": 2})).results == ((0, True, False),) * 2
