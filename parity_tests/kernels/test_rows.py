"""Rows by index on eager and compiled torch; the kernel is tested beside them in test_row_gather."""

import pytest
import torch

from parity_tests.kernels.rows import normal
from torch_impl.kernels import rows_at


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("backend", ["auto", "eager", "compile"])
def test_rows_are_gathered_and_their_cotangents_add_up(backend, dim):
    x, index = normal(3, 4, 5).requires_grad_(), torch.tensor([2, 0, 2])
    y = rows_at(x, index, dim, backend=backend)
    one_by_one = torch.stack([x.select(dim, i) for i in (2, 0, 2)], dim)
    assert y.is_contiguous() and torch.equal(y, one_by_one)
    c = normal(*y.shape, seed=1)
    assert torch.equal(*(torch.autograd.grad(result, x, c)[0] for result in (y, one_by_one)))


def test_an_index_out_of_range_is_rejected():
    with pytest.raises(IndexError):
        rows_at(torch.ones(2), torch.tensor([2]))
