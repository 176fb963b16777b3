"""Every message with which a collective rejects its arguments, in full, and before anything is sent."""

import pytest
import torch

from parity_tests.rejections import rejected
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl import collectives as c

X = torch.zeros(2, 3)

REJECTED = {
    "group of None": [
        (lambda g: c.all_reduce(X, None), "collectives.all_reduce: group is None; pass a ProcessGroup"),
        (lambda g: c.all_reduce_max(X, None), "collectives.all_reduce_max: group is None; pass a ProcessGroup"),
        (lambda g: c.all_gather(X, None, out="R"), "collectives.all_gather: group is None; pass a ProcessGroup"),
        (lambda g: c.reduce_scatter(X, None), "collectives.reduce_scatter: group is None; pass a ProcessGroup"),
        (
            lambda g: c.all_to_all(X, None, split_dim=0, concat_dim=1),
            "collectives.all_to_all: group is None; pass a ProcessGroup",
        ),
        (
            lambda g: c.broadcast(X, None, src=0, out="I"),
            "collectives.broadcast: group is None; pass a ProcessGroup",
        ),
        (lambda g: c.ring_shift(X, None), "collectives.ring_shift: group is None; pass a ProcessGroup"),
        (lambda g: c.start_ring_shift([X], None), "collectives.start_ring_shift: group is None; pass a ProcessGroup"),
    ],
    "another type": [
        (lambda g: c.all_reduce([X], g), "collectives.all_reduce: x is a list; pass a Tensor"),
        (lambda g: c.all_gather(X, g, out="R", dim=0.0), "collectives.all_gather: dim=0.0 is a float; pass an int"),
        (lambda g: c.ring_shift(X, g, "1"), "collectives.ring_shift: shift='1' is a str; pass an int"),
        (lambda g: c.all_reduce(X, "tp"), "collectives.all_reduce: group is a str; pass a ProcessGroup"),
    ],
    "type": [
        (
            lambda g: c.all_reduce(X, g, out="V"),
            "collectives.all_reduce: out='V' is not the gradient type of a replicated result; "
            "write 'R' (gradients add up) or 'I' (same gradient)",
        ),
        (
            lambda g: c.all_gather(X, g, out="P"),
            "collectives.all_gather: out='P' is not the gradient type of a replicated result; "
            "write 'R' (gradients add up) or 'I' (same gradient)",
        ),
        (
            lambda g: c.broadcast(X, g, src=0, out="r"),
            "collectives.broadcast: out='r' is not the gradient type of a replicated result; "
            "write 'R' (gradients add up) or 'I' (same gradient)",
        ),
    ],
    "dim": [
        (
            lambda g: c.all_gather(X, g, out="R", dim=2),
            "collectives.all_gather: dim=2 is outside a tensor of 2 dims",
        ),
        (
            lambda g: c.reduce_scatter(X, g, dim=-3),
            "collectives.reduce_scatter: dim=-3 is outside a tensor of 2 dims",
        ),
        (
            lambda g: c.all_to_all(X, g, split_dim=5, concat_dim=0),
            "collectives.all_to_all: split_dim=5 is outside a tensor of 2 dims",
        ),
        (
            lambda g: c.all_to_all(X, g, split_dim=0, concat_dim=5),
            "collectives.all_to_all: concat_dim=5 is outside a tensor of 2 dims",
        ),
    ],
    "source": [
        (
            lambda g: c.broadcast(X, g, src=2, out="R"),
            "collectives.broadcast: src=2 is outside a group of 2 ranks",
        ),
    ],
    "lengths": [
        (
            lambda g: c.all_gather(X, g, out="R", lengths=[2]),
            "collectives.all_gather: lengths=[2] has 1 entries for 2 ranks",
        ),
        (
            lambda g: c.all_gather(X, g, out="R", lengths=[2.0, 2.0]),
            "collectives.all_gather: lengths=[2.0, 2.0] has an entry that is no integer",
        ),
        (
            lambda g: c.all_gather(X, g, out="R", lengths=[2, -1]),
            "collectives.all_gather: lengths=[2, -1] has a negative entry",
        ),
        (
            lambda g: c.all_gather(X, g, out="R", lengths=[3 - g.rank(), 2 + g.rank()]),
            "collectives.all_gather: lengths[{rank}]=3 but x has 2 positions along dim 0",
        ),
        (
            lambda g: c.reduce_scatter(X, g, dim=1),
            "collectives.reduce_scatter: dim 1 has 3 positions, which 2 ranks cannot share equally; pass lengths",
        ),
        (
            lambda g: c.reduce_scatter(X, g, dim=1, lengths=[1, 1]),
            "collectives.reduce_scatter: lengths=[1, 1] add up to 2 but dim 1 has 3 positions",
        ),
        (
            lambda g: c.all_to_all(X, g, split_dim=1, concat_dim=0),
            "collectives.all_to_all: dim 1 has 3 positions, which 2 ranks cannot share equally; pass split_lengths",
        ),
        (
            lambda g: c.all_to_all(X, g, split_dim=0, concat_dim=1, concat_lengths=[2 + g.rank(), 3 - g.rank()]),
            "collectives.all_to_all: concat_lengths[{rank}]=2 but x has 3 positions along dim 1",
        ),
        (
            lambda g: c.all_to_all(X, g, split_dim=0, concat_dim=0, concat_lengths=[1]),
            "collectives.all_to_all: concat_lengths=[1] has 1 entries for 2 ranks",
        ),
    ],
}
CALLS = [(call, text) for rows in REJECTED.values() for call, text in rows]


test_rejected_before_anything_is_sent = rejected(
    {"x": 2},
    [
        (
            text[12:60],
            lambda mesh, call=call: call(mesh["x"]),
            tuple(text.format(rank=rank) for rank in range(2)),
            TypeError if "; pass a" in text else ValueError,
        )
        for call, text in CALLS
    ],
)


@pytest.mark.parametrize(
    ("axis", "hint"), [("tpp", "; did you mean 'tp'?"), ("stage", "")], ids=["a near one", "none is near"]
)
def test_an_axis_that_is_not_in_the_mesh_is_rejected_with_one_that_is_near(axis, hint):
    def body(mesh, case):
        for call in (mesh.__getitem__, mesh.size, mesh.rank):
            with pytest.raises(ValueError) as caught:
                call(axis)
            assert str(caught.value) == f"mesh: axis {axis!r} is not in mesh (cp, tp){hint}"

    run(body, CaseSpec(scheme="collectives", mesh={"cp": 1, "tp": 2}))
