"""mamba.strategy: the common part of both strategies, which read the mixer's parameters at each use."""

from copy import deepcopy

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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
from parity_tests.mamba.over_ranks import on_ranks, rank_positions
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.collectives import all_reduce
from torch_impl.mamba import MambaContextParallel, MambaStatePassing

NAMES = ("conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D")
both = pytest.mark.parametrize("strategy_of", [hidden_parallel_strategy, state_passing_strategy])


def rank_tokens(mesh, x, cu=CU):
    """This rank's tokens of a full stream, or of rows."""
    return x[:, torch.tensor(rank_positions(mesh.size("cp"), "dual_chunk_swap", cu)[mesh.rank("cp")])]


@both
def test_a_copied_mixer_has_a_separate_strategy(strategy_of):
    """As an average of a model's weights is kept: the copy reads the copy's parameters."""

    def body(mesh, case):
        mixer, x = filled(), rank_tokens(mesh, PROJECTED[:1])
        mixer.context_parallel = strategy_of(mesh, mixer)
        before = mixer.context_parallel.mix(x, torch.tensor(CU))
        copy = deepcopy(mixer)
        with torch.no_grad():
            mixer.A_log.add_(1)
        after, of_copy = (each.context_parallel.mix(x, torch.tensor(CU)) for each in (mixer, copy))
        return torch.equal(of_copy, before), not torch.equal(after, before)

    assert on_ranks(body).results == ((True, True),) * 2


@both
def test_caches_built_in_inference_serve_training(strategy_of):
    """Sizes and a length that no other test has, so that the indices are built here."""

    def body(mesh, case):
        cu, x = torch.tensor([0, 20, 28]), torch.zeros(14, 44, dtype=torch.float64)
        mixer = type(filled())(5, **{**GIVEN, "d_state": 6}, dtype=torch.float64)
        strategy = strategy_of(mesh, mixer, d_state=6)
        with torch.inference_mode():
            strategy.mix(x, cu)
        leaf = x.clone().requires_grad_()
        strategy.mix(leaf, cu).sum().backward()
        return leaf.grad.shape

    assert on_ranks(body).results == (torch.Size([14, 44]),) * 2


@both
def test_autocast_changes_nothing(strategy_of):
    """Between the projections sums run in float32 or wider; so do their gradients, taken outside of autocast."""

    def body(mesh, case):
        x = rank_tokens(mesh, PROJECTED[:1]).float().requires_grad_()
        strategy = strategy_of(mesh, filled().float())
        results = []
        for is_cast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                y = strategy.mix(x, torch.tensor(CU))
            results.append((y, *torch.autograd.grad(y.square().sum(), [x, *strategy.mixer.conv1d.parameters()])))
        return [torch.equal(*pair) for pair in zip(*results, strict=True)]

    assert on_ranks(body).results == ([True] * 4,) * 2


@both
def test_time_steps_are_clamped_to_the_limits_of_the_mixer(strategy_of):
    """A range of one step: no column of dt moves anything."""

    def body(mesh, case):
        mixer, x = filled(), rank_tokens(mesh, PROJECTED[:1]).requires_grad_()
        mixer.dt_limit = (0.5, 0.5)
        y = strategy_of(mesh, mixer).mix(x, torch.tensor(CU))
        (gradient,) = torch.autograd.grad(y, x, y.detach())
        return gradient.shape[1] == T // 2, bool(gradient[..., -4:].any()), bool(gradient[..., :-4].any())

    assert on_ranks(body).results == ((True, False, True),) * 2


