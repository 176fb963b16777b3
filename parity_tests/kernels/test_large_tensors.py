"""Large tensors on a CPU lie in memory that the system may map in huge pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_impl.kernels import large_tensors

CPU = torch.device("cpu")
LARGE = (3, large_tensors.MIN_BYTES // 4)
MAPPINGS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def is_advised(address: int) -> bool:
    """Whether the mapping with this address has the flag that MADV_HUGEPAGE sets, `hg`."""
    inside = False
    for line in MAPPINGS.read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise LookupError(f"no mapping of this process has the address {address:#x}")


@pytest.mark.skipif(not (MAPPINGS.exists() and HUGE_PAGES.exists()), reason="this system has no huge pages to ask for")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_tensor_is_mapped_in_huge_pages(dtype: torch.dtype) -> None:
    large = large_tensors.empty((6, large_tensors.MIN_BYTES // 4), dtype, CPU)
    plain = torch.frombuffer(mmap.mmap(-1, 2 * large_tensors.MIN_BYTES), dtype=torch.uint8)
    assert is_advised(large.data_ptr() + large.nbytes // 2)
    assert not is_advised(plain.data_ptr() + plain.nbytes // 2)


def test_shape_and_dtype_are_those_of_torch_empty() -> None:
    for shape in ((0,), (2, 0, 3), (2, 3), LARGE):
        x = large_tensors.empty(shape, torch.float64, CPU)
        assert (x.shape, x.dtype, x.device, x.is_contiguous()) == (shape, torch.float64, CPU, True)


def test_tensors_without_memory_of_their_own_are_left_alone() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return (large_tensors.empty(LARGE, torch.float32, CPU).fill_(2.0)[0, 0] * x).sum()

    x = torch.ones(3)
    assert torch.equal(torch.func.grad(twice)(x), torch.full((3,), 2.0))
    assert torch.equal(torch.compile(twice, fullgraph=True, backend="eager")(x), torch.tensor(6.0))
    with FakeTensorMode():
        assert large_tensors.empty(LARGE, torch.float32, CPU).shape == LARGE
    assert large_tensors.empty(LARGE, torch.float32, torch.device("meta")).is_meta
