"""Parity of mamba.delta_rule."""

from itertools import pairwise

import jax.numpy as jnp
import pytest
import torch

from jax_ref.mamba import gated_delta_rule as reference
from parity_tests.mamba.over_ranks import layout_of, offsets_of, on_ranks, rank_positions
from parity_tests.mamba.uneven import COUNTS, TOKENS, uneven, uneven_layout
from parity_tests.rejections import check_rejection
from shardproof import Cost, offsets, scheme, values
from torch_impl.collectives import accumulator
from torch_impl.mamba import gated_delta_rule


def rows(query, key, value, g, beta, initial_state, scale=None, has_initial=True):
    """The reference without normalized keys. Keys are drawn short: a beta above 2 / |k|^2 would let the state grow."""
    states = initial_state / 3 if has_initial else jnp.zeros_like(initial_state)
    return reference(query, key, value, -jnp.exp(g), beta, states, scale=scale)


def normalized_rows(query, key, value, g, beta, initial_state, scale=None):
    return reference(query, key, value, -jnp.exp(g), beta, initial_state / 3, scale=scale, use_qk_l2norm=True)


def stream(query, key, value, g, beta, initial_state, cu):
    return reference(query, key, value, -jnp.exp(g), beta, initial_state / 3, cu, use_qk_l2norm=True)


def over_cp(mesh, query, key, value, g, beta, initial_state, **options):
    """The outputs and final states, for decays and initial states that the dtype of the values cannot hold.

    A decay is the exponential of a drawn value, and a state is a third of a drawn value, in float32 or wider.
    """
    wide = accumulator(g.dtype)
    g, states = -g.to(wide).exp(), None if initial_state is None else initial_state.to(wide) / 3
    return gated_delta_rule(
        query, key, value, g, beta, mesh["cp"], initial_state=states, output_final_state=True, **options
    )


def inputs(cut, batch="b", states="b", decay=""):
    return {
        "query": f"{batch} {cut} hk/tp k",
        "key": f"{batch} {cut} hk/tp k",
        "value": f"{batch} {cut} h/tp v",
        "g": f"{batch} {cut} h/tp{decay}",
        "beta": f"{batch} {cut} h/tp",
        "initial_state": f"{states} h/tp k v cp=R",
    }


def outputs(cut, batch="b", states="b"):
    return f"{batch} {cut} h/tp v", f"{states} h/tp k v cp=I"


def cost(segments, states=lambda c: c.b):
    """One message with a state and a transition per segment, and the cotangents of the states back."""

    def declared(c):
        wide, heads = max(c.itemsize, 4), c.h // c.tp
        final = {"all_reduce/cp": (1, states(c) * heads * c.k * c.v * wide)}
        if c.cp == 1:
            return Cost(forward=final)
        sent = segments(c) * c.dims.get("b", 1) * heads * c.k * wide
        forward = {"all_gather/cp": (1, sent * (c.k + c.v)), **final}
        return Cost(forward=forward, backward={"all_gather/cp": (1, sent * c.v)})

    return declared


DRAW = {
    **dict.fromkeys(("query", "key"), values("normal", "ties", "zeros")),
    **dict.fromkeys(("value", "initial_state"), values("normal", "ties")),
    "g": values("normal", "zeros"),
    "beta": values("uniform"),
}
SIZES = {"hk": (2,), "h": ("2*hk", "hk"), "k": (3,), "v": (2,), "t": (24,)}
SCALES = {"scale": (None, 0.0, 0.5)}  # for queries with and without normalization
DECLARED = dict(
    contract=gated_delta_rule,
    mesh={"cp": (1, 2, 3, 4), "tp": (1, 2)},
    rank_options={"chunk_size": (64, 1, 3, 4)},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("t", "k"),
    sums="float32",
    wide=("out[1]",),
    wider_inputs=("beta",),
    roundings=48,  # the inverse of a chunk corrects a row by up to 24 rows before it, and backward does so again
)


