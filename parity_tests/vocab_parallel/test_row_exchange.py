"""Parity of vocab_parallel.row_exchange."""

import numpy as np
import pytest
import torch

from jax_ref.vocab_parallel import same
from parity_tests.rejections import rejected
from shardproof import CaseSpec, Cost, scheme
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp

WIDE_OUTPUTS = False
DECLARED = dict(
    reference=same, mesh={"tp": (1, 2, 3, 4)}, dtypes=("float32", "bfloat16", "float64", "float16"), roundings=0
)


def one_exchange(c):
    """One all_to_all of the shard forward, one backward."""
    shard = c.t * c.v // c.tp * c.itemsize
    return Cost(forward={"all_to_all": (1, shard)}, backward={"all_to_all": (1, shard)})


@scheme(contract=vp.all_to_all_vp2sq, inputs={"matrix": "t v/tp"}, cost=one_exchange, **DECLARED)
@pytest.mark.cases(5, engine="gloo")
@pytest.mark.cases
def columns_to_rows(mesh, matrix):
    return vp.all_to_all_vp2sq(matrix, mesh["tp"])


@scheme(contract=vp.all_to_all_sq2vp, inputs={"matrix": "t/tp v"}, cost=one_exchange, **DECLARED)
@pytest.mark.cases
def rows_to_columns(mesh, matrix):
    return vp.all_to_all_sq2vp(matrix, mesh["tp"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_both_exchanges_in_turn_restore_a_shard_of_any_dtype_and_strides(tp, dtype):
    matrix = torch.arange(8 * 12).view(8, 12).remainder(13).to(dtype)

    def body(mesh, case):
        rank, width, height = mesh.rank("tp"), 12 // tp, 8 // tp
        shard = matrix.t().contiguous().t()[:, rank * width : (rank + 1) * width]  # a slice of a column-major matrix
        assert not shard.is_contiguous()
        rows = vp.all_to_all_vp2sq(shard, mesh["tp"])
        again = vp.all_to_all_sq2vp(rows.t().contiguous().t(), mesh["tp"])
        share = matrix[rank * height : (rank + 1) * height]
        return torch.equal(rows, share) and torch.equal(again, shard) and again.data_ptr() != shard.data_ptr()

    assert all(run(body, CaseSpec(scheme="row_exchange", mesh={"tp": tp})).results)


@pytest.mark.parametrize("function", [vp.all_to_all_vp2sq, vp.all_to_all_sq2vp])
def test_each_is_the_adjoint_of_the_other(function):
    other = vp.all_to_all_sq2vp if function is vp.all_to_all_vp2sq else vp.all_to_all_vp2sq

    def body(mesh, case):
        x = torch.arange(8.0 * 8).view(8, 8).roll(mesh.rank("tp")).requires_grad_()
        y = function(x, mesh["tp"])
        cotangent = torch.arange(1.0, len(y) + 1).mul(mesh.rank("tp") + 1).view(-1, 1).expand(*y.shape)  # stride 0
        before = cotangent.clone()
        (gradient,) = torch.autograd.grad(y, x, cotangent)
        back = other(cotangent, mesh["tp"])
        return (
            torch.equal(gradient, back),
            torch.equal(cotangent, before),
            (y * cotangent).sum().item(),
            (x * gradient).sum().item(),
        )

    results = run(body, CaseSpec(scheme="row_exchange", mesh={"tp": 2})).results
    assert all(same_gradient and untouched for same_gradient, untouched, _, _ in results)
    image, preimage = np.array([row[2:] for row in results]).sum(0)
    assert image == preimage  # <A x, y> = <x, A^T y>, in integers


MATRIX = torch.zeros(8, 8)
HINT = "pass a ProcessGroup (a group of size 1 for no tensor parallelism)"
VP2SQ, SQ2VP = "vocab_parallel.all_to_all_vp2sq", "vocab_parallel.all_to_all_sq2vp"
REJECTED = [
    (TypeError, lambda g: vp.all_to_all_vp2sq(MATRIX, None), f"{VP2SQ}: tp_group is None; {HINT}"),
    (TypeError, lambda g: vp.all_to_all_sq2vp(MATRIX, 2), f"{SQ2VP}: tp_group is an int; {HINT}"),
    (
        ValueError,
        lambda g: vp.all_to_all_vp2sq(MATRIX.view(2, 4, 8), g),
        f"{VP2SQ}: vocab_parallel_logits is [2, 4, 8]; its dims must be [t v/tp]; reshape it to these",
    ),
    (
        ValueError,
        lambda g: vp.all_to_all_sq2vp(MATRIX[0], g),
        f"{SQ2VP}: seq_parallel_logits is [8]; its dims must be [t/tp v]; reshape it to these",
    ),
    (
        ValueError,
        lambda g: vp.all_to_all_vp2sq(MATRIX[:7], g),
        f"{VP2SQ}: BS=7 must be divisible by tp=2; pad the rows to 8",
    ),
    (ValueError, lambda g: vp.all_to_all_sq2vp(torch.zeros(4, 15), g), f"{SQ2VP}: V=15 must be divisible by tp=2"),
]


test_rejection = rejected(
    {"tp": 2}, [(text[15:60], lambda mesh, call=call: call(mesh["tp"]), text, kind) for kind, call, text in REJECTED]
)
