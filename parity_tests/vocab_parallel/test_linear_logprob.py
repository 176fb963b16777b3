"""Parity of vocab_parallel.linear_logprob."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_ref.layouts import dual_chunk_swap
from jax_ref.vocab_parallel import linear_logprob, linear_next_token_logprob, logits_of_hidden, logprob
from parity_tests.parity import parity
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.ignored_rows import IGNORED_TARGETS, SOME_IGNORED, next_is_ignored
from parity_tests.vocab_parallel.saved import NOTHING_SAVED, saved_in_inference
from parity_tests.vocab_parallel.shard import group_of_several, owned_range, wants_no_gradient
from shardproof import CaseSpec, Cost, offsets, scheme, values
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp
from torch_impl.collectives import all_gather, all_reduce
from torch_impl.vocab_parallel import linear_chunks

FLOATS = values("normal", "zeros", "normal", "ones", "normal", "iota", "ties", "tiny")
DECLARED = dict(
    draw={"hidden": FLOATS, "weight": FLOATS, "target": SOME_IGNORED},
    rank_options={"chunk_size": (None, 1, 3)},
    dtypes=("float32", "float64", "bfloat16"),
    reduction=("v", "d"),
    roundings=4,  # logits, d logits, this rank's term of d hidden, the result
)
TEMPERATURES = {"temperature": (1.0, 0.7)}
SOME = {"v": (8, 5, 13), "d": (3, 40)}  # where d is large, all logits are saved
SHIFTED = dict(
    mesh={"tp": (1, 2, 3, 4)},
    outputs="b s tp=I",
    reference=linear_logprob,
    dims=SOME,
    options=TEMPERATURES,
    nan_cotangents={"out": IGNORED_TARGETS},
    **DECLARED,
)
NEXT = dict(
    mesh={"cp": (1, 2), "tp": (1, 2, 4)},
    outputs="b u tp=I cp=R",
    reference=linear_next_token_logprob,
    dims={**SOME, "u": "s-1"},
    options=TEMPERATURES,
    nan_cotangents={"out": next_is_ignored},
    **DECLARED,
)


def replicated_cost(c, over_cp=False):
    """Forward: three numbers per token over tp, the scores over cp. Backward: d hidden over tp, cotangents over cp.

    The rank with the widest shard of the vocabulary has the largest products.
    """
    cp, size = c.mesh.get("cp", 1), c.accumulator_itemsize
    n = c.b * c.s // cp
    # Forward one product, the logits; backward three: the logits again, d hidden and d weight.
    product = 2 * n * c.d * max(c.layouts["v/tp"]["lengths"])
    return Cost(
        forward=all_gathers(over_tp(c, 3 * n), over_cp=[(1, n * size)] if over_cp and cp > 1 else []),
        backward={
            "all_reduce/tp": (1, n * c.d * size),
            **({"reduce_scatter/cp": (1, c.b * c.s * size)} if over_cp and cp > 1 else {}),
        },
        products=(product, 3 * product),
    )


def sequence_parallel_cost(c, over_cp=False):
    """As `replicated_cost`, but hidden states are gathered in both directions, and d hidden is reduce-scattered."""
    base = replicated_cost(c, over_cp)
    if c.tp == 1:
        return base
    n, (calls, size) = c.b * c.s // c.mesh.get("cp", 1) * c.d, base.forward["all_gather/tp"]
    shard = n // c.tp * c.itemsize
    back = {op: value for op, value in base.backward.items() if op != "all_reduce/tp"}
    return Cost(
        forward={**base.forward, "all_gather/tp": (calls + 1, size + shard)},
        backward={**back, "all_gather/tp": (1, shard), "reduce_scatter/tp": (1, n * c.accumulator_itemsize)},
        products=base.products,
    )


def scored(mesh, hidden, weight, target, chunk_size, temperature=1.0):
    chunk_size = chunk_size and chunk_size + mesh.rank("tp")  # each rank may have another size
    return vp.ChunkedDistributedHiddenStatesToLogprobs.apply(
        hidden, target, weight, *owned_range(mesh), chunk_size, mesh["tp"], wants_no_gradient(), temperature
    )


def next_scored(mesh, hidden, weight, target, chunk_size, tied=False, **options):
    weights = (None, weight) if tied else (weight, None)
    return vp.from_parallel_hidden_states_to_logprobs(
        hidden,
        *weights,
        False,
        target,
        *owned_range(mesh),
        mesh["tp"],
        cp_group=group_of_several(mesh, "cp"),
        chunk_size=chunk_size,
        inference_only=wants_no_gradient(),
        **options,
    )


@scheme(
    contract=vp.ChunkedDistributedHiddenStatesToLogprobs,
    inputs={"hidden": "s b d tp=I", "weight": "v/tp:ragged d", "target": "b s"},
    cost=replicated_cost,
    **SHIFTED,
)
def linear_logprobs(mesh, hidden, weight, target, temperature, chunk_size):
    return scored(mesh, hidden, weight, target, chunk_size, temperature)


@scheme(
    contract=vp.ChunkedDistributedHiddenStatesToLogprobs,
    inputs={"hidden": "s/tp b d", "weight": "v/tp:ragged d", "target": "b s"},
    cost=sequence_parallel_cost,
    **SHIFTED,
)
def linear_logprobs_of_sharded_states(mesh, hidden, weight, target, temperature, chunk_size):
    return scored(mesh, hidden, weight, target, chunk_size, temperature)


@scheme(
    contract=vp.from_parallel_hidden_states_to_logprobs,
    inputs={"hidden": "s/cp:dual_chunk_swap b d tp=I", "weight": "v/tp:ragged d cp=R", "target": "b s"},
    cost=lambda c: replicated_cost(c, over_cp=True),
    **NEXT,
)
def linear_next_tokens(mesh, hidden, weight, target, temperature, chunk_size):
    return next_scored(mesh, hidden, weight, target, chunk_size, temperature=temperature)


@scheme(
    contract=vp.from_parallel_hidden_states_to_logprobs,
    inputs={"hidden": "s/cp:dual_chunk_swap/tp b d", "weight": "v/tp:ragged d cp=R", "target": "b s"},
    cost=lambda c: sequence_parallel_cost(c, over_cp=True),
    **NEXT,
)
def linear_next_tokens_of_sharded_states(mesh, hidden, weight, target, temperature, chunk_size):
    return next_scored(mesh, hidden, weight, target, chunk_size, tied=True, temperature=temperature)


def in_its_sequence(hidden, weight, target, padded, temperature):
    """As `linear_next_token_logprob`; the last token of each sequence has no next one, and scores 0."""
    is_last = jnp.isin(jnp.arange(1, target.shape[1]), padded)
    logits = logits_of_hidden(hidden, weight)[:, :-1]
    return logprob(logits, jnp.where(is_last, -1, target[:, 1:]), temperature)


PACKED = dict(
    contract=vp.from_parallel_hidden_states_to_logprobs,
    **{**NEXT, "reference": in_its_sequence, "outputs": "b u tp=I cp=R"},
)
PACKED |= {"dims": {**SOME, "b": (1,), "t": (16, 24), "n": (4, 3), "u": "t-1"}}
PACKED |= {"draw": {**DECLARED["draw"], "padded": offsets("t", padded=True)}}


@scheme(
    inputs={"hidden": "t/cp:packed b d tp=I", "weight": "v/tp:ragged d cp=R", "target": "b t", "padded": "n"}, **PACKED
)
def linear_next_tokens_of_a_stream(mesh, hidden, weight, target, padded, temperature, chunk_size):
    options = {"cu_seqlens_padded": padded, "temperature": temperature}
    return next_scored(mesh, hidden, weight, target, chunk_size, **options)


def gradients_of_hidden(hidden, weight, target, g):
    return jax.vjp(lambda h, w: linear_logprob(h, w, target), hidden, weight)[1](g)


@scheme(
    reference=gradients_of_hidden,
    mesh={"tp": (1, 2, 4)},
    inputs={"hidden": "s b d tp=I", "weight": "v/tp:ragged d", "target": "b s", "g": "b s tp=I"},
    outputs=("s b d tp=I", "v/tp:ragged d"),
    dims=SOME,
    nograd=("hidden", "weight", "g"),
    **{
        **DECLARED,
        "draw": {**DECLARED["draw"], "g": FLOATS},
        "dtypes": ("float32",),
        "reduction": ("v", "d", "b", "s"),
    },
)
def gradients_under_autocast(mesh, hidden, weight, target, g, chunk_size):
    """Backward runs under autocast too, where logits that were not saved are computed again."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(hidden.device.type, dtype=torch.bfloat16):
        h, w = (x.detach().clone().requires_grad_() for x in (hidden, weight))
        y = scored(mesh, h, w, target, chunk_size)
        return torch.autograd.grad(y, (h, w), g.detach().clone().to(y.dtype))


