"""Which sizes can be sharded: the multiple of each layout, and the message in the caller's names."""

import numpy as np
import pytest
import torch

from jax_ref.layouts import BUILTIN as REFERENCES
from jax_ref.layouts import indivisible as indivisible_reference
from jax_ref.layouts import needs as needs_reference
from torch_impl.layouts import BUILTIN, indivisible, needs


@pytest.mark.parametrize("multiple", [needs, needs_reference])
def test_multiples(multiple):
    assert {name: multiple(name, 4) for name in BUILTIN} == {
        "contiguous": 4,
        "dual_chunk_swap": 8,
        "packed": 1,
        "ragged": 1,
        "striped": 4,
    }
    assert multiple("mine", 4) == 1


def test_both_sides_have_the_same_layouts():
    assert list(BUILTIN) == list(REFERENCES) == sorted(BUILTIN)


@pytest.mark.parametrize("reason", [indivisible, indivisible_reference])
def test_sentences(reason):
    assert (
        reason("s", 30, "cp", 4, "dual_chunk_swap")
        == "s=30 cannot be sharded by dual_chunk_swap over cp=4 (needs a multiple of 8); pad to 32"
    )
    assert (
        reason("v", 7, "tp", 2, "contiguous")
        == "v=7 cannot be sharded by contiguous over tp=2 (needs a multiple of 2); pad to 8"
    )
    assert reason("s", -1, "cp", 4, "ragged") == "s=-1 is not a size; sizes are 0 or more"
    assert reason("s", 4, "cp", 0, "striped") == "cp=0 is not a number of ranks; it is 1 or more"
    assert reason("s", 32, "cp", 4, "dual_chunk_swap") is None
    assert reason("s", 31, "cp", 4, "ragged") is None
    assert reason("s", 31, "cp", 4, "mine") is None


@pytest.mark.parametrize("name", ["contiguous", "dual_chunk_swap", "striped"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sizes_are_accepted_exactly_if_they_can_be_sharded(name, world):
    for size in range(4 * world + 3):
        if indivisible("s", size, "cp", world, name) is None:
            assert sum(len(piece) for piece in BUILTIN[name](size, world)) == size
        else:
            with pytest.raises(ValueError):
                BUILTIN[name](size, world)


NO_INTEGERS = [(8.0, 2, "size=8.0 is a float"), ("8", 2, "size='8' is a str"), (8, "2", "world='2' is a str")]
NO_INTEGERS += [
    (8, 2.0, "world=2.0 is a float"),
    (True, 1, "size=True is a bool"),
    (None, 1, "size=None is None"),
]


@pytest.mark.parametrize("name", [name for name in BUILTIN if name != "packed"])
@pytest.mark.parametrize(("size", "world", "message"), NO_INTEGERS)
def test_a_value_that_is_not_an_integer_is_rejected(name, size, world, message):
    with pytest.raises(TypeError) as caught:
        BUILTIN[name](size, world)
    assert str(caught.value) == f"{name}: {message}; pass an int"
    with pytest.raises(TypeError) as caught:
        indivisible("size", size, "world", world, name)
    assert str(caught.value) == f"{message}; pass an int"


@pytest.mark.parametrize("name", [name for name in BUILTIN if name != "packed"])
@pytest.mark.parametrize("arguments", [(np.int32(8), np.int64(2)), (torch.tensor(8), 2), (8, torch.tensor(2))])
def test_a_size_is_an_integer_of_any_kind(name, arguments):
    assert [len(piece) for piece in BUILTIN[name](*arguments)] == [4, 4]