@scheme(
    reference=rows,
    inputs=inputs("t/cp:dual_chunk_swap"),
    outputs=outputs("t/cp:dual_chunk_swap"),
    dims={**SIZES, "h": "2*hk", "b": (2,)},
    draw={**DRAW, "key": values("uniform")},
    options={**SCALES, "has_initial": (True, False)},
    cost=cost(lambda c: 2),
    **DECLARED,
)
@pytest.mark.cases(9)
def delta_rule(mesh, query, key, value, g, beta, initial_state, scale, has_initial, chunk_size):
    states = initial_state if has_initial else None
    return over_cp(mesh, query, key, value, g, beta, states, scale=scale, chunk_size=chunk_size)


@scheme(
    reference=normalized_rows,
    inputs=inputs("t/cp"),
    outputs=outputs("t/cp"),
    dims={**SIZES, "h": "hk", "b": (2,), "t": (12,)},
    draw=DRAW,
    options=SCALES,
    cost=cost(lambda c: 1),
    **DECLARED,
)
@pytest.mark.cases(9)
def delta_rule_contiguous(mesh, query, key, value, g, beta, initial_state, scale, chunk_size):
    options = {"layout": "contiguous", "use_qk_l2norm": True, "scale": scale, "chunk_size": chunk_size}
    return over_cp(mesh, query, key, value, g, beta, initial_state, **options)


@scheme(
    reference=stream,
    inputs={**inputs("t/cp:packed", "1", "n"), "cu": "q"},
    outputs=outputs("t/cp:packed", "1", "n"),
    dims={**SIZES, "h": "2*hk", "q": (4,), "n": "q-1"},
    draw={**DRAW, "cu": offsets("t", padded=True)},
    cost=cost(lambda c: 2 * c.n, lambda c: c.n),
    **DECLARED,
)
@pytest.mark.cases(9)
@pytest.mark.cases(1, engine="gloo")
def delta_rule_packed(mesh, query, key, value, g, beta, initial_state, cu, chunk_size):
    options = {"cu_seqlens": cu, "use_qk_l2norm": True, "chunk_size": chunk_size}
    return over_cp(mesh, query, key, value, g, beta, initial_state, **options)


@scheme(
    reference=stream,
    inputs={**inputs("t/cp", "1", "n"), "cu": "q"},
    outputs=outputs("t/cp", "1", "n"),
    dims={**SIZES, "h": "2*hk", "q": (7,), "n": "q-1"},  # so many that some are empty at a border of ranks
    draw={**DRAW, "cu": offsets("t", padded=True)},
    cost=cost(lambda c: 1, lambda c: c.n),
    **DECLARED,
)
@pytest.mark.cases(9)
@pytest.mark.cases(1, engine="gloo")
def delta_rule_stream(mesh, query, key, value, g, beta, initial_state, cu, chunk_size):
    options = {"layout": "contiguous", "cu_seqlens": cu, "use_qk_l2norm": True, "chunk_size": chunk_size}
    return over_cp(mesh, query, key, value, g, beta, initial_state, **options)


@scheme(
    reference=normalized_rows,
    inputs=inputs("t/cp:uneven"),
    outputs=outputs("t/cp:uneven"),
    layouts={"uneven": uneven},
    dims={**SIZES, "h": "hk", "b": (2,), "t": (TOKENS,)},
    draw=DRAW,
    cost=cost(lambda c: 1),
    **DECLARED,
)
@pytest.mark.cases(9)
@pytest.mark.cases(1, engine="gloo")
def delta_rule_ragged(mesh, query, key, value, g, beta, initial_state, chunk_size):
    """Some ranks have fewer tokens than a chunk, or none."""
    options = {"layout": uneven_layout(mesh), "use_qk_l2norm": True, "chunk_size": chunk_size}
    return over_cp(mesh, query, key, value, g, beta, initial_state, **options)