SCHEMES = (
    linear_logprobs,
    linear_logprobs_of_sharded_states,
    linear_next_tokens,
    linear_next_tokens_of_sharded_states,
    linear_next_tokens_of_a_stream,
    gradients_under_autocast,
)
test_parity = parity(SCHEMES, lockstep=20, gloo=4)


D, V, S = 5, 6, 8
HIDDEN = torch.linspace(-2, 3, S * 2 * D, dtype=torch.float64).sin().view(S, 2, D)
WEIGHT = torch.linspace(-3, 2, V * D, dtype=torch.float64).cos().view(V, D) * 2
IDS = (torch.arange(2 * S) * 5 % V).view(2, S)


def on_mesh(body, **mesh):
    return run(body, CaseSpec(scheme="vocab_parallel", mesh=mesh)).results


def local_leaves(mesh, hidden=HIDDEN, cut=False, layout=None):
    """This rank's hidden states, and its rows of the weight, as leaves."""
    cp, tp, r = mesh.size("cp"), mesh.size("tp"), mesh.rank("tp")
    positions = dual_chunk_swap(len(hidden), cp)[mesh.rank("cp")] if layout is None else layout
    states = hidden[positions]
    shard = states.chunk(tp)[r] if cut else states
    return shard.clone().requires_grad_(), WEIGHT.chunk(tp)[r].clone().requires_grad_()


