"""Parity of BatchLayout: shard any [b, s] tensor of the caller's batch, as every batch function does, and back."""

import doctest

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from jax_ref.context_parallel import shard_and_squares
from parity_tests.context_parallel.drawn_rows import FILL, batch_of, drawn_rows
from parity_tests.context_parallel.test_batch_te import Mesh
from parity_tests.parity import parity
from parity_tests.rejections import check_rejection, rejected
from shardproof import CaseSpec, Cost, lengths, scheme
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl import context_parallel as cp
from torch_impl.collectives import reinterpret
from torch_impl.context_parallel import batch_layout
from torch_impl.layouts import TokenLayout

Rows = Float[Tensor, "b l d"]
DTYPES = ("float32", "bfloat16", "float64")


def gather_cost(c, tokens, kinds=0, summed=None):
    """Of `tokens` in a row, one gather, and the sum of its gradients; `kinds` more tensors go along.

    Where a gather has the gradient I, gradients of `summed` tokens are added outside of it.
    """
    of_a_token = (1 + kinds) * c.b * c.d
    op, added = ("reduce_scatter", tokens) if summed is None else ("all_reduce", summed)
    return Cost(
        forward={"all_gather": (1, tokens // c.cp * of_a_token * c.itemsize)},
        backward={op: (1, added * of_a_token * c.accumulator_itemsize)},
    )


def there_and_back(mesh, layout, x, kinds, gradient="R"):
    """The shard of x and its squares, gathered; with `kinds` as the second of two tensors, stacked before the rows.

    With the `gradient` I the ranks' cotangents are summed before the gather sees them.
    """
    both = torch.stack([2 * x.detach(), x]) if kinds else x  # a gradient of 0 times an infinity would be NaN
    shard = layout.shard(both, dim=kinds)
    squares = layout.gather(shard.square(), dim=kinds, gradient=gradient)
    if gradient == "I" and layout.group is not None:  # without a group there is one rank
        squares = reinterpret(squares, mesh["cp"], src="I", dst="R")
    return (shard[1], squares[1]) if kinds else (shard, squares)


def rows_without_the_last(x, less):
    return shard_and_squares(x, x.shape[1] - less)


def cost_of_dense_rows(c):
    if c.cp == 1 and not c.named:  # one rank may do without a mesh
        return Cost()
    rows = c.s - c.less
    return gather_cost(c, c.s if c.cp > 1 else rows, c.kinds, rows if c.gradient == "I" else None)


@scheme(
    reference=rows_without_the_last,
    mesh={"cp": (2, 1, 3, 4)},
    inputs={"x": "b s d cp=R"},
    outputs=("b s/cp:dual_chunk_swap d", "b s d cp=R"),
    options={"less": (3, 1, 0)},
    rank_options={"named": (True, False), "beside": (None, 0, -3), "kinds": (1, 0), "gradient": ("R", "I")},
    dtypes=DTYPES,
    assume=lambda c: c.less < c.s,
    cost=cost_of_dense_rows,
)
def dense_rows_there_and_back(mesh, x, less, named, beside, kinds, gradient) -> tuple[Rows, Rows]:
    """The last `less` columns are not in the batch, and padded; beside it is a sequence at the dim `beside`."""
    rows = x[:, : x.shape[1] - less]
    batch = {"input_ids": rows.new_zeros(rows.shape[:2], dtype=torch.int64), "beside": rows.transpose(0, 1)}
    device_mesh = mesh.device_mesh["cp"] if named or mesh.size("cp") > 1 else None
    dims = None if beside is None else {"beside": beside}
    factory, padded, layout = cp.make_cp_batch_and_ctx(device_mesh, batch, extra_seq_buffers=dims, return_layout=True)
    shard, squares = there_and_back(mesh, layout, rows, kinds, gradient)
    squares = F.pad(squares, (0, 0, 0, less))
    if beside is not None:
        with factory():
            shard = padded["beside"].transpose(0, 1).clone()
    return F.pad(shard, (0, 0, 0, len(mesh.global_ids("s")) - shard.shape[1])), squares


def rows_alone(x, padded, real):
    return shard_and_squares(x, x.shape[1])


PACKED_ROWS = dict(
    reference=rows_alone,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "b t d cp=R", "padded": "q", "real": "q"},
    outputs=("b t/cp:packed d", "b t d cp=R"),
    dims={"b": (2, 4), "q": (3, 5, 2), "t": (24, 40, 16), "d": (2, 1, 5)},
    draw={"padded": lengths("t", padded=True), "real": lengths("t")},
    dtypes=DTYPES,
)


@scheme(
    **PACKED_ROWS,
    rank_options={"num_chunks": (2, 1), "as_context": (False, True), "kinds": (1, 0), "gradient": ("R", "I")},
    cost=lambda c: gather_cost(c, c.t, c.kinds, c.t if c.gradient == "I" else None),
)
def packed_rows_there_and_back(mesh, x, padded, real, num_chunks, as_context, kinds, gradient) -> tuple[Rows, Rows]:
    seq_lens, seq_lens_padded = (F.pad(each, (0, 1), value=FILL).expand(len(x), -1) for each in (real, padded))
    batch = {"input_ids": x, "seq_lens": seq_lens, "seq_lens_padded": seq_lens_padded}
    settings = {"num_chunks": num_chunks, "return_layout": True}
    if as_context:
        layout = cp.make_cp_batch_and_ctx(mesh.device_mesh, batch, use_te=True, **settings)[2]
    else:
        layout = cp.make_cp_batch_for_te(mesh.device_mesh["cp"], batch, **settings)[1]
    shard, squares = there_and_back(mesh, layout, x, kinds, gradient)
    tokens = shard.flatten(0, 1) if num_chunks > 1 else shard
    return tokens.unflatten(0, (len(x), -1)), squares


SCHEMES = (dense_rows_there_and_back, packed_rows_there_and_back)
test_parity = parity(SCHEMES, lockstep=15, gloo=3)


@settings(max_examples=few(8))
@given(drawn_rows(), st.sampled_from([1, 2, 3]))
def test_the_layout_shards_as_each_batch_function_does(rows, n):
    batch, m = batch_of(rows, n), rows.chunks
    ids = batch["input_ids"]
    kinds = torch.stack([ids, ids + 1])
    for rank in range(n):
        mesh = Mesh(n, rank)
        out, index, layout = cp.make_cp_batch_for_te(
            mesh, batch, num_chunks=m, return_local_indices=True, return_layout=True
        )
        assert torch.equal(layout.shard(ids), out["input_ids"])
        assert torch.equal(ids.flatten()[index], out["input_ids"])
        assert torch.equal(layout.shard(kinds, dim=1)[1], out["input_ids"] + 1)
    for out, layout in (
        cp.process_input_for_thd(batch, return_layout=True),
        cp.split_batch_into_thd_chunks(batch, m, return_layout=True),
    ):
        assert torch.equal(layout.shard(ids), out["input_ids"])
        assert torch.equal(layout.gather(out["labels"]), batch["labels"])
    stream = cp.process_input_for_thd(batch)
    for rank in range(n):
        chunk, layout = cp._shard_thd_chunk_for_te(stream, Mesh(n, rank), "thd", FILL, 0, return_layout=True)
        assert layout.shape == (ids.numel(),)
        assert torch.equal(layout.shard(stream["labels"]), chunk["labels"])


def on_ranks(n, body):
    return run(body, CaseSpec(scheme="batch_layout", mesh={"cp": n})).results


def test_the_layout_shards_as_the_context_does():
    def body(mesh, case):
        batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6) + 1}
        factory, padded, layout = cp.make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch, return_layout=True)
        with factory():
            assert torch.equal(layout.shard(batch["labels"], fill=-100), padded["labels"])
            assert torch.equal(layout.gather(padded["input_ids"]), batch["input_ids"])
        return layout.shape, layout.local_shape, layout.tokens is factory.layout

    assert on_ranks(2, body) == (((2, 6), (2, 4), True),) * 2


