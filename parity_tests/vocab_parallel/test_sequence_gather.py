"""Parity of vocab_parallel.sequence_gather."""

import numpy as np
import pytest
import torch

from jax_ref.vocab_parallel import sequence
from parity_tests.rejections import rejected
from shardproof import CaseSpec, Cost, check_cases, scheme
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp

WIDE_OUTPUTS = False
RANKS = {"cp": (1, 2, 3, 4)}
DTYPES = ("float32", "bfloat16", "float64", "float16")
SEQ_DIMS = {"seq_dim": (1, -2, 0, 2, -1, -3)}


def gather_cost(case):
    """One all_gather of the shard; backward one reduce_scatter of the whole."""
    elements = case.b * case.s * case.d
    return Cost(
        forward={"all_gather": (1, elements // case.cp * case.itemsize)},
        backward={"reduce_scatter": (1, elements * case.accumulator_itemsize)},
    )


@scheme(
    reference=sequence,
    mesh=RANKS,
    contract=vp.allgather_cp_sharded_tensor,
    inputs={"x": "b s/cp:dual_chunk_swap d"},
    outputs="b s d cp=R",
    rank_options={**SEQ_DIMS, "applies": (False, True)},
    dtypes=DTYPES,
    sums="float32",
    cost=gather_cost,
)
def gathered_sequence(mesh, x, seq_dim, applies):
    gathered = vp.AllGatherCPTensor.apply if applies else vp.allgather_cp_sharded_tensor
    dim = () if seq_dim == 1 and not applies else (seq_dim,)  # which is the default
    return gathered(x.movedim(1, seq_dim), mesh["cp"], *dim).movedim(seq_dim, 1)


@scheme(
    reference=sequence,
    mesh=RANKS,
    contract=vp._get_tokens_on_this_cp_rank,
    inputs={"x": "b s d cp=R"},
    outputs="b s/cp:dual_chunk_swap d",
    rank_options=SEQ_DIMS,
    dtypes=DTYPES,
    cost=lambda case: Cost(),
    excluded_conditions=("overwritten",),  # over one rank it is x itself, as its page says
)
def sharded_sequence(mesh, x, seq_dim):
    moved = x.movedim(1, seq_dim)
    return vp._get_tokens_on_this_cp_rank(moved, mesh.rank("cp"), mesh.size("cp"), seq_dim).movedim(seq_dim, 1)


@pytest.mark.parametrize("declared", [gathered_sequence, sharded_sequence], ids=lambda declared: declared.name)
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_parity(declared, engine):
    check_cases(declared, 20 if engine == "lockstep" else 6, engine=engine)


def on_ranks(cp, body):
    return run(body, CaseSpec(scheme="vocab_parallel", mesh={"cp": cp})).results


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_shards_are_a_partition_and_gather_to_the_full_sequence(cp, dtype):
    tokens = torch.arange(2 * 12 * cp).view(2, -1).to(dtype)

    def body(mesh, case):
        piece = vp._get_tokens_on_this_cp_rank(tokens, mesh.rank("cp"), cp)
        again = vp.allgather_cp_sharded_tensor(piece, mesh["cp"])
        return piece.numpy(), again.numpy(), again.dtype == dtype

    results = on_ranks(cp, body)
    for _, again, same_dtype in results:
        np.testing.assert_array_equal(again, tokens.numpy())
        assert same_dtype
    together = np.concatenate([piece for piece, _, _ in results], axis=1)
    np.testing.assert_array_equal(np.sort(together, axis=1), np.sort(tokens.numpy(), axis=1))


def test_one_rank_holds_any_length_and_the_same_object():
    x = torch.arange(5.0)[None]
    assert vp._get_tokens_on_this_cp_rank(x, 0, 1) is x

    def body(mesh, case):
        leaf = x.clone().requires_grad_()
        y = vp.allgather_cp_sharded_tensor(leaf, mesh["cp"])
        y.backward(2 * x)
        return y.tolist(), leaf.grad.tolist()

    assert on_ranks(1, body) == ((x.tolist(), (2 * x).tolist()),)


def test_an_expanded_cotangent_is_summed_and_left_alone():
    def body(mesh, case):
        leaf = torch.zeros(1, 4, 2, requires_grad=True)
        y = vp.AllGatherCPTensor.apply(leaf, mesh["cp"])
        ones = torch.ones(()).expand_as(y)
        y.backward(ones, retain_graph=True)
        y.sum().backward()
        return leaf.grad.tolist(), ones.tolist(), ones.stride()

    four = np.full((1, 4, 2), 4.0).tolist()
    assert on_ranks(2, body) == ((four, np.ones((1, 8, 2)).tolist(), (0, 0, 0)),) * 2


@pytest.mark.parametrize("seq_dim", range(-3, 3))
def test_gather_and_scattered_sum_are_adjoint(seq_dim):
    """<A x, y> = <x, A^T y>, both sums over all ranks, in integers, where they are exact."""

    def body(mesh, case):
        rng = np.random.Generator(np.random.Philox(key=[seq_dim + 3, mesh.rank("cp")]))
        x = torch.from_numpy(rng.integers(-9, 9, (4, 4, 4)).astype(float)).requires_grad_()
        gathered = vp.allgather_cp_sharded_tensor(x, mesh["cp"], seq_dim)
        y = torch.from_numpy(rng.integers(-9, 9, gathered.shape).astype(float))
        (back,) = torch.autograd.grad(gathered, x, y)
        return (gathered * y).sum().item(), (x * back).sum().item()

    forward, backward = zip(*on_ranks(2, body), strict=True)
    assert sum(forward) == sum(backward)


CUT, GATHER = "vocab_parallel._get_tokens_on_this_cp_rank", "vocab_parallel.allgather_cp_sharded_tensor"
FUNCTION = "vocab_parallel.AllGatherCPTensor"
GROUP = "pass a ProcessGroup (a group of size 1 for no context parallelism)"
REJECTED = [
    (
        lambda g: vp._get_tokens_on_this_cp_rank(torch.zeros(1, 9), g.rank(), 2),
        ValueError,
        f"{CUT}: s=9 cannot be sharded by dual_chunk_swap over cp=2 (needs a multiple of 4); pad to 12",
    ),
    (
        lambda g: vp._get_tokens_on_this_cp_rank(torch.zeros(1, 8), 4, 4),
        ValueError,
        f"{CUT}: cp_rank=4 is outside cp_size=4",
    ),
    (
        lambda g: vp._get_tokens_on_this_cp_rank(torch.zeros(8), 0, 2),
        ValueError,
        f"{CUT}: seq_dim=1 is outside a tensor of 1 dims",
    ),
    (
        lambda g: vp.allgather_cp_sharded_tensor(torch.zeros(1, 5), g),
        ValueError,
        f"{GATHER}: tensor has 5 positions per rank along seq_dim=1; "
        "dual_chunk_swap over cp=2 needs an even number; pad s to 12",
    ),
    (
        lambda g: vp.allgather_cp_sharded_tensor(torch.zeros(4), g, -2),
        ValueError,
        f"{GATHER}: seq_dim=-2 is outside a tensor of 1 dims",
    ),
    (
        lambda g: vp.allgather_cp_sharded_tensor(torch.zeros(1, 4), None),
        TypeError,
        f"{GATHER}: cp_group is None; {GROUP}",
    ),
    (lambda g: vp.AllGatherCPTensor.apply(torch.zeros(1, 4), 2), TypeError, f"{FUNCTION}: cp_group is an int; {GROUP}"),
]


test_rejection = rejected(
    {"cp": 2}, [(text[15:70], lambda mesh, call=call: call(mesh["cp"]), text, kind) for call, kind, text in REJECTED]
)