def local_next_scores(mesh, hidden, weight, target=IDS, **options):
    start, rows = mesh.rank("tp") * len(weight), len(weight)
    return vp.from_parallel_hidden_states_to_logprobs(
        hidden, weight, None, False, target, start, start + rows, mesh["tp"], cp_group=mesh["cp"], **options
    )


def rounded(*tensors):
    return [x.detach().float().numpy() for x in tensors]


def test_scores_are_contiguous():
    def body(mesh, case):
        hidden, weight = local_leaves(mesh)
        start = mesh.rank("tp") * len(weight)
        function = vp.ChunkedDistributedHiddenStatesToLogprobs
        return function.apply(hidden, IDS, weight, start, start + len(weight), None, mesh["tp"]).is_contiguous()

    assert all(on_mesh(body, cp=1, tp=2))


def test_a_product_in_pieces_is_the_product(monkeypatch):
    """Integers, so that nothing is rounded; pieces have two rows, the last piece has one."""
    monkeypatch.setattr(linear_chunks, "_limit", lambda device: 2 * 4 * 3)
    d_logits, rows = torch.arange(20.0).view(4, 5).bfloat16(), torch.arange(12.0).view(4, 3).bfloat16()
    total = torch.full((5, 3), 7.0)
    linear_chunks._add_product(total, d_logits, rows, is_first=True)
    product = d_logits.double().T @ rows.double()
    assert torch.equal(total.double(), product.bfloat16().double())
    linear_chunks._add_product(total, d_logits, rows, is_first=False)
    assert torch.equal(total.double(), 2 * product.bfloat16().double())