def test_one_rank_has_a_layout_too():
    def body(mesh, case):
        batch = {"input_ids": torch.arange(10).view(2, 5)}
        for device_mesh in (None, mesh.device_mesh["cp"]):
            _, same, layout = cp.make_cp_batch_and_ctx(device_mesh, batch, return_layout=True)
            assert same is batch and layout.tokens.cp_size == 1
            x = torch.rand(2, 5, 3)
            assert torch.equal(layout.gather(layout.shard(x)), x)
            packed = cp.make_cp_batch_and_ctx(device_mesh, thd(), use_te=True, return_layout=True)[2]
            assert torch.equal(packed.gather(packed.shard(x[:, :4])), x[:, :4])

    on_ranks(1, body)


def test_equal_cotangents_need_no_collective():
    def body(mesh, case):
        batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
        layout = cp.make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch, return_layout=True)[2]
        shard = torch.ones(1, 4, requires_grad=True)
        (layout.gather(shard, gradient="I") * torch.arange(8)).sum().backward()
        return shard.grad.tolist()

    ranks = run(body, CaseSpec(scheme="batch_layout", mesh={"cp": 2}))
    assert ranks.results == ([[0, 1, 6, 7]], [[2, 3, 4, 5]])
    assert {row.op for row in ranks.ledger.rows} == {"all_gather"}