@pytest.mark.parametrize("strategy", [MambaContextParallel, MambaStatePassing])
def test_ranks_are_a_group_or_a_mesh_of_one_dim(strategy):
    def body(mesh, case):
        mixer, x = filled(), rank_tokens(mesh, PROJECTED[:1])
        group, of_mesh = (strategy(ranks, **GIVEN, mixer=mixer) for ranks in (mesh["cp"], mesh.device_mesh["cp"]))
        with pytest.raises(ValueError) as caught:
            strategy(mesh.device_mesh, **GIVEN, mixer=mixer)
        return torch.equal(group.mix(x, torch.tensor(CU)), of_mesh.mix(x, torch.tensor(CU))), str(caught.value)

    ranks = run(body, CaseSpec(scheme="mamba", mesh={"cp": 2, "tp": 1}))
    sentence = f"mamba.{strategy.name}: cp_group is a mesh of 2 dims ('cp', 'tp'); pass its cp dim"
    assert ranks.results == ((True, sentence),) * 2


@both
def test_a_convolution_may_have_no_bias(strategy_of):
    def body(mesh, case):
        none, zero, x = filled(), filled(), rank_tokens(mesh, PROJECTED[:1])
        none.conv1d.bias = None
        torch.nn.init.zeros_(zero.conv1d.bias)
        return torch.equal(*(strategy_of(mesh, mixer).mix(x, torch.tensor(CU)) for mixer in (none, zero)))

    assert on_ranks(body).results == (True, True)


@both
def test_fully_sharded_parameters_are_read_after_their_all_gather(strategy_of):
    """FSDP2 over the same two ranks: its mean of the gradients is half their sum, to the bit."""

    def body(mesh, case):
        runs = []
        for is_sharded in (False, True):
            mixer = filled()
            mixer.context_parallel = strategy = strategy_of(mesh, mixer)
            if is_sharded:
                fully_shard(mixer, mesh=mesh.device_mesh)
                with pytest.raises(ValueError, match=r"A_log is .*Shard.*; unshard it first"):
                    strategy.get_A_log()
            y = mixer(rank_tokens(mesh, U, None))
            y.backward(y.detach())
            runs.append([y, *(parameter.grad for parameter in mixer.parameters())])
        alone, sharded = runs
        means = [alone[0], *(all_reduce(gradient, mesh["cp"]) / 2 for gradient in alone[1:])]
        full = [sharded[0], *(gradient.full_tensor() for gradient in sharded[1:])]
        return [torch.equal(a, b) for a, b in zip(means, full, strict=True)]

    assert on_ranks(body).results == ([True] * 9,) * 2


@both
def test_replicated_dtensors_equal_plain_parameters(strategy_of):
    """DTensors that every rank has in full: the same outputs and local gradients as of plain parameters."""

    def body(mesh, case):
        runs = []
        for is_distributed in (False, True):
            mixer = filled()
            if is_distributed:
                replicate(mixer, mesh.device_mesh, Replicate())
            y = strategy_of(mesh, mixer).mix(rank_tokens(mesh, PROJECTED, None))
            y.backward(y.detach())
            gradients = [mixer.get_parameter(name).grad for name in NAMES]
            runs.append([y, *(g.to_local() if is_distributed else g for g in gradients)])
        return [torch.equal(a, b) for a, b in zip(*runs, strict=True)]

    assert on_ranks(body).results == ([True] * 6,) * 2


@both
@pytest.mark.parametrize("name", NAMES)
def test_a_sharded_parameter_is_rejected_before_anything_is_sent(strategy_of, name):
    def body(mesh, case):
        mixer = filled()
        replicate(mixer, mesh.device_mesh, Shard(0), only=name)
        with pytest.raises(ValueError, match=rf"{name} is .*Shard.*; unshard it first"):
            strategy_of(mesh, mixer).mix(rank_tokens(mesh, PROJECTED, None))

    sent = {row.op for row in on_ranks(body).ledger.rows}
    assert sent == {"scatter"}  # by DTensor, to shard the parameter


def replicate(mixer, device_mesh, placement, only=None):
    for name in NAMES if only is None else (only,):
        module, _, last = name.rpartition(".")
        full = distribute_tensor(mixer.get_parameter(name).detach(), device_mesh, [placement])
        setattr(mixer.get_submodule(module), last, torch.nn.Parameter(full))
