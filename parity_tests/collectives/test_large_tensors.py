"""Large tensors on a CPU lie in memory that the system may map in huge pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import jax.numpy as jnp
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from shardproof import scheme, token_below
from torch_impl.collectives import large_tensors


def both_selected(x, y, index):
    return jnp.take(x, index, 0), jnp.take(y, index, 0)


@scheme(
    reference=both_selected,
    mesh={"tp": (1,)},
    inputs={"x": "n a tp=R", "y": "n a", "index": "m"},
    outputs=("m a tp=R", "m a"),
    nograd=("y",),
    dims={"n": (5, 2), "a": (3,), "m": (4, 7)},
    draw={"index": token_below("n")},
    rank_options={"dim": (0, 1, 2)},
    reduction=("m",),
)
@pytest.mark.cases(10)
def rows_of_large_tensors(mesh, x, y, index, dim):
    """Of the first tensor a gradient is needed. Each number is repeated until the selected rows are large."""
    copies = large_tensors.MIN_BYTES // (x.itemsize * len(index) * x.shape[1]) + 1
    wide = (each[..., None].expand(-1, -1, copies).movedim(0, dim) for each in (x, y))
    selected = [large_tensors.index_select(each, index, dim).movedim(dim, 0) for each in wide]
    return tuple(each[..., -1].clone() for each in selected)


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


def test_shape_and_dtype_match_torch_empty() -> None:
    for shape in ((0,), (2, 0, 3), (2, 3), LARGE):
        x = large_tensors.empty(shape, torch.float64, CPU)
        assert (x.shape, x.dtype, x.device, x.is_contiguous()) == (shape, torch.float64, CPU, True)


@pytest.mark.parametrize("dim", [0, 1, -2, -1])
@pytest.mark.parametrize("size", [3, 2 * large_tensors.MIN_BYTES // 8], ids=["small", "large"])
def test_selected_rows_match_torch(dim: int, size: int) -> None:
    x = torch.arange(4.0 * size).view((4, size) if dim % 2 == 0 else (size, 4))
    index = torch.tensor([2, 0, 2])
    selected = large_tensors.index_select(x, index, dim)
    assert selected.is_contiguous() and torch.equal(selected, x.index_select(dim, index))
    needs_gradient = x.clone().requires_grad_()
    large_tensors.index_select(needs_gradient, index, dim).sum().backward()
    counts = torch.tensor([1.0, 0.0, 2.0, 0.0])
    assert torch.equal(needs_gradient.grad, counts.unsqueeze(1 - dim % 2).expand_as(x))


@pytest.mark.parametrize("size", [3, 2 * large_tensors.MIN_BYTES // 8], ids=["small", "large"])
@pytest.mark.parametrize("place", [-1, 4])
def test_an_index_out_of_range_is_rejected(size: int, place: int) -> None:
    with pytest.raises(IndexError):
        large_tensors.index_select(torch.ones(4, size), torch.tensor([0, place]))


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_unsigned_integers_keep_their_largest_values(bits: int) -> None:
    largest = 2**bits - 1
    x = torch.tensor([0, largest, 7], dtype=getattr(torch, f"uint{bits}"))
    selected = large_tensors.index_select(x, torch.tensor([1, 0, 1, 2]))
    assert selected.dtype == x.dtype and selected.tolist() == [largest, 0, largest, 7]


@pytest.mark.parametrize(("shape", "count"), [((0, 4), 0), ((3, 0), 2), ((3, 4), 0), ((5,), 3)])
def test_selecting_nothing_and_single_elements(shape: tuple[int, ...], count: int) -> None:
    x, index = torch.ones(shape), torch.arange(count)
    assert torch.equal(large_tensors.index_select(x, index), x[index])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch, in make_dual
def test_selected_rows_have_a_derivative_in_forward_mode() -> None:
    x, index = torch.ones(4, large_tensors.MIN_BYTES // 8), torch.tensor([2, 0, 2])
    with forward_ad.dual_level():
        selected = large_tensors.index_select(forward_ad.make_dual(x, 3.0 * x), index)
        tangent = forward_ad.unpack_dual(selected).tangent
    assert tangent is not None and torch.equal(tangent, 3.0 * x[index])


def test_rows_selected_under_vmap_match_torch() -> None:
    x, index = torch.arange(4.0 * large_tensors.MIN_BYTES // 8).view(2, 2, -1), torch.tensor([1, 1, 0])
    selected = torch.vmap(lambda each: large_tensors.index_select(each, index))(x)
    assert torch.equal(selected, x.index_select(1, index))


@pytest.mark.slow
def test_tensors_without_memory_of_their_own_are_left_alone() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return (large_tensors.empty(LARGE, torch.float32, CPU).fill_(2.0)[0, 0] * x).sum()

    x = torch.ones(3)
    assert torch.equal(torch.func.grad(twice)(x), torch.full((3,), 2.0))
    assert torch.equal(torch.compile(twice, fullgraph=True, backend="eager")(x), torch.tensor(6.0))
    selected = torch.compile(large_tensors.index_select, fullgraph=True, backend="eager")
    assert torch.equal(selected(torch.ones(LARGE), torch.tensor([2, 0, 2])), torch.ones(LARGE))
    with FakeTensorMode():
        assert large_tensors.empty(LARGE, torch.float32, CPU).shape == LARGE
    assert large_tensors.empty(LARGE, torch.float32, torch.device("meta")).is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("integers", [torch.int64, torch.int32])
def test_rows_of_two_bytes_match_a_plain_index(dtype, integers):
    """They are gathered in another way."""
    x, index = torch.randn(4096, 2048).to(dtype), torch.randperm(4096).to(integers)
    assert torch.equal(large_tensors.index_select(x, index), x[index])
