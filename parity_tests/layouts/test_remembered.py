"""The memo of layouts: one object for unchanged offsets, another for changed ones, and none kept alive."""

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parity_tests import CaseSpec
from parity_tests.harness.run.engines import run
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.remembered import remembered


def packed(cu, real=None, **asked):
    return TokenLayout.packed(cu, real, **{"cp_size": 2, "cp_rank": 0, **asked})


def test_the_same_unchanged_offsets_give_the_same_object():
    cu, real = torch.tensor([0, 4, 12]), torch.tensor([0, 3, 10])
    assert packed(cu) is packed(cu)
    assert packed(cu, real) is packed(cu, real)
    assert packed(cu, real) is not packed(cu)
    assert packed(cu, real) is not packed(cu, real.clone())
    assert packed(cu.clone()) is not packed(cu)


@pytest.mark.parametrize("asked", [{"cp_size": 1}, {"cp_rank": 1}, {"kind": "striped"}, {"total": 12}])
def test_another_question_gives_another_object(asked):
    cu = torch.tensor([0, 4, 12])
    assert packed(cu, **asked) is not packed(cu)
    assert packed(cu, **asked) is packed(cu, **asked)


def test_offsets_written_to_are_read_again():
    cu, real = torch.tensor([0, 4, 12]), torch.tensor([0, 3, 6])
    before = packed(cu, real)
    cu[1] = 8
    after = packed(cu, real)
    assert (before.cu_padded.tolist(), after.cu_padded.tolist()) == ([0, 4, 12], [0, 8, 12])
    real[2] = 7
    assert packed(cu, real).cu_real.tolist() == [0, 3, 7]


WRITTEN = {
    "a collective": lambda cu, group: dist.all_reduce(cu, group=group),
    "its data": lambda cu, group: cu.data.mul_(2),
    "other memory": lambda cu, group: setattr(cu, "data", 2 * cu),
    "memory of other integers": lambda cu, group: setattr(cu, "data", 2 * cu.int()),
    "a view": lambda cu, group: cu[1:].mul_(2),
    "NumPy": lambda cu, group: np.multiply(cu.numpy(), 2, out=cu.numpy()),
}


@pytest.mark.parametrize("way", WRITTEN)
def test_offsets_doubled_in_any_way_are_read_again(way):
    """Most of these count no version."""

    def body(mesh, case):
        cu, real = torch.tensor([0, 8, 24]), torch.tensor([0, 3, 6])
        found = []
        for written in (real, cu):
            packed(cu, real)
            WRITTEN[way](written, mesh["cp"])
            found.append(packed(cu, real))
        return [(layout.cu_padded.tolist(), layout.cu_real.tolist()) for layout in found]

    told = [([0, 8, 24], [0, 6, 12]), ([0, 16, 48], [0, 6, 12])]
    assert run(body, CaseSpec(scheme="remembered", mesh={"cp": 2})).results == (told, told)


def test_where_a_look_would_cost_a_wait_versions_are_counted():
    """The meta device has no numbers to look at, as a GPU has none at hand."""
    cu, real = (torch.zeros(3, dtype=torch.int32, device="meta") for _ in range(2))

    def made():
        return remembered(object, cu, real, ())

    first = made()
    assert made() is first
    real.add_(1)
    second = made()
    assert second is not first and made() is second
    cu.add_(1)
    assert made() is not second


def test_lists_and_inference_tensors_are_not_remembered():
    cu = [0, 4, 12]
    assert packed(cu) is not packed(cu)
    with torch.inference_mode():
        made = torch.tensor(cu)
    assert packed(made) is not packed(made)
    assert packed(made).draw() == packed(cu).draw()


def test_no_layout_outlives_its_offsets():
    cu, real = torch.tensor([0, 4, 12]), torch.tensor([0, 3, 10])
    known = weakref.ref(packed(cu, real))
    assert known() is not None
    del cu
    gc.collect()
    assert known() is None


def test_only_what_is_asked_of_the_offsets_as_they_are_is_kept():
    """A step's offsets in the same tensor, and each step's own real lengths: one layout at a time."""
    cu, real = torch.tensor([0, 4, 12]), torch.tensor([0, 3, 10])
    written, dropped = weakref.ref(packed(cu)), weakref.ref(packed(cu, real))
    real = torch.tensor([0, 2, 4])
    packed(cu, real)
    gc.collect()
    assert written() is not None and dropped() is None
    cu[1] = 8
    packed(cu)
    gc.collect()
    assert written() is None
    before = weakref.ref(packed(cu, real))
    real[1] = 1
    packed(cu, real)
    gc.collect()
    assert before() is None
