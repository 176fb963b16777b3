"""Parity of mamba.state_passing."""

import pytest
import torch
from hypothesis import given, settings
from torch.func import functional_call

from jax_ref.layouts import BUILTIN as dense_layouts
from jax_ref.layouts import packed as packed_layout
from parity_tests import CaseSpec, Cost, check, every_case, offsets, scheme, values
from parity_tests.harness.engines.run import run
from parity_tests.mamba.by_name import flat, flax_mixer
from parity_tests.mamba.made import CU, GIVEN, PROJECTED, T, W, filled, passing
from parity_tests.mamba.operations import Operations
from parity_tests.mamba.parameters import DRAW, SPECS, settings_of, sizes_of
from torch_impl.mamba import Mamba2Mixer, MambaStatePassing, mamba_cp_bytes

# 3 heads and 1 group, which two and four ranks cannot share, and 6 and 2, which two can; segments shorter than the
# convolution's reach.
SIZES = {"r": (3,), "g": (1, 2), "h": "g*r", "p": (2,), "n": (2,), "d": (2,), "k": (6,)}
FOLLOW = {"i": "h*p", "c": "h*p+2*g*n", "w": "2*h*p+2*g*n+h"}


def cost(segments):
    def declared(c):
        wide, count = max(c.itemsize, 4), segments(c) * c.dims.get("b", 1)
        halo, states = count * (c.k - 1) * c.c, count * c.h * (c.p * c.n + 1)
        return Cost(
            forward={"all_gather": (2, halo * c.itemsize + states * wide)},
            backward={"reduce_scatter": (2, c.cp * (halo + states) * wide)},
        )

    return declared


DECLARED = dict(
    mesh={"cp": (1, 2, 3, 4)},
    draw={**DRAW, "u": values("normal", "ties")},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("t", "i"),
    roundings=9,  # those of the mixer and of what enters; a term of each rank in the gradients
)


def dense(u, parameters, groups):
    return flax_mixer(parameters, **settings_of(parameters, groups))(u)


def packed(u, parameters, groups, cu):
    return flax_mixer(parameters, **settings_of(parameters, groups))(u, cu)


def parallel(mesh, u, parameters, groups, cu=None, **chosen):
    def strategy(mixer):
        return MambaStatePassing(mesh["cp"], **sizes_of(parameters, groups), mixer=mixer, **chosen)

    module = Mamba2Mixer(
        **settings_of(parameters, groups), chunk_size=4, context_parallel=strategy, device="meta", dtype=u.dtype
    )
    return functional_call(module, flat(parameters), (u, cu), strict=True)


@scheme(
    reference=dense,
    inputs={"u": "b t/cp:dual_chunk_swap d", "parameters": SPECS, "groups": "g"},
    outputs="b t/cp:dual_chunk_swap d",
    dims={**SIZES, **FOLLOW, "b": (2,), "t": (24,)},
    cost=cost(lambda c: 2),
    **DECLARED,
)
def state_passing(mesh, u, parameters, groups):
    return parallel(mesh, u, parameters, groups)


@scheme(
    reference=dense,
    inputs={"u": "b t/cp d", "parameters": SPECS, "groups": "g"},
    outputs="b t/cp d",
    dims={**SIZES, **FOLLOW, "b": (2,), "t": (12,)},
    cost=cost(lambda c: 1),
    **DECLARED,
)
def state_passing_contiguous(mesh, u, parameters, groups):
    return parallel(mesh, u, parameters, groups, layout="contiguous")


@scheme(
    reference=packed,
    inputs={"u": "1 t/cp:packed d", "parameters": SPECS, "groups": "g", "cu": "q"},
    outputs="1 t/cp:packed d",
    dims={**SIZES, **FOLLOW, "t": (24,), "q": (4,)},
    cost=cost(lambda c: 2 * (c.q - 1)),
    **{**DECLARED, "draw": {**DECLARED["draw"], "cu": offsets("t", padded=True)}},
)
def state_passing_packed(mesh, u, parameters, groups, cu):
    return parallel(mesh, u, parameters, groups, cu)


@scheme(
    reference=packed,
    inputs={"u": "1 t/cp d", "parameters": SPECS, "groups": "g", "cu": "q"},
    outputs="1 t/cp d",
    dims={**SIZES, **FOLLOW, "t": (24,), "q": (4,)},
    cost=cost(lambda c: 1),
    **{**DECLARED, "draw": {**DECLARED["draw"], "cu": offsets("t", padded=True)}},
)
def state_passing_stream(mesh, u, parameters, groups, cu):
    return parallel(mesh, u, parameters, groups, cu, layout="contiguous")


SCHEMES = (state_passing, state_passing_contiguous, state_passing_packed, state_passing_stream)
CUTS = [("dual_chunk_swap", None), ("contiguous", None), ("dual_chunk_swap", CU), ("contiguous", [0, 5, 6, 6, 17, 24])]


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared, engine):
    @settings(max_examples=10 if engine == "lockstep" else 2)
    @given(every_case(declared, engine=engine))
    def example(case):
        check(case)

    example()


def held(cp, layout, cu, t=T):
    """Positions of each rank."""
    return packed_layout(t, cp, cu) if cu and layout == "dual_chunk_swap" else dense_layouts[layout](t, cp)


