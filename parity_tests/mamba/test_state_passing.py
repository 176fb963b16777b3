"""Parity of mamba.state_passing."""

import pytest
import torch

from parity_tests.mamba.mixers import CU, GIVEN, PROJECTED, T, W, filled, state_passing_strategy
from parity_tests.mamba.operations import Operations
from parity_tests.mamba.over_ranks import (
    WAYS,
    check_what_a_token_changes,
    offsets_of,
    on_ranks,
    parallel,
    rank_positions,
)
from parity_tests.mamba.parameters import OF_THE_RECURRENCE
from parity_tests.mamba.sharded_inputs import FOLLOW, sharded_rows, sharded_stream
from parity_tests.parity import parity
from shardproof import Cost, scheme
from torch_impl.layouts import TokenLayout
from torch_impl.mamba import Mamba2Mixer, MambaStatePassing, mamba_cp_bytes
from torch_impl.mamba.segments import segments_of

# 3 heads and 1 group, which two and four ranks cannot share, and 6 and 2, which two can; segments shorter than the
# convolution's reach.
SIZES = {"r": (3,), "g": (1, 2), "h": "g*r", "p": (2,), "n": (2,), "d": (2,), "k": (6,)}


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
    contract=Mamba2Mixer,
    mesh={"cp": (1, 2, 3, 4)},
    rank_options={"way": WAYS},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("t", "i"),
    wider_inputs=OF_THE_RECURRENCE,
    roundings=9,  # the mixer's and the incoming state's; a term of each rank in the gradients
    excluded_conditions=("inference_mode", "autocast"),  # torch's linear layers follow autocast
)


@scheme(
    dims={**SIZES, **FOLLOW, "b": (2,), "t": (24,), "k": (6, 1)},
    cost=cost(lambda c: 2),
    **sharded_rows(":dual_chunk_swap"),
    **DECLARED,
)
def state_passing(mesh, u, parameters, groups, limits, conv_bias, way):
    return parallel(MambaStatePassing, mesh, u, parameters, groups, limits=limits, conv_bias=conv_bias, way=way)


@scheme(dims={**SIZES, **FOLLOW, "b": (2,), "t": (12,)}, cost=cost(lambda c: 1), **sharded_rows(""), **DECLARED)
def state_passing_contiguous(mesh, u, parameters, groups, limits, conv_bias, way):
    return parallel(
        MambaStatePassing, mesh, u, parameters, groups, limits=limits, conv_bias=conv_bias, way=way, layout="contiguous"
    )


@scheme(
    dims={**SIZES, **FOLLOW, "t": (24,), "q": (4,)},
    cost=cost(lambda c: 2 * (c.q - 1)),
    **sharded_stream(":packed"),
    **DECLARED,
)
def state_passing_packed(mesh, u, parameters, groups, cu, limits, conv_bias, way):
    return parallel(MambaStatePassing, mesh, u, parameters, groups, cu, way, limits=limits, conv_bias=conv_bias)


@scheme(dims={**SIZES, **FOLLOW, "t": (24,), "q": (4,)}, cost=cost(lambda c: 1), **sharded_stream(""), **DECLARED)
def state_passing_stream(mesh, u, parameters, groups, cu, limits, conv_bias, way):
    return parallel(
        MambaStatePassing, mesh, u, parameters, groups, cu, way, limits=limits, conv_bias=conv_bias, layout="contiguous"
    )


SCHEMES = (state_passing, state_passing_contiguous, state_passing_packed, state_passing_stream)
CUTS = [("dual_chunk_swap", None), ("contiguous", None), ("dual_chunk_swap", CU), ("contiguous", [0, 5, 6, 6, 17, 24])]


test_parity = parity(SCHEMES, lockstep=10, gloo=2)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(("layout", "cu"), CUTS)
@pytest.mark.parametrize("cp", [2, 4])
def test_a_token_changes_only_later_tokens_of_its_sequence(cp, layout, cu):
    check_what_a_token_changes(state_passing_strategy, cp, layout, cu)


@pytest.mark.parametrize(("layout", "cu"), CUTS[2:])
def test_a_stream_is_a_batch_of_one(layout, cu):
    def body(mesh, case):
        x, strategy = (
            PROJECTED[0, torch.tensor(rank_positions(2, layout, cu)[mesh.rank("cp")])],
            state_passing_strategy(mesh, layout=layout),
        )
        return torch.equal(strategy.mix(x, offsets_of(cu)), strategy.mix(x[None], offsets_of(cu))[0])

    assert on_ranks(body).results == (True, True)


