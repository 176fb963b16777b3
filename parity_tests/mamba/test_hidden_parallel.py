"""Parity of mamba.hidden_parallel."""

from functools import partial

import pytest
import torch

from jax_ref.layouts import conv_channels as reference_channels
from jax_ref.layouts import projection_columns as reference_columns
from parity_tests.mamba.mixers import CU, PROJECTED, T, W, filled, hidden_parallel_strategy
from parity_tests.mamba.operations import Operations
from parity_tests.mamba.over_ranks import WAYS, check_what_a_token_changes, on_ranks, parallel, rank_positions
from parity_tests.mamba.parameters import OF_THE_RECURRENCE
from parity_tests.mamba.sharded_inputs import FOLLOW, sharded_rows, sharded_stream
from parity_tests.parity import parity
from shardproof import CaseSpec, Cost, scheme
from shardproof.engines.engines import run
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.columns import MambaSizes
from torch_impl.mamba import Mamba2Mixer, MambaContextParallel
from torch_impl.mamba.mix import SsmParameters, mix_columns

# 2 groups are fewer than four ranks and as many as two ranks; 8 groups are more.
SIZES = {"h": (8,), "g": (2, 8), "p": (2,), "n": (2,), "d": (2,), "k": (4,)}


def cost(c):
    if c.cp == 1:
        return Cost()
    columns = 3 * c.h * c.p + 2 * max(c.g, c.cp) * c.n + c.h
    moved = {"all_to_all": (2 if c.fused else 6, c.dims.get("b", 1) * c.t * c.itemsize * columns // c.cp)}
    return Cost(forward=moved, backward=moved)


def can_share_heads(c):
    """Whether all ranks get equally many heads, and equally many groups or a copy of one group."""
    return c.h % c.cp == 0 and (c.g % c.cp == 0 or c.cp % c.g == 0)


class InParts:
    """Calls the strategy's two exchanges and the part between them, and passes the layout to each exchange."""

    def __init__(self, kind, group, *, layout="dual_chunk_swap", **settings):
        self.strategy, self.batch_layout = kind(group, **settings), layout

    def mix(self, projected_states, cu_seqlens=None):
        local = self.strategy.pre_conv_ssm(projected_states, cu_seqlens, layout=self.batch_layout)
        parameters = self.strategy.ssm_parameters()
        ids = sequence_ids(local, cu_seqlens)
        options = {"chunk_size": self.strategy.chunk_size, "dt_limit": self.strategy.dt_limit}
        mixed = mix_columns(local, self.strategy.local, parameters, ids, **options)
        return self.strategy.post_conv_ssm(mixed, cu_seqlens, layout=self.batch_layout)


class SharedProtocol:
    """Calls the methods of the strategy that the classes of other libraries with its name have too."""

    def __init__(self, kind, group, **settings):
        self.strategy, self.sizes = kind(group, **settings), settings

    def mix(self, projected_states, cu_seqlens=None):
        strategy = self.strategy
        rows = (
            projected_states if cu_seqlens is None else projected_states[0]
        )  # all these methods take a stream as [t, w]
        local = strategy.pre_conv_ssm(rows, cu_seqlens)
        batch = local if cu_seqlens is None else local[None]
        parameters = SsmParameters(
            strategy.get_conv1d_weight(),
            strategy.get_conv1d_bias(),
            strategy.get_dt_bias(),
            strategy.get_A_log(),
            strategy.get_D(),
        )
        sizes = MambaSizes(
            strategy.num_heads_local, self.sizes["head_dim"], strategy.n_groups_local, self.sizes["d_state"]
        )
        limits = self.sizes["mixer"].dt_limit
        ids = sequence_ids(batch, cu_seqlens)
        mixed = mix_columns(batch, sizes, parameters, ids, chunk_size=4, dt_limit=limits)
        out = strategy.post_conv_ssm(mixed if cu_seqlens is None else mixed[0], cu_seqlens)
        return out if cu_seqlens is None else out[None]


def sequence_ids(local, cu_seqlens):
    if cu_seqlens is None:
        return None
    return TokenLayout.packed(cu_seqlens, cp_size=1, cp_rank=0).sequence_ids.expand(local.shape[:2])


def mixed_rows(mesh, u, parameters, groups, cu=None, way="by name", **chosen):
    part = {"in parts": InParts, "by shared protocol": SharedProtocol}.get(way)
    if part is not None:
        return parallel(partial(part, MambaContextParallel), mesh, u, parameters, groups, cu, **chosen)
    _ = MambaContextParallel.mix  # an implementation without `mix` is not applicable, whatever the arguments
    return parallel(MambaContextParallel, mesh, u, parameters, groups, cu, way, **chosen)


DECLARED = dict(
    contract=Mamba2Mixer,
    mesh={"cp": (1, 2, 4)},
    assume=can_share_heads,
    rank_options={"fused": (True, False), "way": (*WAYS, "in parts", "by shared protocol")},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("t", "i"),
    wider_inputs=OF_THE_RECURRENCE,
    roundings=8,  # the mixer's; a term of each rank in the gradients
    excluded_conditions=("inference_mode", "autocast"),  # torch's linear layers follow autocast
    cost=cost,
)


@scheme(dims={**SIZES, **FOLLOW, "b": (2,), "t": (16,)}, **sharded_rows(":dual_chunk_swap"), **DECLARED)
def hidden_parallel(mesh, u, parameters, groups, limits, conv_bias, fused, way):
    return mixed_rows(mesh, u, parameters, groups, limits=limits, conv_bias=conv_bias, fused=fused, way=way)


@scheme(dims={**SIZES, **FOLLOW, "b": (2,), "t": (16,), "k": (4, 1)}, **sharded_rows(""), **DECLARED)
def hidden_parallel_contiguous(mesh, u, parameters, groups, limits, conv_bias, fused, way):
    return mixed_rows(
        mesh, u, parameters, groups, limits=limits, conv_bias=conv_bias, fused=fused, way=way, layout="contiguous"
    )


@scheme(dims={**SIZES, **FOLLOW, "t": (24,), "q": (4,)}, **sharded_stream(":packed"), **DECLARED)
def hidden_parallel_packed(mesh, u, parameters, groups, cu, limits, conv_bias, fused, way):
    return mixed_rows(mesh, u, parameters, groups, cu, limits=limits, conv_bias=conv_bias, fused=fused, way=way)


SCHEMES = (hidden_parallel, hidden_parallel_contiguous, hidden_parallel_packed)
test_parity = parity(SCHEMES, lockstep=12, gloo=3)


def rank_tokens(mesh, x, cu=None):
    """This rank's tokens of a whole [b, s, w]."""
    return x[:, torch.tensor(rank_positions(mesh.size("cp"), "dual_chunk_swap", cu, x.shape[1])[mesh.rank("cp")])]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_rows_are_in_order_and_columns_the_ranks(cp):
    def body(mesh, case):
        strategy = hidden_parallel_strategy(mesh)
        pre = strategy.pre_conv_ssm(rank_tokens(mesh, PROJECTED))
        columns = torch.tensor(reference_columns(4, 2, 2, 3, cp)[mesh.rank("cp")])
        back = strategy.post_conv_ssm(pre[..., : strategy.d_inner_local])
        sizes = strategy.num_heads_local, strategy.n_groups_local
        return (
            torch.equal(pre, PROJECTED[..., columns]),
            torch.equal(back, rank_tokens(mesh, PROJECTED[..., :8])),
            sizes,
        )

    counts = {1: (4, 2), 2: (2, 1), 4: (1, 1)}[cp]
    assert on_ranks(body, cp).results == ((True, True, counts),) * cp


@pytest.mark.parametrize("cu", [None, CU])
@pytest.mark.parametrize("order", ["dual_chunk_swap", "contiguous"])
@pytest.mark.parametrize("cp", [2, 4])
def test_fused_and_unfused_exchanges_are_bitwise_equal(cp, order, cu):
    def body(mesh, case):
        x = rank_tokens(mesh, PROJECTED[:1], cu=cu).requires_grad_()
        offsets = None if cu is None else torch.tensor(cu)
        results = []
        for fused in (True, False):
            strategy = hidden_parallel_strategy(mesh, fused=fused, layout=order)
            pre = strategy.pre_conv_ssm(x, offsets)
            post = strategy.post_conv_ssm(pre[..., : strategy.d_inner_local] * 3, offsets)
            (gradient,) = torch.autograd.grad(post, x, post.detach())
            results.append((pre, post, gradient))
        return [torch.equal(a, b) for a, b in zip(*results, strict=True)]

    assert on_ranks(body, cp).results == ([True] * 3,) * cp


@pytest.mark.parametrize("cp", [1, 2])
def test_a_layout_is_data(cp):
    """A striped layout, for which no order has a name, and a packed layout without its offsets."""

    def body(mesh, case):
        striped = TokenLayout.dense("striped", T, cp_size=cp, cp_rank=mesh.rank("cp"))
        packed = TokenLayout.packed(CU, cp_size=cp, cp_rank=mesh.rank("cp"))
        columns, checks = torch.tensor(reference_columns(4, 2, 2, 3, cp)[mesh.rank("cp")]), []
        for layout, x in ((striped, PROJECTED), (packed, PROJECTED), (packed, PROJECTED[0])):
            for fused, cu in ((True, None), (False, None), (True, CU), (False, CU)):
                if cu and (layout is striped or x.ndim == 3):
                    continue  # rows, or no sequences
                strategy, offsets = (
                    hidden_parallel_strategy(mesh, layout=layout, fused=fused),
                    cu and torch.tensor([*cu, -1]),
                )
                pre = strategy.pre_conv_ssm(layout.shard(x, -2), offsets)
                post = strategy.post_conv_ssm(pre[..., : strategy.d_inner_local], offsets)
                checks += [torch.equal(pre, x[..., columns]), torch.equal(post, layout.shard(x[..., :8], -2))]
        return checks

    assert on_ranks(body, cp).results == ([True] * 16,) * cp


def test_one_rank_gets_the_same_object_and_sends_nothing():
    def body(mesh, case):
        strategy, x = hidden_parallel_strategy(mesh), PROJECTED[:, :7]
        y = torch.zeros(2, 7, 8, dtype=torch.float64)
        return strategy.pre_conv_ssm(x) is x, strategy.post_conv_ssm(y) is y

    ranks = run(body, CaseSpec(scheme="mamba", mesh={"cp": 1}))
    assert ranks.results == ((True, True),) and ranks.ledger.rows == []


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(("layout", "cu"), [("dual_chunk_swap", CU), ("dual_chunk_swap", None), ("contiguous", None)])
@pytest.mark.parametrize("cp", [2, 4])
def test_a_token_changes_only_later_tokens_of_its_sequence(cp, layout, cu):
    check_what_a_token_changes(
        lambda mesh, **chosen: hidden_parallel_strategy(mesh, filled(), **chosen), cp, layout, cu
    )


def test_getters_give_the_shard_of_a_rank():
    def body(mesh, case):
        mixer = filled()
        strategy, rank = hidden_parallel_strategy(mesh, mixer), mesh.rank("cp")
        channels = torch.tensor(reference_channels(4, 2, 2, 3, 4)[rank])
        twice = strategy._repeat_group_state(torch.arange(6.0).view(1, 6))
        strategy.mixer.D = torch.nn.Parameter(torch.arange(8.0))
        return (
            torch.equal(strategy.get_conv1d_weight(), mixer.conv1d.weight[channels, 0]),
            torch.equal(strategy.get_conv1d_bias(), mixer.conv1d.bias[channels]),
            torch.equal(strategy.get_dt_bias(), mixer.dt_bias[rank : rank + 1]),
            torch.equal(strategy.get_A_log(), mixer.A_log[rank : rank + 1]),
            strategy.get_D().tolist() == [2 * rank, 2 * rank + 1],
            twice.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]],
            (strategy.num_heads_local, strategy.n_groups_local, strategy.group_repeat_count) == (1, 1, 2),
        )

    assert on_ranks(body, 4).results == ((True,) * 7,) * 4


