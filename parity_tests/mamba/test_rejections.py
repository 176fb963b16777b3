"""The two strategies reject bad input on every rank, before anything is sent."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from parity_tests.mamba.mixers import (
    CU,
    GIVEN,
    PROJECTED,
    T,
    U,
    filled,
    hidden_parallel_strategy,
    state_passing_strategy,
)
from parity_tests.rejections import rejected
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.layouts import TokenLayout
from torch_impl.mamba import MambaContextParallel

X, STREAM = PROJECTED[:, :12], PROJECTED[0, :12]
LAYOUT = TokenLayout.dense("striped", T, cp_size=4, cp_rank=0)


def packed_as(mesh, cu):
    return TokenLayout.packed(cu, cp_size=2, cp_rank=mesh.rank("cp"))


def uneven(mesh):
    return TokenLayout.dense("ragged", T, cp_size=2, cp_rank=mesh.rank("cp"), counts=[10, 14])


def continued(mesh):
    return replace(packed_as(mesh, [0, 12, 24]), prefix_of=(-1, 0))


REJECTED = [
    (lambda m: hidden_parallel_strategy(m, num_heads=6, n_groups=4), "num_heads=6 must be divisible by n_groups=4"),
    (lambda m: hidden_parallel_strategy(m, head_dim=0), "head_dim=0 must be at least 1"),
    (
        lambda m: hidden_parallel_strategy(m, num_heads=5, n_groups=1),
        "num_heads=5 must be divisible by cp_size=2; use MambaStatePassing",
    ),
    (lambda m: hidden_parallel_strategy(m, num_heads=6, n_groups=3), "n_groups=3 must be divisible by cp_size=2"),
    (lambda m: hidden_parallel_strategy(m, num_heads=8), "conv1d.weight is [20, 1, 4]; these sizes require [28, 1, k]"),
    (lambda m: hidden_parallel_strategy(m, torch.nn.Linear(1, 1)), "the mixer has no conv1d.weight"),
    (
        lambda m: hidden_parallel_strategy(m, layout="striped"),
        "layout='striped' is not contiguous, dual_chunk_swap or a TokenLayout",
    ),
    (
        lambda m: hidden_parallel_strategy(m).pre_conv_ssm(X, layout=LAYOUT),
        "layout is for cp=4 and rank 0, cp_group has cp=2 and rank {rank}; rebind it",
    ),
    (
        lambda m: hidden_parallel_strategy(m).pre_conv_ssm(X[:, :6], layout=LAYOUT.rebind(2, m.rank("cp"))),
        "layout has 24 tokens, the ranks have 12",
    ),
    (
        lambda m: hidden_parallel_strategy(m).pre_conv_ssm(X, layout=uneven(m)),
        "layout gives the ranks (10, 14) tokens; they must be equal",
    ),
    (
        lambda m: hidden_parallel_strategy(m).pre_conv_ssm(
            X[:1], layout=replace(packed_as(m, [0, 24]), prefix_of=(-1,))
        ),
        "layout has sequences that continue others (prefix_of), which attention alone supports",
    ),
    (
        lambda m: hidden_parallel_strategy(m).pre_conv_ssm(X[:1], torch.tensor(CU), layout=packed_as(m, [0, 12, 24])),
        "cu_seqlens has 3 sequences, layout 2; pass the layout of this batch, or its offsets alone",
    ),
    (
        lambda m: hidden_parallel_strategy(m, layout=packed_as(m, [0, 24])).mix(X[:1], torch.tensor([0, 12])),
        "cu_seqlens[1] is 12, 24 in layout; pass the layout of this batch, or its offsets alone",
    ),
    (
        lambda m: hidden_parallel_strategy(m).pre_conv_ssm(X[..., 1:]),
        "projected_states is [2, 12, 31]; in_proj has 32 columns",
    ),
    (lambda m: hidden_parallel_strategy(m).post_conv_ssm(X), "output is [2, 12, 32]; 2 of 4 heads have 4 columns"),
    (
        lambda m: hidden_parallel_strategy(m).post_conv_ssm(torch.tensor(1.0)),
        "output has no dims; the last one must be i/cp",
    ),
    (
        lambda m: hidden_parallel_strategy(m).pre_conv_ssm(STREAM),
        "projected_states is [12, 32] without cu_seqlens; pass them, or [b, s, w]",
    ),
    (
        lambda m: hidden_parallel_strategy(m).pre_conv_ssm(X, torch.tensor(CU)),
        "projected_states is [2, 12, 32] with cu_seqlens; one stream is [t, w] or [1, t, w]",
    ),
    (lambda m: hidden_parallel_strategy(m)._slice_vector_param(torch.zeros(7)), "param is [7]; there are 4 heads"),
    (
        lambda m: hidden_parallel_strategy(m)._slice_conv_param(torch.zeros(7)),
        "param is [7]; the convolution has 20 channels",
    ),
]
PASSING = [
    (lambda m: state_passing_strategy(m, n_groups=3), "num_heads=4 must be divisible by n_groups=3"),
    (lambda m: state_passing_strategy(m, num_heads=8), "conv1d.weight is [20, 1, 4]; these sizes require [28, 1, k]"),
    (
        lambda m: state_passing_strategy(m, layout="striped"),
        "layout='striped' is not contiguous, dual_chunk_swap or a TokenLayout",
    ),
    (
        lambda m: state_passing_strategy(m, layout=LAYOUT.rebind(2, m.rank("cp"))).mix(X),
        "layout='striped' shards sequences into more than two runs a rank; use contiguous or dual_chunk_swap",
    ),
    (
        lambda m: state_passing_strategy(m, layout=LAYOUT.rebind(2, m.rank("cp"))).mix(X[:, :6]),
        "layout has 24 tokens, the ranks have 12",
    ),
    (
        lambda m: state_passing_strategy(m, layout=packed_as(m, [0, 12, 24])).mix(X[:1], torch.tensor([0, 8, 24])),
        "cu_seqlens[1] is 8, 12 in layout; pass the layout of this batch, or its offsets alone",
    ),
    (lambda m: state_passing_strategy(m).mix(X[..., 1:]), "projected_states is [2, 12, 31]; in_proj has 32 columns"),
    (
        lambda m: state_passing_strategy(m).mix(STREAM),
        "projected_states is [12, 32] without cu_seqlens; pass them, or [b, s, w]",
    ),
    (
        lambda m: state_passing_strategy(m).mix(X, torch.tensor(CU)),
        "projected_states is [2, 12, 32] with cu_seqlens; one stream is [t, w] or [1, t, w]",
    ),
]
OFFSETS = [  # real ones, the offsets of one rank, lengths that two ranks cannot share
    ([0, 7, 22], "cu_seqlens ends at 22 but the stream holds 24 tokens; pass the padded offsets"),
    ([0, 4, 12], "cu_seqlens ends at 12 but the stream holds 24 tokens; pass the padded offsets"),
    (
        [0, 6, 24],
        "cu_seqlens: sequence 0 has padded length 6, dual_chunk_swap over cp=2 needs a multiple of 4; pad it to 8",
    ),
]


def rejections_of(call):
    def body(mesh, case):
        with pytest.raises(ValueError) as caught:
            call(mesh)
        return str(caught.value)

    ranks = run(body, CaseSpec(scheme="mamba", mesh={"cp": 2}))
    assert ranks.ledger.rows == []
    return ranks.results


@pytest.mark.parametrize(("call", "text"), REJECTED, ids=[text[:40] for _, text in REJECTED])
def test_rejection(call, text):
    assert rejections_of(call) == tuple(f"mamba.MambaContextParallel: {text.format(rank=rank)}" for rank in range(2))


@pytest.mark.parametrize(("call", "text"), PASSING, ids=[text[:40] for _, text in PASSING])
def test_rejection_of_state_passing(call, text):
    assert rejections_of(call) == (f"mamba.MambaStatePassing: {text}",) * 2


@pytest.mark.parametrize("strategy_of", [hidden_parallel_strategy, state_passing_strategy])
@pytest.mark.parametrize(
    ("name", "shape", "required"),
    [
        ("A_log", (4, 3), "[4]"),
        ("A_log", (), "[4]"),
        ("dt_bias", (4, 1), "[4]"),
        ("dt_bias", (4, 4), "[4]"),
        ("D", (4, 3), "[4] or [8]"),
        ("D", (8, 2), "[4] or [8]"),
        ("D", (), "[4] or [8]"),
        ("conv1d.weight", (20, 2, 4), "[20, 1, k]"),
        ("conv1d.bias", (20, 1), "[20]"),
    ],
)
def test_parameters_of_other_shapes_are_rejected(strategy_of, name, shape, required):
    """One that fits the heads along its first dim alone would be found out between two collectives, or never."""

    def call(mesh):
        mixer = filled()
        owner, _, last = name.rpartition(".")
        setattr(mixer.get_submodule(owner), last, torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
        strategy_of(mesh, mixer)

    assert {message.partition(": ")[2] for message in rejections_of(call)} == {
        f"{name} is {list(shape)}; these sizes require {required}"
    }


@pytest.mark.parametrize("strategy_of", [hidden_parallel_strategy, state_passing_strategy])
def test_parameters_of_equal_size_in_other_dims_are_accepted(strategy_of):
    """The convolution's weight as causal-conv1d has it, and D in as many dims as there are."""

    def body(mesh, case):
        mixer, outputs = filled(), []
        for conv, D in (((20, 1, 4), (4,)), ((20, 4), (4, 1)), ((20, 4), (4, 1, 1))):
            mixer.conv1d.weight = torch.nn.Parameter(mixer.conv1d.weight.detach().view(conv))
            mixer.D = torch.nn.Parameter(mixer.D.detach().view(D))
            outputs.append(strategy_of(mesh, mixer).mix(X))
        return all(torch.equal(outputs[0], other) for other in outputs[1:])

    assert run(body, CaseSpec(scheme="mamba", mesh={"cp": 2})).results == (True, True)


