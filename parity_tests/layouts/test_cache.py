"""The cache between calls never holds a fake tensor, even if a model's memory is estimated before it runs."""

import dataclasses
import warnings
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from parity_tests.mamba.mixers import filled, hidden_parallel_strategy, state_passing_strategy
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.context_parallel import context_parallel_attention
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.cache import cached
from torch_impl.layouts.token_layout import dense_layout, stream_layout

DERIVED = ("inverse", "sequence_ids", "position_ids", "padding_mask", "local_index", "local_cu")


def test_one_object_for_equal_arguments():
    arguments = "striped", 14, 2, 0, torch.device("cpu")
    assert dense_layout(*arguments) is dense_layout(*arguments)


def test_no_fake_tensor_is_cached_and_no_cached_one_is_used_under_fake_mode():
    @cached(16)
    def counted(size):
        return torch.arange(size)

    with FakeTensorMode():
        assert type(counted(3)) is not torch.Tensor
    real = counted(3)
    assert type(real) is torch.Tensor and counted(3) is real
    with FakeTensorMode():
        assert type(counted(3)) is not torch.Tensor


def test_no_functionalized_tensor_is_cached():
    def with_index(x):
        return x + dense_layout("striped", 22, 2, 0, torch.device("cpu")).inverse

    torch.func.functionalize(with_index)(torch.zeros(22))
    assert dense_layout("striped", 22, 2, 0, torch.device("cpu")).inverse.tolist()[:3] == [0, 11, 1]


def test_the_cache_breaks_no_graph():
    @cached(16)
    def counted(size):
        return torch.arange(size)

    with warnings.catch_warnings(action="ignore"):  # of Dynamo, that it looks into a memo
        compiled = torch.compile(lambda x: x + counted(4), backend="eager", fullgraph=True)
        assert compiled(torch.zeros(4)).tolist() == [0, 1, 2, 3]


def test_a_layout_seen_under_fake_mode_derives_real_tensors_later():
    layout = TokenLayout.dense("striped", 8, cp_size=2, cp_rank=0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        among = [getattr(layout, name) for name in DERIVED]
    assert any(type(x) is not torch.Tensor for x in among)
    assert all(type(getattr(layout, name)) is torch.Tensor for name in DERIVED)
    assert layout.inverse is layout.inverse


def test_derived_values_are_computed_once_and_freed_with_the_layout():
    layout = TokenLayout.dense("striped", 8, cp_size=2, cp_rank=0)
    computed = layout.cached("k", lambda: torch.arange(3))
    assert layout.cached("k", lambda: torch.arange(3)) is computed
    assert layout.cached("another", lambda: torch.arange(3)) is not computed
    with FakeTensorMode():
        assert type(layout.cached("k", lambda: torch.arange(3))) is not torch.Tensor
    alive = weakref.ref(layout)
    del layout
    assert alive() is None


def test_derived_values_break_no_graph():
    layout = TokenLayout.dense("striped", 8, cp_size=2, cp_rank=0)

    def shifted(x):
        return x + layout.cached("row", lambda: torch.arange(4)) + layout.local_index

    compiled = torch.compile(shifted, backend="eager", fullgraph=True)
    for _ in range(2):
        assert compiled(torch.zeros(4)).tolist() == [0, 3, 6, 9]


def test_offsets_written_to_are_read_again_and_leave_the_layout_as_it_is():
    cu, real = torch.tensor([0, 4, 12]), torch.tensor([0, 3, 6])
    before = TokenLayout.packed(cu, real, cp_size=2, cp_rank=0)
    cu[1], real[2] = 8, 7
    after = TokenLayout.packed(cu, real, cp_size=2, cp_rank=0)
    assert (before.cu_padded.tolist(), before.cu_real.tolist()) == ([0, 4, 12], [0, 3, 6])
    assert (after.cu_padded.tolist(), after.cu_real.tolist()) == ([0, 8, 12], [0, 3, 7])


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("strategy_of", [hidden_parallel_strategy, state_passing_strategy])
@pytest.mark.parametrize("cu", [None, [0, 8, 8, 24]])
def test_a_mixer_runs_after_its_memory_was_estimated(strategy_of, cu):
    """The numbers of a run without it, of sizes that no other test asks for."""

    def body(mesh, case):
        results, offsets = [], cu and torch.tensor(cu)
        for d_state, is_estimated in ((6, False), (7, True)):
            mixer = filled(d_state=d_state)
            strategy = strategy_of(mesh, mixer, d_state=d_state)
            x = torch.ones(1, 12, mixer.sizes.width, dtype=torch.float64)
            if is_estimated:
                with FakeTensorMode(allow_non_fake_inputs=True) as fake:
                    among = fake.from_tensor(x)
                    if cu is None:
                        strategy.mix(among)
                    else:
                        with pytest.raises(RuntimeError):  # fake offsets have no numbers to shard by
                            strategy.mix(among, offsets)
            results.append(type(strategy.mix(x, offsets)) is torch.Tensor)
        return results

    assert run(body, CaseSpec(scheme="mamba", mesh={"cp": 2})).results == ([True, True],) * 2


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "ulysses"])
def test_attention_runs_after_it_was_tried_among_fakes(exchange):
    """Where it stops: which rows meet is read on the host, and a fake tensor has no numbers to read."""

    def body(mesh, case):
        def attended(x):
            return context_parallel_attention(
                x, x, x, group=mesh["cp"], layout="dual_chunk_swap", window=5, exchange=exchange
            )

        x = torch.ones(1, 2, 20, 4, dtype=torch.float64)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, pytest.raises(RuntimeError):
            attended(fake.from_tensor(x))
        return attended(x).eq(1).all().item()

    assert run(body, CaseSpec(scheme="attention", mesh={"cp": 2})).results == (True, True)


def test_a_copy_of_a_layout_derives_for_itself():
    """As FSDP's mixed precision copies the dataclasses among a module's arguments."""
    layout = TokenLayout.dense("striped", 8, cp_size=2, cp_rank=0)
    layout.cached("key", lambda: 1)
    assert dataclasses.replace(layout).cached("key", lambda: 2) == 2


def test_streams_of_equal_offsets_share_a_layout():
    def layout(offsets, kind="packed", rank=0):
        return stream_layout(kind, offsets, 12, cp_size=2, cp_rank=rank)

    offsets = torch.tensor([0, 4, 12])
    first = layout(offsets)
    assert layout(offsets.clone()) is first
    assert layout(offsets, rank=1) is not first and layout(offsets, "contiguous") is not first
    offsets[1] = 8  # edited in place: a layout belongs to the values, not to the tensor
    assert layout(offsets) is not first and layout(offsets).cu_padded.tolist() == [0, 8, 12]
    with torch.inference_mode():
        in_inference = layout(torch.tensor([0, 8, 8, 12]))
    assert not in_inference.local_index.is_inference()
    assert layout(torch.tensor([0, 8, 12, -1, -1])).cu_padded.tolist() == [0, 8, 12]
    with pytest.raises(ValueError, match="cu_seqlens ends at 8 but the stream holds 12 tokens"):
        layout(torch.tensor([0, 8]))
