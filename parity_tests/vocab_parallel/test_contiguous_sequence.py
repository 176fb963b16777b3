"""Parity of vocab_parallel.contiguous_sequence: DualChunkSwap order to contiguous blocks, and the next position."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from jax_ref.vocab_parallel import next_positions, sequence
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from shardproof import CaseSpec, Cost, integers, mask, scheme
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp

WIDE_OUTPUTS = False
COMMON = dict(
    mesh={"cp": (1, 2, 3, 4, 5)},
    outputs="b s/cp d",
    dims={"s": (120, 240, 0)},
    rank_options={"seq_dim": (1, -2, 0, 2, -1, -3)},
    dtypes=("float32", "bfloat16", "float64", "float16"),
)


def exchange_cost(case):
    shard = case.b * case.s * case.d // case.cp * case.itemsize
    once = {"all_to_all": (1, shard)} if case.cp > 1 else {}
    return Cost(forward=once, backward=once)


def shift_cost(case):
    position = (1, case.b * case.d * case.itemsize)
    once = {"send": position, "recv": position} if case.cp > 1 and case.s else {}
    return Cost(forward=once, backward=once)


@scheme(
    reference=sequence,
    contract=vp.cp_load_balanced_to_contiguous,
    inputs={"x": "b s/cp:dual_chunk_swap d"},
    cost=exchange_cost,
    **COMMON,
)
def contiguous_blocks(mesh, x, seq_dim):
    return vp.cp_load_balanced_to_contiguous(x.movedim(1, seq_dim), mesh["cp"], seq_dim).movedim(seq_dim, 1)


@scheme(
    reference=next_positions,
    contract=vp.cp_shift_next,
    inputs={"x": "b s/cp d"},
    options={"fill": (0, -100, 0.5)},
    cost=shift_cost,
    **COMMON,
)
def next_position(mesh, x, fill, seq_dim):
    return vp.cp_shift_next(x.movedim(1, seq_dim), mesh["cp"], seq_dim, fill).movedim(seq_dim, 1)


def next_ids(ids, is_real, fill):
    """The values of the next position, ids and booleans; the last position gets the fill, and False."""
    return jnp.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=fill), jnp.pad(is_real[:, 1:], ((0, 0), (0, 1)))


@scheme(
    reference=next_ids,
    mesh={"cp": (1, 2, 3)},
    inputs={"ids": "b s/cp", "is_real": "b s/cp"},
    outputs=("b s/cp", "b s/cp"),
    draw={"ids": integers(-3, 9), "is_real": mask("s")},
    options={"fill": (-100, 0, 2**53 + 1)},  # float64 cannot represent the last one, and int32 cannot hold it
    excluded_conditions=("inference_mode", "int32"),
)
def next_id(mesh, ids, is_real, fill) -> tuple[Int[Tensor, "b s"], Bool[Tensor, "b s"]]:
    return vp.cp_shift_next(ids, mesh["cp"], 1, fill), vp.cp_shift_next(is_real, mesh["cp"], 1, False)


test_parity = parity([contiguous_blocks, next_position, next_id], lockstep=30, gloo=5)


def on_ranks(cp, body):
    return run(body, CaseSpec(scheme="contiguous_sequence", mesh={"cp": cp})).results


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_targets_of_a_load_balanced_shard(cp):
    """One function after the other: ids in DualChunkSwap order become the next ids of contiguous blocks."""
    ids = torch.arange(4 * cp).view(1, -1)

    def body(mesh, case):
        shard = vp._get_tokens_on_this_cp_rank(ids, mesh.rank("cp"), cp)
        blocks = vp.cp_load_balanced_to_contiguous(shard, mesh["cp"])
        return vp.cp_shift_next(blocks, mesh["cp"], fill_value=-100).numpy(), blocks.dtype == torch.int64

    results = on_ranks(cp, body)
    assert all(same for _, same in results)
    np.testing.assert_array_equal(np.concatenate([x for x, _ in results], axis=1), [[*range(1, 4 * cp), -100]])


ODD = "tensor has 5 positions per rank along seq_dim=1; dual_chunk_swap over cp=2 needs an even number; pad s to 12"
test_shards_that_are_rejected = rejected(
    {"cp": 2},
    [
        (
            "odd",
            lambda mesh: vp.cp_load_balanced_to_contiguous(torch.zeros(1, 5), mesh["cp"]),
            f"vocab_parallel.cp_load_balanced_to_contiguous: {ODD}",
        ),
        (
            "dim",
            lambda mesh: vp.cp_shift_next(torch.zeros(1, 5), mesh["cp"], 2),
            "vocab_parallel.cp_shift_next: seq_dim=2 is outside a tensor of 2 dims",
        ),
    ],
)


NUMBER, MISFIT, REMEDY = "pass a number", "is not a value of", "pass one, or convert the tensor"
FILLS = [
    (torch.int64, None, TypeError, f"fill_value=None is None; {NUMBER}"),
    (torch.int64, "a", TypeError, f"fill_value='a' is a str; {NUMBER}"),
    (torch.float32, [1], TypeError, f"fill_value=[1] is a list; {NUMBER}"),
    (torch.float32, 1j, TypeError, f"fill_value=1j is a complex; {NUMBER}"),
    (torch.int64, True, TypeError, f"fill_value=True is a bool; {NUMBER}"),
    (torch.int64, 10**30, ValueError, f"fill_value={10**30} {MISFIT} int64; {REMEDY}"),
    (torch.int64, 1.5, ValueError, f"fill_value=1.5 {MISFIT} int64; {REMEDY}"),
    (torch.int64, float("nan"), ValueError, f"fill_value=nan {MISFIT} int64; {REMEDY}"),
    (torch.uint8, -100, ValueError, f"fill_value=-100 {MISFIT} uint8; {REMEDY}"),
    (torch.bool, 2, ValueError, f"fill_value=2 {MISFIT} bool; {REMEDY}"),
    (torch.float32, 10**400, ValueError, f"fill_value={10**400} {MISFIT} float32; {REMEDY}"),
    (torch.float16, 70000.0, ValueError, f"fill_value=70000.0 {MISFIT} float16; {REMEDY}"),
]


test_a_fill_that_does_not_fit_the_dtype_is_rejected = rejected(
    {"cp": 2},
    [
        (
            f"{dtype} {fill}",
            lambda mesh, dtype=dtype, fill=fill: vp.cp_shift_next(torch.zeros(1, 2).to(dtype), mesh["cp"], 1, fill),
            f"vocab_parallel.cp_shift_next: {message}",
            kind,
        )
        for dtype, fill, kind, message in FILLS
    ],
)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        *((torch.int64, fill) for fill in (-100, 3.0, np.int64(7))),
        *((torch.float32, fill) for fill in (10**30, float("-inf"), np.float32(0.5), -100)),
        *((torch.bool, fill) for fill in (True, 0)),
    ],
    ids=str,
)
def test_a_fill_that_fits_the_dtype(dtype, fill):
    def body(mesh, case):
        return vp.cp_shift_next(torch.zeros(1, 2).to(dtype), mesh["cp"], 1, fill).tolist()

    zero = torch.zeros((), dtype=dtype).item()
    assert on_ranks(2, body) == ([[zero, zero]], [[zero, torch.tensor(float(fill)).to(dtype).item()]])


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_an_empty_sequence(cp):
    def body(mesh, case):
        x = torch.zeros(2, 0, 3, requires_grad=True)
        y = vp.cp_load_balanced_to_contiguous(x, mesh["cp"])
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return list(y.shape), list(gradient.shape)

    assert on_ranks(cp, body) == (([2, 0, 3],) * 2,) * cp