@pytest.mark.parametrize("strategy_of", [hidden_parallel_strategy, state_passing_strategy])
def test_a_parameter_that_is_none_is_rejected(strategy_of):
    mixer = filled()
    mixer.D = None
    assert {message.partition(": ")[2] for message in rejections_of(lambda m: strategy_of(m, mixer))} == {
        "the mixer's D is None"
    }


@pytest.mark.parametrize("strategy_of", [hidden_parallel_strategy, state_passing_strategy])
def test_sizes_that_only_the_mixer_knows_are_compared(strategy_of):
    """Two groups of three states have the parameters of six groups of one, and other numbers."""
    mixer = filled(num_heads=6, n_groups=6, d_state=1)
    sentence = (
        "the mixer has n_groups=6 and d_state=1, the strategy n_groups=2 and d_state=3; pass the sizes of the mixer"
    )
    assert {one.partition(": ")[2] for one in rejections_of(lambda m: strategy_of(m, mixer, num_heads=6))} == {sentence}


@pytest.mark.parametrize("strategy_of", [hidden_parallel_strategy, state_passing_strategy])
@pytest.mark.parametrize("shape", [(32,), (1, 2, 12, 32)])
def test_rows_of_other_dims_are_rejected_where_a_layout_is_set(strategy_of, shape):
    def call(mesh):
        strategy_of(mesh, layout=packed_as(mesh, [0, 24])).mix(torch.zeros(shape, dtype=torch.float64))

    assert {message.partition(": ")[2] for message in rejections_of(call)} == {
        f"projected_states is {list(shape)}; it is [b, s, w], or [t, w] with cu_seqlens"
    }


