"""TokenLayout: rejections, fill that is stripped, and offsets that are taken on trust."""

import pytest
import torch

from parity_tests.rejections import rejected
from torch_impl.layouts import TokenLayout


def dense(kind, length, n=2, rank=0, **options):
    return TokenLayout.dense(kind, length, cp_size=n, cp_rank=rank, **options)


def packed(cu, real=None, n=2, rank=0, **options):
    return TokenLayout.packed(cu, real, cp_size=n, cp_rank=rank, **options)


REJECTED = [
    (
        lambda: dense("dual_chunk_swap", 30, 4),
        ValueError,
        "s=30 cannot be sharded by dual_chunk_swap over cp=4 (needs a multiple of 8); pad to 32",
    ),
    (
        lambda: dense("striped", 7, 3),
        ValueError,
        "s=7 cannot be sharded by striped over cp=3 (needs a multiple of 3); pad to 9",
    ),
    (lambda: dense("contiguous", -4), ValueError, "s=-4 is not a size; sizes are 0 or more"),
    (
        lambda: dense("packed", 8),
        ValueError,
        "TokenLayout.dense: kind='packed' is not one of contiguous, dual_chunk_swap, ragged, striped",
    ),
    (
        lambda: packed([0, 8], kind="ragged"),
        ValueError,
        "TokenLayout.packed: kind='ragged' is not one of contiguous, packed, striped",
    ),
    (lambda: dense("striped", 8, 2, 2), ValueError, "cp_rank=2 is not in cp_size=2; ranks are 0 to 1"),
    (lambda: dense("contiguous", 8, rank=0.0), TypeError, "TokenLayout.dense: cp_rank=0.0 is a float; pass an int"),
    (lambda: packed([0, 8], n=True), TypeError, "TokenLayout.packed: cp_size=True is a bool; pass an int"),
    (lambda: dense("contiguous", 8.0), TypeError, "TokenLayout.dense: length=8.0 is a float; pass an int"),
    (
        lambda: dense("contiguous", 8, real_length="4"),
        TypeError,
        "TokenLayout.dense: real_length='4' is a str; pass an int",
    ),
    (
        lambda: packed([0, 4, 8], total=12, validate=False),
        ValueError,
        "cu_seqlens ends at 8 but the stream holds 12 tokens; pass the padded offsets",
    ),
    (
        lambda: packed(torch.tensor([0, 4, 8, -1]), total=12, validate=False),
        ValueError,
        "cu_seqlens ends at 8 but the stream holds 12 tokens; pass the padded offsets",
    ),
    *[
        (lambda passed=arguments: packed(*passed, total=8, validate=False), kind, sentence)
        for arguments, kind, sentence in (
            (
                (torch.tensor([[0, 8]]),),
                ValueError,
                "cu_seqlens: shape is (1, 2); offsets are one row that starts at 0",
            ),
            (
                (torch.tensor([0, 8]), torch.tensor([], dtype=torch.int32)),
                ValueError,
                "cu_real: shape is (0,); offsets are one row that starts at 0",
            ),
            (
                (torch.tensor([0, 8.0]),),
                TypeError,
                "TokenLayout.packed: cu_padded: dtype is float32; offsets are integers",
            ),
            (
                (torch.tensor([0, 8]), torch.tensor([0, 8.0])),
                TypeError,
                "TokenLayout.packed: cu_real: dtype is float32; offsets are integers",
            ),
        )
    ],
    (
        lambda: packed(torch.tensor([0, 8]), total=8.0, validate=False),
        TypeError,
        "TokenLayout.packed: total=8.0 is a float; pass an int",
    ),
    (
        lambda: packed(torch.tensor([0, 4, 8]).as_subclass(OnDevice), total=10, validate=False),
        ValueError,
        "total=10 cannot be sharded by packed over cp=2 (needs a multiple of 4); pass where the padded offsets end",
    ),
    (
        lambda: packed(torch.tensor([0, 4, 8]), torch.tensor([0, 3]), total=8, validate=False),
        ValueError,
        "cu_real has 2 offsets and cu_padded has 3; give equally many",
    ),
    (lambda: packed([0, 8], rank=-1), ValueError, "cp_rank=-1 is not in cp_size=2; ranks are 0 to 1"),
    (lambda: packed([0, 8], n=0), ValueError, "cp_size=0 is not a number of ranks; it is 1 or more"),
    (
        lambda: dense("striped", 8, real_length=9),
        ValueError,
        "real_length=9 is outside s=8; it counts the tokens without padding",
    ),
    (
        lambda: dense("striped", 8, counts=[4, 4]),
        ValueError,
        "counts=[4, 4] are for ragged, the layout is striped; leave them out",
    ),
    (
        lambda: dense("ragged", 8, counts=[4, 5]),
        ValueError,
        "ragged: lengths (4, 5) add up to 9, size=8; they must be equal",
    ),
    (
        lambda: packed([0, 4, 8, 12, 18]),
        ValueError,
        "cu_seqlens: sequence 3 has padded length 6, dual_chunk_swap over cp=2 needs a multiple of 4; pad it to 8",
    ),
    (
        lambda: packed([0, 3, 7], kind="striped"),
        ValueError,
        "t=7 cannot be sharded by striped over cp=2 (needs a multiple of 2); pad to 8",
    ),
    (lambda: packed([4, 8]), ValueError, "cu_seqlens: starts at 4; offsets start at 0"),
    (lambda: packed([-1000, -1000]), ValueError, "cu_seqlens: starts at -1000; offsets start at 0"),
    (
        lambda: packed([0, 8, 4]),
        ValueError,
        "cu_seqlens: sequence 1 runs from 8 back to 4; offsets never decrease",
    ),
    (
        lambda: packed([0, -1, 8]),
        ValueError,
        "cu_seqlens: sequence 0 runs from 0 back to -1; offsets never decrease",
    ),
    (
        lambda: packed([0, 4, 13], total=16),
        ValueError,
        "cu_seqlens ends at 13 but the stream holds 16 tokens; pass the padded offsets",
    ),
    (
        lambda: packed([0, 4, 8], [0, 3, 8]),
        ValueError,
        "cu_real: sequence 1: real length 5 exceeds its padded length 4",
    ),
    (
        lambda: packed([0, 4, 8], [0, 3]),
        ValueError,
        "cu_real: 1 sequences, the padded offsets have 2; give one length for each",
    ),
    (
        lambda: packed([0, 4, 8], [0, 4, 3]),
        ValueError,
        "cu_real: sequence 1 runs from 4 back to 3; offsets never decrease",
    ),
    (lambda: packed([[0, 4]]), ValueError, "cu_seqlens: shape is (1, 2); offsets are one row that starts at 0"),
    (lambda: packed([]), ValueError, "cu_seqlens: shape is (0,); offsets are one row that starts at 0"),
    (lambda: packed([0.0, 4.0]), TypeError, "TokenLayout.packed: cu_padded: dtype is float32; offsets are integers"),
    (lambda: packed(None), TypeError, "TokenLayout.packed: cu_padded=None are not offsets; pass a row of integers"),
    (
        lambda: packed([0, 4], "ab"),
        TypeError,
        "TokenLayout.packed: cu_real='ab' are not offsets; pass a row of integers",
    ),
    (lambda: packed([False, True]), TypeError, "TokenLayout.packed: cu_padded: dtype is bool; offsets are integers"),
    (
        lambda: packed([0, 4], [0.0, 4.0]),
        TypeError,
        "TokenLayout.packed: cu_real: dtype is float32; offsets are integers",
    ),
    (
        lambda: dense("striped", 8).shard(torch.zeros(2, 7), 1),
        ValueError,
        "TokenLayout.shard: x has 7 rows along dim 1, but the layout has 8 global rows; pass a tensor of this layout",
    ),
    (
        lambda: dense("striped", 8).shard(torch.zeros(8), 1),
        ValueError,
        "TokenLayout.shard: dim=1 is outside a tensor of 1 dims",
    ),
    (
        lambda: dense("dual_chunk_swap", 8).rebind(3, 0),
        ValueError,
        "s=8 cannot be sharded by dual_chunk_swap over cp=3 (needs a multiple of 6); pad to 12",
    ),
    (
        lambda: packed([0, 4, 12]).rebind(3, 0),
        ValueError,
        "cu_seqlens: sequence 0 has padded length 4, dual_chunk_swap over cp=3 needs a multiple of 6; pad it to 6",
    ),
]