@scheme(
    reference=normalized_rows,
    inputs=inputs("t/cp:dual_chunk_swap", decay=" k"),
    outputs=outputs("t/cp:dual_chunk_swap"),
    dims={**SIZES, "h": "hk", "b": (2,)},
    draw=DRAW,
    cost=cost(lambda c: 2),
    **DECLARED,
)
@pytest.mark.cases(6)
def delta_rule_per_channel(mesh, query, key, value, g, beta, initial_state, chunk_size):
    return over_cp(mesh, query, key, value, g, beta, initial_state, use_qk_l2norm=True, chunk_size=chunk_size)


def states_that_stay(value, initial_state, has_initial):
    return initial_state / 3 if has_initial else 0 * initial_state


@scheme(
    reference=states_that_stay,
    mesh={"cp": (1, 2, 4), "tp": (1, 2)},
    inputs={"value": "b t/cp h/tp v", "initial_state": "b h/tp k v cp=R"},
    outputs="b h/tp k v cp=I",
    draw={"value": values("normal"), "initial_state": values("normal", "ties")},
    options={"has_initial": (True, False)},
    rank_options={"layout": ("dual_chunk_swap", "contiguous")},
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    wide=True,
)
@pytest.mark.cases(9)
def delta_rule_without_tokens(mesh, value, initial_state, has_initial, layout):
    """Every sequence is empty and keeps its state, in float32 or wider; only the sizes of `value` are used."""
    empty, wide = value[:, :0], accumulator(value.dtype)
    keys, steps = empty.new_zeros(*empty.shape[:3], initial_state.shape[2]), empty[..., 0]
    states = initial_state.to(wide) / 3 if has_initial else None
    options = {"layout": layout, "initial_state": states, "output_final_state": True}
    out, final = gated_delta_rule(keys, keys, empty, steps.to(wide), steps, mesh["cp"], **options)
    assert out.shape == empty.shape and final.dtype == wide
    return final if has_initial else final + 0 * initial_state


# Properties and errors, on tensors of one batch.

HEADS, T = 2, 24
QUERY, KEY, VALUE = (
    torch.linspace(-1, k, T * HEADS * 3, dtype=torch.float64).sin().view(1, T, HEADS, 3) for k in (2, 3, 4)
)
G, BETA = -torch.linspace(0, 1, T * HEADS, dtype=torch.float64).view(1, T, HEADS), QUERY[..., 0].square()
STATE = torch.ones(1, HEADS, 3, 3, dtype=torch.float64)
TENSORS = (QUERY, KEY, VALUE, G, BETA)
CUTS = [
    ("dual_chunk_swap", None),
    ("contiguous", None),
    ("dual_chunk_swap", [0, 8, 8, 24]),
    ("contiguous", [0, 5, 6, 12, 24]),
]


def results(mesh, query=QUERY, key=KEY, value=VALUE, g=G, beta=BETA, **options):
    options = {"use_qk_l2norm": True, "chunk_size": 4, **options}
    return gated_delta_rule(query, key, value, g, beta, mesh["cp"], **options)


@pytest.mark.parametrize(("order", "cu"), CUTS)
def test_a_token_changes_only_later_tokens_of_its_sequence(order, cu):
    sequence = torch.searchsorted(torch.tensor([*(cu or [0, T])][1:]), torch.arange(T), right=True)

    def body(mesh, case):
        held, moved = torch.tensor(rank_positions(2, order, cu)[mesh.rank("cp")]), []
        options = {"layout": order, "cu_seqlens": offsets_of(cu)}
        out, _ = results(mesh, *(x[:, held] for x in TENSORS), **options)
        for t in range(T):
            value = VALUE.clone()
            value[:, t] += 1
            other, _ = results(mesh, QUERY[:, held], KEY[:, held], value[:, held], G[:, held], BETA[:, held], **options)
            moved.append((other != out)[0].any(-1).any(-1).tolist())
        return held, moved

    for held, moved in on_ranks(body).results:
        assert moved == [[bool(u >= t and sequence[u] == sequence[t]) for u in held] for t in range(T)]