@pytest.mark.parametrize(("cu", "text"), OFFSETS)
def test_rejected_offsets(cu, text):
    assert (
        rejections_of(lambda mesh: hidden_parallel_strategy(mesh).pre_conv_ssm(STREAM, torch.tensor(cu))) == (text,) * 2
    )
    assert rejections_of(lambda mesh: state_passing_strategy(mesh).mix(STREAM, torch.tensor(cu))) == (text,) * 2
    assert rejections_of(lambda mesh: hidden_parallel_strategy(mesh).pre_conv_ssm(X[:, :11]))[0].startswith(
        "s=22 cannot be sharded by"
    )


OF_ANOTHER_KIND = (
    (lambda strategy: strategy(num_heads=4.0), "num_heads=4.0 is a float; pass an int"),
    (
        lambda strategy: strategy(layout=["contiguous"]),
        "layout is a list; pass contiguous, dual_chunk_swap or a TokenLayout",
    ),
    (lambda strategy: strategy().mix([1, 2]), "projected_states is a list; pass a Tensor"),
    (lambda strategy: strategy().mix(X.long()), "projected_states is int64; it must be floating"),
    (
        lambda strategy: strategy().mix(STREAM, torch.tensor([0.0, 24.0])),
        "cu_seqlens: dtype is float32; offsets are integers",
    ),
    (lambda strategy: strategy().mix(STREAM, [0, 24]), "cu_seqlens is a list; pass a Tensor"),
    (lambda strategy: strategy().mix(STREAM, "ab"), "cu_seqlens='ab' are not offsets; pass a row of integers"),
)
STRATEGIES = {"MambaContextParallel": hidden_parallel_strategy, "MambaStatePassing": state_passing_strategy}
test_arguments_of_another_kind_are_rejected = rejected(
    {"cp": 2},
    [
        (
            f"{name} {text[:40]}",
            lambda mesh, call=call, name=name: call(partial(STRATEGIES[name], mesh)),
            f"mamba.{name}: {text}",
            TypeError,
        )
        for name in STRATEGIES
        for call, text in OF_ANOTHER_KIND
    ],
)


