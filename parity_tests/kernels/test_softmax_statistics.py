"""The kernel of row statistics beside its eager twin, and merged over ranks beside the reference."""

import math

import pytest
import torch
from hypothesis import given

from parity_tests.kernels.device import DEVICE, INTERPRETED, REASON, is_here
from parity_tests.kernels.rows import DTYPES, KINDS, STRIDES, are_equal, columns, logits, normal
from parity_tests.kernels.schemes import logprob_in_steps, triton_logprob
from parity_tests.kernels.twin import worst_ratio
from shardproof import check, every_case
from torch_impl.collectives import accumulator
from torch_impl.kernels.softmax import local_statistics
from torch_impl.vocab_parallel import statistics as st

pytestmark = pytest.mark.skipif(not is_here(), reason=REASON)
if INTERPRETED:  # a rank's tensors are on the CPU

    @pytest.mark.slow  # the scheme of the gradient runs these statistics, with the entropy's besides
    @given(every_case(triton_logprob))
    def test_parity(case):
        check(case)

    @pytest.mark.slow
    @given(every_case(logprob_in_steps))
    def test_parity_in_steps(case):
        check(case)


def is_within_budget(z, column, temperature, step):
    """Whether m and z_t are the twin's own, R and d within budget, all in the accumulation dtype.

    R and d of a row with a logit of +inf are not compared: it has no softmax, and m = +inf makes its normaliser NaN
    whatever R is.
    """
    got = local_statistics(z, column, temperature, True, step=step)
    want = st.local_statistics(z, column, temperature, True)
    assert got.dtype == accumulator(z.dtype) and got.shape == want.shape
    assert torch.equal(got[0], want[0]) and are_equal(got[2:-1], want[2:-1])  # NaN at a logit of +inf

    def sums(x):
        return st.local_statistics(x, None, temperature, True)[1:]

    has_softmax = got[0] < math.inf
    return worst_ratio(got[[1, -1]][:, has_softmax], sums, (z[has_softmax],), z.shape[-1])


@pytest.mark.fast_values(10)
@pytest.mark.parametrize("step", [4, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_its_twins(dtype, kind, step):
    z = logits(kind, dtype, DEVICE)
    assert is_within_budget(z, columns(z, 1), 1.0, step) <= 1
    assert is_within_budget(z, columns(z, 3), 0.7, step) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wide_row_is_read_in_several_blocks(dtype):
    z = logits("normal", dtype, DEVICE, n=4, v=9001)
    z[0, 4096:] += 40.0  # the maximum comes late, and the first block counts for nothing
    z[1, :8192] = -math.inf
    assert is_within_budget(z, columns(z, 100), 1.0, 4096) <= 1


@pytest.mark.parametrize("strides", STRIDES)
def test_strides_change_nothing(strides):
    z = normal(4, 11).float().to(DEVICE)
    view = STRIDES[strides](z)
    assert not view.is_contiguous() and torch.equal(view, z)
    results = [local_statistics(x, columns(x, 2), 2.0, True, step=4) for x in (view, z)]
    assert torch.equal(*results)


@pytest.mark.parametrize("k", [None, 0, 2])
@pytest.mark.parametrize("shape", [(4, 0), (0, 5), (0, 0)])
def test_an_empty_shard_or_no_rows(shape, k):
    z = torch.empty(shape, device=DEVICE)
    column = None if k is None else torch.full((shape[0], k), -1, dtype=torch.int32, device=DEVICE)
    for with_entropy in (False, True):
        got = local_statistics(z, column, 1.0, with_entropy)
        assert torch.equal(got, st.local_statistics(z, column, 1.0, with_entropy))


def test_only_requested_statistics_are_returned():
    z = logits("normal", torch.float32, DEVICE)
    full = local_statistics(z, columns(z, 2), 1.0, True)
    assert torch.equal(local_statistics(z, None, 1.0, False), full[:2])
    assert torch.equal(local_statistics(z, columns(z, 2), 1.0, False), full[:-1])


@pytest.mark.parametrize("step", [2, 16])
def test_nan_and_infinity_stay_visible(step):
    z = normal(4, 6).float().to(DEVICE)
    z[0, 1], z[1, 5], z[2, 0] = math.nan, math.nan, math.inf
    row_max, row_sum_m1 = local_statistics(z, None, 1.0, False, step=step)
    total = st.global_normaliser(row_max.unsqueeze(0), row_sum_m1.unsqueeze(0), 1.0)
    assert total.log_row_sum.isnan().tolist() == [True, True, True, False]
    assert (row_max < math.inf).tolist() == [False, False, False, True]
