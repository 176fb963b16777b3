"""The kernel of rows by index beside its eager twin, bit by bit, and as shards of the sequence beside the reference."""

import pytest
import torch
from hypothesis import given

from parity_tests.kernels.device import DEVICE, INTERPRETED, REASON, is_here
from parity_tests.kernels.rows import generator, normal
from parity_tests.kernels.schemes import triton_sharded_sequence
from shardproof import check, every_case
from torch_impl.kernels import rows_at
from torch_impl.kernels.row_gather import gather_rows
from torch_impl.layouts import inverse, packed

pytestmark = pytest.mark.skipif(not is_here(), reason=REASON)
if INTERPRETED:  # a rank's tensors are on the CPU

    @given(every_case(triton_sharded_sequence))
    def test_parity(case):
        check(case)


def bits(dtype, *shape):
    """Anything at all, NaN included."""
    if dtype is torch.bool:
        return torch.from_numpy(generator().integers(0, 2, shape)).bool().to(DEVICE)
    size = torch.empty(0, dtype=dtype).element_size()
    numbers = torch.from_numpy(generator().integers(0, 256, (*shape, size), "uint8"))
    return numbers.view(dtype).squeeze(-1).to(DEVICE)


def as_integers(x):
    return x.contiguous().view(torch.uint8) if x.dtype is not torch.bool else x


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


@pytest.mark.parametrize("tile", [4, 4096])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_the_twins(dtype, dim, tile):
    x = bits(dtype, 3, 7, 5)
    index = torch.from_numpy(generator().integers(0, x.shape[dim], 9)).to(DEVICE)
    got, want = gather_rows(x, index, dim, tile=tile), x.index_select(dim, index)
    assert got.dtype == dtype and got.is_contiguous()
    assert torch.equal(as_integers(got), as_integers(want))


@pytest.mark.parametrize(
    "view",
    [lambda x: x.transpose(0, 2), lambda x: x[:, ::2], lambda x: x[..., 1:4], lambda x: x[:1].expand(4, 7, 5)],
    ids=["transposed", "every other row", "part of a row", "expanded"],
)
@pytest.mark.parametrize("dim", [0, -1, 1])
def test_strides_change_nothing(view, dim):
    x = view(normal(3, 7, 5).float().to(DEVICE))
    index = torch.tensor([2, 0, 2, 1], dtype=torch.int32, device=DEVICE)
    assert torch.equal(rows_at(x, index, dim, backend="triton"), x.index_select(dim, index))


@pytest.mark.parametrize(("shape", "count"), [((0, 4), 0), ((3, 0), 2), ((3, 4), 0), ((5,), 3)])
def test_gathering_nothing_and_single_elements(shape, count):
    x, index = torch.ones(shape, device=DEVICE), torch.arange(count, device=DEVICE)
    assert torch.equal(rows_at(x, index, backend="triton"), x.index_select(0, index))


def test_gradients_of_a_row_gathered_twice_add_up():
    index = torch.tensor([4, 1, 4], device=DEVICE)
    x, c = normal(2, 5, 3).to(DEVICE), normal(2, 3, 3).to(DEVICE)
    results = []
    for backend in ("triton", "eager"):
        x = x.detach().requires_grad_()
        results.append(torch.autograd.grad(rows_at(x, index, 1, backend=backend), x, c)[0])
    assert torch.equal(*results)


def test_packed_rows_come_back_in_order():
    index = packed(12, 2, torch.tensor([0, 4, 12]), device=DEVICE)
    x = normal(12, 3).to(DEVICE)
    there = rows_at(x, torch.cat(index), backend="triton")
    assert torch.equal(there, x[torch.cat(index)])
    assert torch.equal(rows_at(there, inverse(index), backend="triton"), x)


@pytest.mark.skipif(not INTERPRETED, reason="an assertion on CUDA ends the process")
@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_out_of_range_is_rejected(index):
    with pytest.raises(IndexError) as caught:
        rows_at(torch.ones(2, 5), torch.tensor([0, index]), 1, backend="triton")
    assert str(caught.value) == "kernels.rows_at: index has entries outside [0, 5), the rows along dim 1"


def test_a_dtype_without_an_integer_of_its_size_is_rejected():
    with pytest.raises(TypeError) as caught:
        gather_rows(torch.ones(2, dtype=torch.complex128, device=DEVICE), torch.tensor([0], device=DEVICE), 0)
    assert str(caught.value) == "kernels.rows_at: x is complex128; pass torch.view_as_real(x)"