@pytest.mark.parametrize(("call", "kind", "sentence"), REJECTED, ids=[text[:60] for _, _, text in REJECTED])
def test_rejection(call, kind, sentence):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == sentence


OF_A_GROUP = [
    (
        lambda m: dense("striped", 9, 3).unshard(torch.zeros(3), 0, m["cp"]),
        ValueError,
        "TokenLayout.unshard: group has cp=2 and rank {}, the layout is for cp=3 and rank 0; rebind it",
    ),
    (
        lambda m: dense("striped", 8, 2, 1 - m.rank("cp")).unshard(torch.zeros(4), 0, m["cp"]),
        ValueError,
        "TokenLayout.unshard: group has cp=2 and rank {}, the layout is for cp=2 and rank {other}; rebind it",
    ),
    (
        lambda m: dense("striped", 8, 2, m.rank("cp")).unshard(torch.zeros(5), 0, m["cp"]),
        ValueError,
        "TokenLayout.unshard: x has 5 rows along dim 0, but the layout has 4 local rows; pass a tensor of this layout",
    ),
    (
        lambda m: dense("striped", 8, 2, m.rank("cp")).unshard(torch.zeros(4), 1, m["cp"]),
        ValueError,
        "TokenLayout.unshard: dim=1 is outside a tensor of 1 dims",
    ),
    (
        lambda m: dense("striped", 8).unshard(torch.zeros(4), 0, None),
        TypeError,
        "TokenLayout.unshard: group is None; pass a ProcessGroup",
    ),
    (
        lambda m: dense("striped", 8, 2, m.rank("cp")).unshard(torch.zeros(4), 0, m["cp"], gradient="P"),
        ValueError,
        "TokenLayout.unshard: gradient='P' is not the gradient type of a replicated result; write 'R' (gradients add "
        "up) or 'I' (same gradient)",
    ),
]


