"""Transformer Engine where there is one: its index is used on CUDA alone, padded offsets under cp."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_impl.context_parallel.adapters import transformer_engine
from torch_impl.layouts import TokenLayout

HAS_BOTH = torch.cuda.is_available() and find_spec(transformer_engine.EXTENSION) is not None
LAYOUT = TokenLayout.packed([0, 4, 12], [0, 3, 11], cp_size=2, cp_rank=1)


@pytest.fixture
def extension(monkeypatch):
    """One that answers; no more of it is known here."""
    module = ModuleType(transformer_engine.EXTENSION)
    module.__spec__ = SimpleNamespace(name=transformer_engine.EXTENSION)
    module.thd_get_partitioned_indices = lambda cu, total, n, rank: torch.tensor([total, n, rank], dtype=torch.int32)
    monkeypatch.setitem(sys.modules, transformer_engine.EXTENSION, module)
    return module


class OnCuda(torch.Tensor):
    """Offsets that say they are on CUDA."""

    is_cuda = True


def test_on_a_cpu_the_index_comes_from_the_layout(extension):
    assert transformer_engine.local_index(LAYOUT) is LAYOUT.local_index


def test_on_cuda_the_index_comes_from_transformer_engine(extension):
    layout = replace(LAYOUT, cu_padded=LAYOUT.cu_padded.as_subclass(OnCuda))
    assert transformer_engine.local_index(layout).tolist() == [12, 2, 1]


def test_without_the_package_the_index_comes_from_the_layout(monkeypatch):
    monkeypatch.setitem(sys.modules, transformer_engine.EXTENSION, None)
    assert transformer_engine.local_index(LAYOUT) is LAYOUT.local_index
    with pytest.raises(ImportError) as caught:
        transformer_engine.partitioned_indices(LAYOUT.cu_padded, 12, 2, 0)
    assert str(caught.value) == "context_parallel.te: needs transformer-engine; pip install -e '.[te]' in the clone"


def test_on_a_cpu_transformer_engine_is_not_called(extension):
    with pytest.raises(ValueError) as caught:
        transformer_engine.partitioned_indices(LAYOUT.cu_padded, 12, 2, 0)
    assert str(caught.value) == (
        "context_parallel.te: cu_seqlens_padded is on cpu, transformer-engine needs CUDA; use TokenLayout.local_index"
    )


@pytest.mark.skipif(not HAS_BOTH, reason="not run: needs CUDA and transformer-engine")
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.sampled_from([2, 4]))
def test_both_indices_are_one(counts, n):
    cu = torch.tensor([0, *counts], device="cuda").cumsum(0).int() * 2 * n
    for rank in range(n):
        layout = TokenLayout.packed(cu, cp_size=n, cp_rank=rank)
        assert torch.equal(transformer_engine.local_index(layout), layout.local_index)
