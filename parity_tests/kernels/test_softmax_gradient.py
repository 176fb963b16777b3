"""The kernel of the joint gradient beside its eager twin, and through log-probability beside the reference."""

import math

import pytest
import torch
from hypothesis import given

from parity_tests.kernels.device import DEVICE, INTERPRETED, REASON, is_here
from parity_tests.kernels.rows import DTYPES, KINDS, OUT_OF_VOCABULARY, STRIDES, are_equal, columns, logits, normal
from parity_tests.kernels.schemes import triton_gather_logprob, triton_logprob_with_entropy
from parity_tests.kernels.twin import worst_ratio
from parity_tests.vocab_parallel.rounding import equal_to_rounding
from shardproof import check, every_case
from torch_impl.collectives import accumulator
from torch_impl.kernels.softmax import write_gradient
from torch_impl.vocab_parallel import fused_logprob
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.fused_logprob import id_cotangents

pytestmark = pytest.mark.skipif(not is_here(), reason=REASON)
if INTERPRETED:  # a rank's tensors are on the CPU

    @given(every_case(triton_logprob_with_entropy))
    def test_parity(case):
        check(case)

    @given(every_case(triton_gather_logprob))
    def test_parity_at_several_ids(case):
        check(case)


def given_to(z, k, temperature=1.0, with_entropy=True):
    """(columns, floating arguments) of a gradient: m, log(1 + R), d and the cotangents."""
    row_max, row_sum_m1, d = st.local_statistics(z, None, temperature, True)
    g, g_entropy = (normal(*shape, seed=9).to(z.device, row_max.dtype) for shape in ((len(z), max(k, 1)), (len(z),)))
    entropy = (d, g_entropy) if with_entropy else (None, None)
    return (columns(z, k) if k else None), (g, row_max, row_sum_m1.log1p(), *entropy)


def of_rows(row_max, log_row_sum, shifted_mean, g_entropy, at_ids):
    """The arguments of `write_gradient` that stand for rows."""
    entropy = None if shifted_mean is None else fused_logprob.EntropyCotangent(shifted_mean, g_entropy)
    return st.Normaliser(row_max, log_row_sum), at_ids, entropy


def by_kernel(z, column, floats, temperature=1.0, normalised=True, step=4, dtype=None):
    g, *rest = floats
    out = torch.empty(z.shape, dtype=dtype or z.dtype, device=z.device)
    at_ids = None if column is None else id_cotangents(column, g)
    write_gradient(out, z, *of_rows(*rest, at_ids), temperature, normalised, step=step)
    return out


def ratio_of_worst(z, k, temperature, normalised, with_entropy, step):
    """The worst error over budget in the accumulation dtype; in the logits' it is that, rounded once."""
    column, floats = given_to(z, k, temperature, with_entropy)
    got = by_kernel(z, column, floats, temperature, normalised, step, accumulator(z.dtype))
    if z.dtype != got.dtype:
        narrow = by_kernel(z, column, floats, temperature, normalised, step)
        assert narrow.dtype == z.dtype and are_equal(narrow, got.to(z.dtype))

    def twin(x, g, *rest):
        out = torch.empty_like(x)
        at_ids = None if column is None else id_cotangents(column.cpu(), g)
        fused_logprob.write_gradient(out, x, *of_rows(*rest, at_ids), temperature, normalised)
        return out

    return worst_ratio(got, twin, (z, *floats), 1 if column is None else column.shape[-1])


@pytest.mark.fast_values(10)
@pytest.mark.parametrize("step", [4, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_its_twins(dtype, kind, step):
    z = logits(kind, dtype, DEVICE)
    assert ratio_of_worst(z, 1, 1.0, True, True, step) <= 1
    assert ratio_of_worst(z, 3, 0.7, True, True, step) <= 1


@pytest.mark.parametrize("k", [0, 1, 2, 70])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_every_set_of_cotangents(k, normalised, with_entropy):
    z = logits("masked borders", torch.float32, DEVICE)
    assert ratio_of_worst(z, k, 2.0, normalised, with_entropy, 4) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wide_row_is_written_in_several_blocks(dtype):
    z = logits("normal", dtype, DEVICE, n=4, v=4999)
    assert ratio_of_worst(z, 1, 1.0, True, True, 2048) <= 1
    assert ratio_of_worst(z, 5, 1.0, True, False, 2048) <= 1


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("strides", STRIDES)
def test_strides_change_nothing(strides, k):
    z = normal(4, 11).float().to(DEVICE)
    column, floats = given_to(z, k)
    results = [by_kernel(x, column, floats) for x in (STRIDES[strides](z), z)]
    assert torch.equal(*results)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("strides", [*STRIDES, None])
def test_in_place_is_the_same_and_is_seen_by_autograd(strides, k):
    z = normal(4, 11).float().to(DEVICE)
    column, (g, *rest) = given_to(z, k)
    want = by_kernel(z, column, (g, *rest))
    over = z.clone() if strides is None else STRIDES[strides](z)
    version = over._version
    write_gradient(over, over, *of_rows(*rest, id_cotangents(column, g)), 1.0, True, step=4)
    assert torch.equal(over, want) and over._version > version


def test_columns_outside_of_the_shard_are_not_written():
    z = normal(4, 11).float().to(DEVICE)
    column, (g, *rest) = given_to(z, 3)
    around = torch.full((4, 20), 5.0, device=DEVICE)
    write_gradient(around[:, 4:15], z, *of_rows(*rest, id_cotangents(column, g)), 1.0, True, step=4)
    assert torch.equal(around[:, :4], torch.full((4, 4), 5.0, device=DEVICE))
    assert torch.equal(around[:, 15:], torch.full((4, 5), 5.0, device=DEVICE))


@pytest.mark.parametrize("shape", [(4, 0), (0, 5)])
def test_an_empty_shard_has_nothing_to_write(shape):
    z = torch.empty(shape, device=DEVICE)
    rows = [torch.zeros(shape[0], device=DEVICE)] * 2
    column = torch.full((shape[0], 1), -1, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(z)
    at_ids = id_cotangents(column, torch.ones(shape[0], 1, device=DEVICE))
    write_gradient(out, z, st.Normaliser(*rows), at_ids, None, 1.0, True)
    assert out.shape == shape


@pytest.mark.parametrize("k", [1, 3])
def test_a_nan_row_without_a_target_has_no_gradient(k):
    z = normal(4, 6).float().to(DEVICE)
    column, (g, row_max, log_row_sum, *_) = given_to(z, k, with_entropy=False)
    column[3] = OUT_OF_VOCABULARY
    z[3, 2], row_max[3] = math.nan, math.nan
    gradient = by_kernel(z, column, (g, row_max, log_row_sum, None, None))
    assert gradient[3].tolist() == [0.0] * 6 and gradient[:3].isfinite().all()


def test_a_target_that_is_all_but_certain_keeps_its_digits():
    """1 - p is 1e-9, which float32 has no 1 - x for."""
    z = torch.tensor([[0.0, -20.7]], device=DEVICE)
    row_max, row_sum_m1 = st.local_statistics(z, None, 1.0, False)
    column, g = torch.tensor([[0]], dtype=torch.int32, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    gradient = by_kernel(z, column, (g, row_max, row_sum_m1.log1p(), None, None))
    assert gradient[0, 0] > 0.0
    assert equal_to_rounding(gradient[:, 0], -gradient[:, 1])