test_rejection_on_every_rank_before_any_collective = rejected(
    {"cp": 2},
    [
        (text[:60], call, tuple(text.format(rank, other=1 - rank) for rank in range(2)), kind)
        for call, kind, text in OF_A_GROUP
    ],
)


@pytest.mark.parametrize("fill", [-1, -1000])
def test_fill_on_the_right_is_stripped(fill):
    clean = packed(torch.tensor([0, 4, 12]), torch.tensor([0, 3, 10]))
    filled = packed(torch.tensor([0, 4, 12, fill, fill]), torch.tensor([0, 3, 10, fill, fill]))
    for name in ("index", "cu_padded", "cu_real", "padding_mask", "local_cu"):
        assert torch.equal(getattr(clean, name), getattr(filled, name))


class Read(Exception):
    """The host looked at a value."""


class OnDevice(torch.Tensor):
    """Offsets whose values the host must not read."""

    def cpu(self):
        raise Read

    tolist = item = __bool__ = __int__ = __index__ = cpu


def test_trusted_offsets_are_never_read_by_the_host():
    cu, real = torch.tensor([0, 4, 12, -1]), torch.tensor([0, 3, 10, -1])
    trusted = packed(cu.as_subclass(OnDevice), real.as_subclass(OnDevice), total=12, validate=False)
    read = packed(cu, real)
    for name in ("index", "inverse", "position_ids", "sequence_ids", "padding_mask"):
        assert getattr(trusted, name).as_subclass(torch.Tensor).tolist() == getattr(read, name).tolist()
    with pytest.raises(Read):
        packed(cu.as_subclass(OnDevice), real.as_subclass(OnDevice), total=12)


def test_offsets_without_a_total_are_read():
    assert packed(torch.tensor([0, 4, 12]), validate=False).index.tolist() == packed([0, 4, 12]).index.tolist()


def test_one_rank_takes_any_length():
    assert packed([0, 3, 3, 4, 9], n=1).index.tolist() == [list(range(9))]
    for kind in ("contiguous", "dual_chunk_swap", "ragged", "striped"):
        assert dense(kind, 5, 1).index.tolist() == [[0, 1, 2, 3, 4]]


def test_no_sequence_and_no_token():
    layout = packed([0])
    assert layout.index.shape == (2, 0) and layout.total == layout.original_length == 0
    assert layout.local_cu.tolist() == [0] and layout.padding_mask.tolist() == []
