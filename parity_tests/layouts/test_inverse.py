"""The inverse permutation: the rank-major stream, put back in order."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from jax_ref.layouts import inverse as reference
from torch_impl.layouts import contiguous, dual_chunk_swap, inverse, ragged, striped


def test_golden():
    assert inverse([torch.tensor([0, 3]), torch.tensor([1, 2])]).tolist() == [0, 2, 3, 1]


@pytest.mark.parametrize("layout", [contiguous, dual_chunk_swap, ragged, striped])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_stream_comes_back_in_order(layout, world):
    pieces = layout(4 * world, world)
    back = inverse(pieces)
    assert torch.cat(pieces)[back].tolist() == list(range(4 * world))
    assert back.tolist() == reference([piece.numpy() for piece in pieces]).tolist()


REJECTED = [
    ([[0, 5], [1, 2]], "positions are not a permutation of 0..3: 3 is missing; give each position once"),
    ([[0, 0], [1, 1]], "positions are not a permutation of 0..3: 0 is there twice; give each position once"),
    ([[1, 2], [3]], "positions are not a permutation of 0..2: 0 is missing; give each position once"),
    ([[0, -1]], "positions are not a permutation of 0..1: -1 is negative; give each position once"),
    ([[[0, 1]]], "positions[0] is [1, 2]; positions are one row for each rank"),
    ([[0], 1], "positions[1] is []; positions are one row for each rank"),
]


@pytest.mark.parametrize(("shards", "sentence"), REJECTED, ids=[text[:60] for _, text in REJECTED])
def test_an_index_that_is_not_a_permutation_is_rejected(shards, sentence):
    with pytest.raises(ValueError) as caught:
        inverse([torch.tensor(piece) for piece in shards])
    assert str(caught.value) == f"layouts.inverse: {sentence}"


NO_POSITIONS = [
    (5, "positions=5 is not a sequence; pass a tensor of positions for each rank"),
    ([], "positions=[] holds no tensor; pass a tensor of positions for each rank"),
    ([[1, 0]], "positions[0] is a list; pass a tensor of positions for each rank"),
    ([torch.tensor([0]), torch.tensor([1.0])], "positions[1] is float32; positions are integers"),
    ([torch.tensor([True, False])], "positions[0] is bool; positions are integers"),
]


@pytest.mark.parametrize(("positions", "sentence"), NO_POSITIONS, ids=["int", "empty", "list", "float", "bool"])
def test_invalid_positions_are_rejected(positions, sentence):
    with pytest.raises(TypeError) as caught:
        inverse(positions)
    assert str(caught.value) == f"layouts.inverse: {sentence}"


def among_fakes(pieces):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return inverse([mode.from_tensor(piece) for piece in pieces])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's word on scatter under vmap
@pytest.mark.parametrize(
    "called",
    [
        among_fakes,
        lambda pieces: inverse([piece.to("meta") for piece in pieces]),
        lambda pieces: torch.vmap(lambda both: inverse(list(both)))(torch.stack(pieces)[None])[0],
        lambda pieces: torch.compile(lambda both: inverse(list(both)), backend="eager", fullgraph=True)(pieces),
    ],
    ids=["fake", "meta", "vmap", "compile"],
)
def test_tensors_without_values_are_not_read(called):
    index = called([torch.tensor([0, 3]), torch.tensor([1, 2])])
    assert index.shape == (4,)
    if type(index) is torch.Tensor and index.device.type == "cpu":
        assert index.tolist() == [0, 2, 3, 1]


def test_shards_may_come_in_any_order():
    assert inverse(torch.tensor(piece) for piece in ([0, 3], [1, 2])).tolist() == [0, 2, 3, 1]


def test_positions_are_integers_of_any_kind():
    back = inverse([torch.tensor([2, 0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)])
    assert back.tolist() == [1, 2, 0] and back.dtype == torch.int64


def test_no_position_at_all():
    assert inverse([torch.arange(0)] * 2).tolist() == []