def thd():
    lengths = torch.tensor([[4], [4]])
    return {"input_ids": torch.arange(8).view(2, 4), "seq_lens": lengths, "seq_lens_padded": lengths}


def dense(mesh):
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.int64)}
    return cp.make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch, return_layout=True)[2]


REMEDY = "; pass a tensor that has these dims from dim={dim} on"
REJECTED = [
    (lambda m: dense(m).shard(torch.zeros(2, 8)), "shard: x is [2, 8], the batch is [2, 6] in full", 0),
    (lambda m: dense(m).shard(torch.zeros(2, 6), dim=1), "shard: x is [2, 6], the batch is [2, 6] in full", 1),
    (lambda m: dense(m).gather(torch.zeros(2, 6, 1)), "gather: x is [2, 6, 1], the batch is [2, 4] here", 0),
    (lambda m: dense(m).gather(torch.zeros(2, 4), dim=2), "gather: dim=2 is outside a tensor of 2 dims", None),
    (
        lambda m: cp.make_cp_batch_for_te(None, thd(), num_chunks=2, return_layout=True)[1].gather(torch.zeros(8)),
        "gather: x is [8], the batch is [2, 4] here",
        0,
    ),
]


test_rejection_on_every_rank_before_any_collective = rejected(
    {"cp": 2},
    [
        (message, call, f"BatchLayout.{message}" + ("" if dim is None else REMEDY.format(dim=dim)))
        for call, message, dim in REJECTED
    ],
)


def test_a_sequence_at_another_dim_is_padded_and_sharded_with_the_batch():
    def body(mesh, case):
        teacher = torch.arange(18.0).view(6, 3)
        batch = {"input_ids": torch.zeros(2, 6, dtype=torch.int64), "teacher": teacher}
        factory, padded = cp.make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch, extra_seq_buffers={"teacher": -2})
        with factory():
            inside = padded["teacher"].clone()
        full = F.pad(teacher, (0, 0, 0, 2))
        assert torch.equal(padded["teacher"], full)
        return torch.equal(inside, full[[0, 1, 6, 7] if mesh.rank("cp") == 0 else [2, 3, 4, 5]])

    assert on_ranks(2, body) == (True, True)


@pytest.mark.parametrize(
    ("dims", "options", "kind", "message"),
    [
        ({"x": 0}, {}, ValueError, "extra_seq_buffers names 'x'; the batch has input_ids, teacher"),
        (
            {"teacher": 1},
            {},
            ValueError,
            "teacher has 3 positions along dim 1, the rows have 6; name the dim of its sequence",
        ),
        ({"teacher": 2}, {}, ValueError, "extra_seq_buffers['teacher']=2 is outside a tensor of 2 dims"),
        (
            {"teacher": True},
            {},
            TypeError,
            "extra_seq_buffers={'teacher': True}; pass a dict of the sequence's dim by name of an entry",
        ),
        (
            {"teacher": 0},
            {"use_te": True},
            ValueError,
            "extra_seq_buffers are for dense rows; with use_te=True put them [b, s, ...]",
        ),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_extra_buffers_are_rejected(n, dims, options, kind, message):
    def call(mesh):
        batch = {"input_ids": torch.zeros(2, 6, dtype=torch.int64), "teacher": torch.zeros(6, 3)}
        return cp.make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch, extra_seq_buffers=dims, **options)

    check_rejection({"cp": n}, "extra buffers", call, f"context_parallel.batch: {message}", kind)


def test_the_docstrings_example():
    assert doctest.testmod(batch_layout) == (0, 3)


def layout_of_rows(real):
    tokens = TokenLayout.dense("dual_chunk_swap", 8, cp_size=2, cp_rank=1, real_length=real)
    return batch_layout.BatchLayout(tokens, (2, real), None)


def test_a_mask_is_padded_by_a_bool():
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert layout_of_rows(5).shard(mask, fill=True).all() and not layout_of_rows(5).shard(mask, fill=False).all()


@pytest.mark.parametrize("real", [5, 8])  # padded, and not
@pytest.mark.parametrize("fill", [float("inf"), 0.5, True])
def test_a_fill_that_the_dtype_lacks_is_rejected_whatever_the_length(real, fill):
    with pytest.raises((ValueError, TypeError), match=r"BatchLayout\.shard: fill="):
        layout_of_rows(real).shard(torch.ones(2, real, dtype=torch.int64), fill=fill)