def test_getters_give_the_shard_of_a_tensor_that_is_passed():
    def body(mesh, case):
        strategy, rank = hidden_parallel_strategy(mesh, filled()), mesh.rank("cp")
        full = {name: torch.arange(4.0) + i for i, name in enumerate(("dt_bias", "A_log", "D"))}
        heads = [
            getattr(strategy, f"get_{name}")(**{name: full[name]}).tolist() == [rank + i] for i, name in enumerate(full)
        ]
        return [*heads, strategy.get_D(torch.arange(8.0)).tolist() == [2 * rank, 2 * rank + 1]]

    assert on_ranks(body, 4).results == ([True] * 4,) * 4


def test_a_stream_without_tokens_sends_nothing():
    def body(mesh, case):
        shapes = []
        for x, cu in ((PROJECTED[:, :0], None), (PROJECTED[0, :0], torch.tensor([0, 0]))):
            y = hidden_parallel_strategy(mesh, filled()).mix(x.clone().requires_grad_(), cu)
            y.sum().backward()
            shapes.append(y.shape)
        return shapes

    ranks = on_ranks(body)
    assert ranks.results == ([(2, 0, 8), (0, 8)],) * 2 and ranks.ledger.rows == []


def test_the_number_of_sequences_changes_no_operation():
    """1, 10 and 1,000 sequences take equally many operations; a second layer takes none for the layout."""

    def body(mesh, case):
        strategy, x, counts = hidden_parallel_strategy(mesh), torch.zeros(4000, W, requires_grad=True), []
        strategy.pre_conv_ssm(x, torch.tensor([0, 4, 8000]))  # the columns are computed once
        for count in (1, 10, 1000):
            cu = torch.arange(0, 8001, 8000 // count)
            for _ in range(2):
                with Operations() as operations:
                    y = strategy.post_conv_ssm(strategy.pre_conv_ssm(x, cu)[:, :4], cu)
                    torch.autograd.grad(y, x, torch.ones_like(y))
                counts.append(operations.count)
        return counts

    for counts in on_ranks(body).results:
        (first_layer,), (second_layer,) = set(counts[::2]), set(counts[1::2])
        assert second_layer < first_layer