def test_a_sequence_in_two_calls_is_one_sequence():
    def body(mesh, case):
        whole, last = results(mesh, output_final_state=True, layout="contiguous")
        state, parts = None, []
        for start, stop in pairwise([0, 8, 24]):
            part = (x[:, start:stop] for x in TENSORS)
            out, state = results(mesh, *part, initial_state=state, output_final_state=True, layout="contiguous")
            parts.append(out)
        return whole, torch.cat(parts, 1), last, state

    ((whole, parts, last, state),) = on_ranks(body, 1).results
    # Chunks of four tokens begin at the same places in both, so that no rounding differs.
    assert torch.equal(whole, parts) and torch.equal(last, state)


def test_ranks_without_any_token_keep_the_state_and_its_gradient():
    def body(mesh, case):
        initial = STATE.clone().requires_grad_()
        out, state = results(mesh, *(x[:, :0] for x in TENSORS), initial_state=initial, output_final_state=True)
        _, zero = results(mesh, *(x[:, :0] for x in TENSORS), output_final_state=True)
        state.backward(STATE)
        return out.shape, torch.equal(state, STATE), torch.equal(zero, 0 * STATE), initial.grad

    ranks = on_ranks(body)
    assert [result[:3] for result in ranks.results] == [(VALUE[:, :0].shape, True, True)] * 2
    # Each rank has a term of the gradient; the terms of both ranks add up to the cotangent.
    assert torch.equal(sum(result[3] for result in ranks.results), STATE)
    assert [row.op for row in ranks.ledger.rows] == ["all_reduce"] * 2


@pytest.mark.parametrize("border", [0, 12, 24])
def test_an_empty_sequence_at_a_border_of_ranks_keeps_its_state(border):
    states, cu = STATE * torch.arange(1, 4).view(3, 1, 1, 1), torch.tensor(sorted([0, border, border, T]))

    def body(mesh, case):
        held = (x.chunk(2, 1)[mesh.rank("cp")] for x in TENSORS)
        options = {"cu_seqlens": cu, "initial_state": states, "output_final_state": True}
        _, final = results(mesh, *held, layout="contiguous", **options)
        return [torch.equal(final[i], states[i]) for i in (cu.diff() == 0).nonzero()]

    assert all(all(kept) and kept for kept in on_ranks(body).results)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_backward_does_not_hang_if_only_one_rank_has_a_loss(cp):
    def body(mesh, case):
        held = torch.tensor(rank_positions(cp, "dual_chunk_swap", None)[mesh.rank("cp")])
        value = VALUE[:, held].requires_grad_()
        out, _ = results(mesh, QUERY[:, held], KEY[:, held], value, G[:, held], BETA[:, held])
        (gradient,) = torch.autograd.grad(out, value, torch.full_like(out, float(mesh.rank("cp") == 0)))
        return bool(gradient.any())

    # Rank 0 has the end of the sequence, which reads the values of all ranks.
    assert on_ranks(body, cp).results == (True,) * cp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(dtype):
    def body(mesh, case):
        tensors = [x.to(dtype) for x in (QUERY, KEY, VALUE)] + [G.float(), BETA.float()]
        out, state = results(mesh, *tensors, output_final_state=True)
        with torch.autocast("cpu", torch.bfloat16):
            again, as_well = results(mesh, *tensors, output_final_state=True)
        return out.dtype, state.dtype, torch.equal(out, again), torch.equal(state, as_well)

    assert on_ranks(body).results == ((dtype, torch.float32, True, True),) * 2