def test_scores_and_gradients_equal_those_from_full_logits():
    """Replicated and sharded hidden states are compared; gradients are summed or gathered over the ranks first."""

    def body(mesh, case):
        results = []
        for cut in (False, True):
            hidden, weight = local_leaves(mesh, cut=cut)
            y = local_next_scores(mesh, hidden, weight)
            y.sum().backward()
            d_hidden = all_gather(hidden.grad, mesh["tp"], out="I") if cut else hidden.grad
            results.append(rounded(y, d_hidden, weight.grad))
        full, weight = local_leaves(mesh)
        logits = torch.einsum("sbd,vd->bsv", full, weight)
        start = mesh.rank("tp") * len(weight)
        y = vp.from_parallel_logits_to_logprobs(
            logits, IDS, start, start + len(weight), mesh["tp"], cp_group=mesh["cp"]
        )
        y.sum().backward()
        return *results, rounded(y, all_reduce(full.grad, mesh["tp"]), weight.grad)

    for replicated, cut, expected in on_mesh(body, cp=2, tp=2):
        for a, b, c in zip(replicated, cut, expected, strict=True):
            np.testing.assert_array_equal(a, c)
            np.testing.assert_array_equal(b, c)


@pytest.mark.parametrize("cut", [False, True])
def test_packed_is_sequence_by_sequence(cut):
    """Expected are scores of each sequence alone on one rank, and 0 at its end. Padding rows must have no gradient."""
    lengths, stream, ids = [8, 0, 12], torch.cat([HIDDEN, HIDDEN.flip(0), HIDDEN])[:, :1], torch.arange(24)[None] % V
    offsets = torch.tensor([0, 8, 8, 20])

    def body(mesh, case):
        positions = torch.cat([torch.tensor(x) for x in cut_positions([*lengths, 4], mesh)])
        hidden, weight = local_leaves(mesh, stream, cut, positions)
        y = local_next_scores(mesh, hidden, weight, ids, cu_seqlens_padded=offsets, chunk_size=3)
        y.sum().backward()
        return y.detach().numpy(), all_gather(hidden.grad, mesh["tp"], out="I").numpy()[10:12] if cut else None

    def cut_positions(sizes, mesh):
        starts = np.cumsum([0, *sizes])
        return [start + dual_chunk_swap(n, 2)[mesh.rank("cp")] for start, n in zip(starts, sizes, strict=False)]

    expected = np.zeros((1, 23))
    for start, length in zip(offsets.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        logits = torch.einsum("sbd,vd->bsv", stream[part], WEIGHT)
        expected[:, start : start + max(length - 1, 0)] = vp.get_next_token_logprobs_from_logits(ids[:, part], logits)
    for y, padding in on_mesh(body, cp=2, tp=2):
        np.testing.assert_array_equal(np.float32(y), np.float32(expected))
        assert padding is None or not padding.any()


def test_autocast_changes_nothing():
    def body(mesh, case):
        hidden, weight = (x.detach().float().requires_grad_() for x in local_leaves(mesh))
        plain = local_next_scores(mesh, hidden, weight)
        gradients = torch.autograd.grad(plain.sum(), [hidden, weight])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = local_next_scores(mesh, hidden, weight)
            again = torch.autograd.grad(y.sum(), [hidden, weight])
        return [torch.equal(a, b) for a, b in zip((plain, *gradients), (y, *again), strict=True)]

    assert on_mesh(body, cp=1, tp=2) == ([True] * 3,) * 2


def test_strides_and_empty_streams():
    def body(mesh, case):
        hidden, weight = local_leaves(mesh)
        transposed = hidden.detach().transpose(0, 1).contiguous().transpose(0, 1)
        same = torch.equal(local_next_scores(mesh, transposed, weight), local_next_scores(mesh, hidden, weight))
        empty = local_next_scores(mesh, hidden[:0], weight, IDS[:, :0])
        empty.sum().backward()
        return same, tuple(empty.shape), weight.grad.abs().sum().item()

    assert on_mesh(body, cp=1, tp=2) == ((True, (2, 0), 0.0),) * 2


def test_gradcheck():
    def body(mesh, case):
        hidden, weight = local_leaves(mesh)
        return torch.autograd.gradcheck(lambda h, w: local_next_scores(mesh, h, w, chunk_size=3), (hidden, weight))

    assert on_mesh(body, cp=1, tp=1) == (True,)


def test_inference_saves_nothing_for_backward():
    def body(mesh, case):
        return saved_in_inference(lambda: local_next_scores(mesh, *local_leaves(mesh), inference_only=True))

    assert on_mesh(body, cp=1, tp=2) == (NOTHING_SAVED,) * 2