def offsets_of(cu):
    return None if cu is None else torch.tensor(cu)


def on_ranks(body, cp=2):
    return run(body, CaseSpec(scheme="mamba", mesh={"cp": cp}))


@pytest.mark.parametrize(("layout", "cu"), CUTS)
@pytest.mark.parametrize("cp", [2, 4])
def test_a_token_changes_what_follows_in_its_sequence_alone(cp, layout, cu):
    cuts = [0, T] if cu is None else cu
    sequence = torch.searchsorted(torch.tensor(cuts[1:]), torch.arange(T), right=True)

    def body(mesh, case):
        own = torch.tensor(held(cp, layout, cu)[mesh.rank("cp")])
        strategy, moved = passing(mesh, layout=layout), []
        y = strategy.mix(PROJECTED[:1, own], offsets_of(cu))
        for t in range(T):
            edited = PROJECTED[:1].clone()
            edited[:, t, 8:] += 0.5
            moved.append((strategy.mix(edited[:, own], offsets_of(cu)) != y)[0].any(-1).tolist())
        return moved

    for rank, moved in enumerate(on_ranks(body, cp).results):
        own = held(cp, layout, cu)[rank]
        assert moved == [[u >= t and bool(sequence[u] == sequence[t]) for u in own] for t in range(T)]


@pytest.mark.parametrize(("layout", "cu"), CUTS[2:])
def test_a_stream_is_a_batch_of_one(layout, cu):
    def body(mesh, case):
        x, strategy = PROJECTED[0, torch.tensor(held(2, layout, cu)[mesh.rank("cp")])], passing(mesh, layout=layout)
        return torch.equal(strategy.mix(x, offsets_of(cu)), strategy.mix(x[None], offsets_of(cu))[0])

    assert on_ranks(body).results == (True, True)


@pytest.mark.parametrize("layout", ["dual_chunk_swap", "contiguous"])
def test_bytes_are_those_of_the_formula_at_any_length(layout):
    found = set()
    for t in (T, 2 * T):

        def body(mesh, case, t=t):
            x = torch.zeros(1, t // 2, W, dtype=torch.float64)
            return passing(mesh, layout=layout).mix(x).shape

        rows = on_ranks(body).ledger.rows
        found.add(sum(row.bytes_in for row in rows) // 2)
    sizes = {**GIVEN, "d_conv": 4, "element_size": 8, "segments": 2 if layout == "dual_chunk_swap" else 1}
    assert found == {mamba_cp_bytes(tokens=T, cp_size=2, **sizes).state_passing}


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_backward_ends_where_one_rank_has_a_loss(cp):
    def body(mesh, case):
        x = PROJECTED[:, torch.tensor(held(cp, "dual_chunk_swap", None)[mesh.rank("cp")])].requires_grad_()
        y = passing(mesh).mix(x)
        (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, float(mesh.rank("cp") == cp - 1)))
        return bool(gradient.any())

    assert on_ranks(body, cp).results == (True,) * cp


def test_the_states_are_exchanged_back_before_the_halo():
    def body(mesh, case):
        x = PROJECTED[:, : T // 2].clone().requires_grad_()
        passing(mesh).mix(x).sum().backward()

    ops = [(row.op, row.bytes_in) for row in on_ranks(body).ledger.rows if row.rank == 0]
    halo, states = 2 * 2 * 3 * 20 * 8, 2 * 2 * 4 * 7 * 8
    backward = [("reduce_scatter", 2 * states), ("reduce_scatter", 2 * halo)]
    assert ops == [("all_gather", halo), ("all_gather", states), *backward]


def test_getters_give_whole_parameters():
    def body(mesh, case):
        mixer = filled()
        strategy = passing(mesh, mixer)
        return (
            torch.equal(strategy.get_conv1d_weight(), mixer.conv1d.weight[:, 0]),
            strategy.get_conv1d_bias() is mixer.conv1d.bias,
            strategy.get_dt_bias() is mixer.dt_bias,
            strategy.get_A_log() is mixer.A_log,
            strategy.get_D() is mixer.D,
        )

    assert on_ranks(body).results == ((True,) * 5,) * 2


def test_no_number_of_sequences_changes_what_is_done():
    """As many operations for 2, 10 and 1,000 sequences, and for a second layer none for the index."""

    def body(mesh, case):
        strategy, x, found = passing(mesh), torch.zeros(4000, W, dtype=torch.float64, requires_grad=True), []
        strategy.mixer.chunk_size = 4
        for count in (2, 10, 1000):
            cu = torch.arange(0, 8001, 8000 // count)
            for _ in range(2):
                with Operations() as operations:
                    strategy.mix(x, cu)
                found.append(operations.count)
        return found

    for first, second, *others in on_ranks(body).results:
        assert second < first and others == [first, second] * 2


def test_a_stream_without_tokens_sends_nothing():
    def body(mesh, case):
        return passing(mesh).mix(PROJECTED[:, :0]).shape

    ranks = on_ranks(body)
    assert ranks.results == (torch.Size([2, 0, 8]),) * 2 and ranks.ledger.rows == []