def test_long_decays_are_neither_lost_nor_undefined():
    """Decays by a thousand nepers each: every token reads its own value alone."""

    def body(mesh, case):
        one = torch.ones(1, 100, 1, 1, requires_grad=True)
        out, _ = gated_delta_rule(one, one, one, -1000 * one[..., 0], one[..., 0], mesh["cp"], chunk_size=16)
        out.sum().backward()
        assert one.grad is not None
        return bool((out == 1).all()), bool(torch.isfinite(one.grad).all())

    assert on_ranks(body).results == ((True, True),) * 2


HALF = QUERY[:, :12]
REJECTED = [
    (lambda m: results(m, chunk_size=0), "chunk_size=0 must be at least 1"),
    (
        lambda m: results(m, key=KEY[:, :6]),
        "key is [1, 6, 2, 3] but query has s/cp:LAYOUT=24: s/cp:LAYOUT differs, 6 and 24",
    ),
    (
        lambda m: results(m, QUERY[:, :, :0], KEY[:, :, :0]),
        "value has 2 heads; they must be a positive multiple of key's 0",
    ),
    (
        lambda m: results(m, value=VALUE[:, :, :0], g=G[:, :, :0], beta=BETA[:, :, :0]),
        "value has 0 heads; they must be a positive multiple of key's 2",
    ),
    (lambda m: results(m, scale=float("nan")), "scale=nan must be finite"),
    (
        lambda m: results(m, cu_seqlens=torch.tensor([[0, 48]])),
        "cu_seqlens: shape is (1, 2); offsets are one row that starts at 0",
    ),
    (
        lambda m: results(m, g=G[..., None].expand(1, T, HEADS, 2)),
        "g is [1, 24, 2, 2]; pass one decay per head, or one per channel, [b, s, h, 3]",
    ),
    (
        lambda m: results(m, initial_state=STATE.expand(2, -1, -1, -1)),
        "initial_state has 2 states; pass one for each of 1 sequences",
    ),
    (
        lambda m: results(m, cu_seqlens=torch.tensor([0, 24, 48]), initial_state=STATE),
        "initial_state has 1 states; pass one for each of 2 sequences",
    ),
    (
        lambda m: results(m, *(x.expand(2, *x.shape[1:]) for x in TENSORS), cu_seqlens=torch.tensor([0, 48])),
        "query is [2, 24, 2, 3] with cu_seqlens; a packed stream is one row, [1, t, ...]",
    ),
    (lambda m: results(m, layout="striped"), "layout='striped' is not contiguous, dual_chunk_swap or a TokenLayout"),
    (
        lambda m: results(m, layout=layout_of(m, "striped", 48, None)),
        "layout='striped' shards sequences into more than two runs a rank; use contiguous or dual_chunk_swap",
    ),
    (lambda m: results(m, layout=layout_of(m, "contiguous", 24, None)), "layout has 24 tokens, the ranks have 48"),
    (
        lambda m: results(m, layout=uneven_layout(m)),
        "layout gives rank {rank} {count} tokens, but query has 24; pass the layout of this batch",
    ),
    (
        lambda m: results(m, layout=layout_of(m, "contiguous", 48, None).rebind(3, m.rank("cp"))),
        "layout is for cp=3 and rank {rank}, cp_group has cp=2 and rank {rank}; rebind it",
    ),
]


@pytest.mark.parametrize(("call", "text"), REJECTED, ids=[text[:40] for _, text in REJECTED])
def test_rejection(call, text):
    texts = (text.format(rank=rank, count=COUNTS[2][rank]) for rank in range(2))
    check_rejection({"cp": 2}, "delta rule", call, tuple(f"mamba.gated_delta_rule: {text}" for text in texts))


def test_offsets_of_one_rank_are_rejected():
    def body(mesh, case):
        with pytest.raises(ValueError, match="cu_seqlens ends at 24 but the stream holds 48 tokens"):
            results(mesh, cu_seqlens=torch.tensor([0, 24]))

    assert on_ranks(body).ledger.rows == []