def test_states_of_narrow_tokens_are_float32():
    """A token of zeros reads the state alone, which is rounded there for the first time: over any ranks the same."""
    projected, x_columns = PROJECTED.bfloat16(), slice(8, 16)
    projected[:, T // 2 :, x_columns] = 0.0

    def body(mesh, case):
        mixer = filled(d_conv=1).bfloat16()
        torch.nn.init.zeros_(mixer.conv1d.bias)
        tokens = projected.chunk(mesh.size("cp"), 1)[mesh.rank("cp")]
        return state_passing_strategy(mesh, mixer, layout="contiguous").mix(tokens)

    of_one, of_two = (torch.cat(on_ranks(body, cp).results, 1)[:, T // 2 :] for cp in (1, 2))
    assert of_two.count_nonzero() > of_two.numel() // 2
    assert torch.equal(of_two, of_one)


def test_blocks_of_a_segment_have_the_chunk_size_of_each_call():
    layout, place = TokenLayout.dense("contiguous", 16, cp_size=1, cp_rank=0), torch.device("cpu")
    assert [segments_of(layout, 4, size, place).leaving.rows.shape[1] for size in (8, 2)] == [8, 2]


@pytest.mark.parametrize("layout", ["dual_chunk_swap", "contiguous"])
def test_bytes_match_the_formula_at_any_length(layout):
    sent = set()
    for t in (T, 2 * T):

        def body(mesh, case, t=t):
            x = torch.zeros(1, t // 2, W, dtype=torch.float64)
            return state_passing_strategy(mesh, layout=layout).mix(x).shape

        rows = on_ranks(body).ledger.rows
        sent.add(sum(row.bytes_in for row in rows) // 2)
    sizes = {**GIVEN, "d_conv": 4, "element_size": 8, "segments": 2 if layout == "dual_chunk_swap" else 1}
    assert sent == {mamba_cp_bytes(tokens=T, cp_size=2, **sizes).state_passing}


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_backward_does_not_hang_if_only_one_rank_has_a_loss(cp):
    def body(mesh, case):
        x = PROJECTED[:, torch.tensor(rank_positions(cp, "dual_chunk_swap", None)[mesh.rank("cp")])].requires_grad_()
        y = state_passing_strategy(mesh).mix(x)
        (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, float(mesh.rank("cp") == cp - 1)))
        return bool(gradient.any())

    assert on_ranks(body, cp).results == (True,) * cp


def test_the_states_are_exchanged_back_before_the_halo():
    def body(mesh, case):
        x = PROJECTED[:, : T // 2].clone().requires_grad_()
        state_passing_strategy(mesh).mix(x).sum().backward()

    ops = [(row.op, row.bytes_in) for row in on_ranks(body).ledger.rows if row.rank == 0]
    halo, states = 2 * 2 * 3 * 20 * 8, 2 * 2 * 4 * 7 * 8
    backward = [("reduce_scatter", 2 * states), ("reduce_scatter", 2 * halo)]
    assert ops == [("all_gather", halo), ("all_gather", states), *backward]


def test_getters_give_full_parameters():
    def body(mesh, case):
        mixer = filled()
        strategy = state_passing_strategy(mesh, mixer)
        return (
            torch.equal(strategy.get_conv1d_weight(), mixer.conv1d.weight[:, 0]),
            strategy.get_conv1d_bias() is mixer.conv1d.bias,
            strategy.get_dt_bias() is mixer.dt_bias,
            strategy.get_A_log() is mixer.A_log,
            strategy.get_D() is mixer.D,
        )

    assert on_ranks(body).results == ((True,) * 5,) * 2


@pytest.mark.slow
def test_the_number_of_sequences_changes_no_operation():
    """As many operations for 2, 10 and 1,000 sequences, and for a second layer none for the layout."""

    def body(mesh, case):
        strategy, x, counts = (
            state_passing_strategy(mesh),
            torch.zeros(4000, W, dtype=torch.float64, requires_grad=True),
            [],
        )
        strategy.mixer.chunk_size = 4
        for count in (2, 10, 1000):
            cu = torch.arange(0, 8001, 8000 // count)
            for _ in range(2):
                with Operations() as operations:
                    strategy.mix(x, cu)
                counts.append(operations.count)
        return counts

    for counts in on_ranks(body).results:
        (first_layer,), (second_layer,) = set(counts[::2]), set(counts[1::2])
        assert second_layer < first_layer


def test_a_stream_without_tokens_sends_nothing():
    def body(mesh, case):
        return state_passing_strategy(mesh).mix(PROJECTED[:, :0]).shape

    ranks = on_ranks(body)
    assert ranks.results == (torch.Size([2, 0, 8]),) * 2 and ranks.ledger.rows == []
