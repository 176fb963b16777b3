"""The rejections of a packed stream, and the positions of its slots."""

import pytest
import torch

from jax_ref.layouts import packed as reference
from parity_tests.rejections import rejected
from torch_impl import vocab_parallel as vp
from torch_impl.vocab_parallel.packed import packed_slots

IDS = (torch.arange(24) % 3)[None]


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_slots_agree_with_the_layout(cp):
    offsets = [0, 4 * cp, 4 * cp, 6 * cp, 12 * cp]
    slots = packed_slots(torch.tensor(offsets), None, cp, torch.device("cpu"))
    for rank, positions in enumerate(reference(offsets[-1], cp, offsets)):
        assert slots.position[rank].tolist() == positions.tolist()
        for i, position in enumerate(positions.tolist()):
            start, stop = offsets[slots.sequence[i]], offsets[slots.sequence[i] + 1]
            assert start <= position < stop
            assert slots.index_in_sequence[rank, i] == position - start
            assert slots.has_next[rank, i] == (position + 1 < stop)


def test_true_lengths_end_a_sequence_early():
    slots = packed_slots(torch.tensor([0, 4, 8]), torch.tensor([0, 3, 3]), 1, torch.device("cpu"))
    assert slots.has_next.tolist() == [[True, True, False, False, False, False, False, False]]
    assert slots.next_ids(IDS, 0).tolist() == [[1, 2, -100, -100, -100, -100, -100, -100]]


NAME = "vocab_parallel.from_parallel_logits_to_logprobs_packed_sequences"
LOCAL = torch.zeros(1, 8, 3)


def packed(mesh, offsets=(0, 8, 16), logits=LOCAL, target=IDS[:, :16], size=5, group="tp", real=None, **options):
    group = mesh[group] if group else None
    real = None if real is None else torch.tensor(real)
    return vp.from_parallel_logits_to_logprobs_packed_sequences(
        logits, target, torch.tensor(offsets), size, 0, 3, group, cp_group=mesh["cp"], cu_seqlens=real, **options
    )


REJECTED = [
    (
        lambda m: packed(m, group=None),
        TypeError,
        "group is None; pass a ProcessGroup (a group of size 1 for no tensor parallelism)",
    ),
    (lambda m: packed(m, [0.0, 16.0]), TypeError, "cu_seqlens_padded is float32; it must be integers"),
    (lambda m: packed(m, real=[0.0, 1.0, 2.0]), TypeError, "cu_seqlens is float32; it must be integers"),
    (
        lambda m: packed(m, [[0, 16]]),
        ValueError,
        "cu_seqlens_padded is [1, 2]; its dims must be [n]; reshape it to these",
    ),
    (
        lambda m: packed(m, real=[0, 16]),
        ValueError,
        "cu_seqlens is [2] but cu_seqlens_padded has n=3: n differs, 2 and 3",
    ),
    (lambda m: packed(m, [4, 16]), ValueError, "cu_seqlens_padded: starts at 4; offsets start at 0"),
    (
        lambda m: packed(m, [0, 8, 4, 16]),
        ValueError,
        "cu_seqlens_padded: sequence 1 runs from 8 back to 4; offsets never decrease",
    ),
    (
        lambda m: packed(m, [0, 4, 4, 14]),
        ValueError,
        "cu_seqlens_padded[3] - cu_seqlens_padded[2] = 10 is not a multiple of 2*cp = 4; pad sequence 2 to 12",
    ),
    (
        lambda m: packed(m, real=[0, 8, 17]),
        ValueError,
        "cu_seqlens has 9 tokens for sequence 1 but its padded slot has 8",
    ),
    (lambda m: packed(m, [0, 8, 20]), ValueError, "cu_seqlens_padded ends at 20 but target covers 16"),
    (
        lambda m: packed(m, target=IDS[:, :20]),
        ValueError,
        "target has 20 positions but vocab_parallel_logits covers 16 (8 per rank, cp=2)",
    ),
    (
        lambda m: packed(m, target=IDS[:, :16], target_is_pre_rolled=True),
        ValueError,
        "target has 16 positions but vocab_parallel_logits covers 8",
    ),
    (
        lambda m: packed(m, logits=LOCAL.expand(2, 8, 3), target=IDS[:, :16].expand(2, 16)),
        ValueError,
        "vocab_parallel_logits is [2, 8, 3]; dim 0 must have size 1",
    ),
    (lambda m: packed(m, size=0), ValueError, "unpacked_seqlen=0 must be at least 1"),
]


test_rejection = rejected(
    {"cp": 2, "tp": 1}, [(text[:60], call, f"{NAME}: {text}", kind) for call, kind, text in REJECTED]
)
