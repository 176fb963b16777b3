"""The memo of layouts: one object for unchanged offsets, another for changed ones, and none kept alive."""

import gc
import weakref

import pytest
import torch

from torch_impl.layouts import TokenLayout


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
