"""A fill is a number that the tensor's dtype represents; infinities and NaN are such numbers."""

import math

import pytest
import torch

from torch_impl.contract.rejected import Rejected
from torch_impl.layouts.fill import fill_of

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_infinities_and_nan_fit_floats(dtype: torch.dtype) -> None:
    x = torch.zeros(1, dtype=dtype)
    assert [fill_of(x, fill) for fill in (math.inf, -math.inf, 0, -1)] == [math.inf, -math.inf, 0.0, -1.0]
    assert math.isnan(fill_of(x, math.nan))


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (torch.float16, 65_520.0),
        (torch.float16, -1e5),
        (torch.float32, 1e39),
        (torch.int64, math.inf),
        (torch.int64, 0.5),
        (torch.uint8, -1),
        (torch.int8, 128),
        (torch.bool, 2),
    ],
    ids=str,
)
def test_a_number_that_a_dtype_lacks_is_rejected(dtype: torch.dtype, fill: float) -> None:
    with pytest.raises(Rejected, match="is not a value of"):
        fill_of(torch.zeros(1, dtype=dtype), fill)