test_an_output_of_another_kind_is_rejected = rejected(
    {"cp": 2},
    [
        (
            text,
            lambda mesh, output=output: hidden_parallel_strategy(mesh).post_conv_ssm(output),
            f"mamba.MambaContextParallel: {text}",
            TypeError,
        )
        for output, text in (
            ([1.0], "output is a list; pass a Tensor"),
            (X[..., :4].long(), "output is int64; it must be floating"),
        )
    ],
)


def test_no_group_is_rejected():
    with pytest.raises(TypeError, match=r"cp_group is None; pass a ProcessGroup or a 1-D DeviceMesh"):
        MambaContextParallel(None, 4, 2, 2, 3, filled())


@dataclass(frozen=True)
class Place:
    """A group's size and rank without the group."""

    of: int
    at: int

    def size(self):
        return self.of

    def rank(self):
        return self.at


@pytest.mark.parametrize("rank", [0, 1])
def test_a_size_and_a_rank_are_enough_to_slice_parameters(rank):
    mixer = filled()
    strategy = MambaContextParallel(Place(2, rank), **GIVEN, mixer=mixer)
    assert torch.equal(strategy.get_D(), mixer.D[2 * rank : 2 * rank + 2])
    alone = MambaContextParallel(Place(1, 0), **GIVEN, mixer=mixer)
    assert alone.pre_conv_ssm(PROJECTED) is PROJECTED


def mixed_without_lengths(mesh, strategy):
    mixer = filled()
    mixer.context_parallel = strategy and strategy(mesh, mixer)
    return mixer(U[0])


# With and without a strategy, in the words of the mixer's own argument.
test_hidden_states_are_rejected_before_they_are_projected = rejected(
    {"cp": 2},
    [
        (
            name,
            lambda mesh, strategy=strategy: mixed_without_lengths(mesh, strategy),
            "mamba.Mamba2Mixer: x is [24, 5] without cu_seqlens; pass them, or [b, s, w]",
        )
        for name, strategy in {"no strategy": None, **STRATEGIES}.items()
    ],
)


@pytest.mark.parametrize("strategy", [hidden_parallel_strategy, state_passing_strategy])
def test_a_stream_with_a_layout_needs_no_offsets(strategy):
    def body(mesh, case):
        mixer = filled()
        mixer.context_parallel = strategy(mesh, mixer, layout=packed_as(mesh, [0, 24]))
        return tuple(mixer(U[0, :12]).shape)

    assert run(body, CaseSpec(scheme="mamba", mesh={"cp": 2})).results == ((12, 5),) * 2
