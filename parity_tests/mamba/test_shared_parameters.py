"""mamba.shared_parameters: both strategies read what their mixer holds at each use, DTensors too."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from parity_tests.mamba.made import PROJECTED, U, filled, made, passing
from parity_tests.mamba.over_ranks import held, on_ranks
from torch_impl.collectives import all_reduce

NAMES = ("conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D")
both = pytest.mark.parametrize("strategy_of", [made, passing])


def own(mesh, x):
    return x[:, torch.tensor(held(mesh.size("cp"), "dual_chunk_swap", None)[mesh.rank("cp")])]


@both
def test_fully_sharded_parameters_are_read_when_they_are_whole(strategy_of):
    """FSDP2 over the same two ranks: its mean of the gradients is half their sum, to the bit."""

    def body(mesh, case):
        found = []
        for is_sharded in (False, True):
            mixer = filled()
            mixer.context_parallel = strategy = strategy_of(mesh, mixer)
            if is_sharded:
                fully_shard(mixer, mesh=mesh.device_mesh)
                with pytest.raises(ValueError, match=r"A_log is .*Shard.*; unshard it first"):
                    strategy.get_A_log()
            y = mixer(own(mesh, U))
            y.backward(y.detach())
            found.append([y, *(parameter.grad for parameter in mixer.parameters())])
        alone, sharded = found
        means = [alone[0], *(all_reduce(gradient, mesh["cp"]) / 2 for gradient in alone[1:])]
        whole = [sharded[0], *(gradient.full_tensor() for gradient in sharded[1:])]
        return [torch.equal(a, b) for a, b in zip(means, whole, strict=True)]

    assert on_ranks(body).results == ([True] * 9,) * 2


@both
def test_replicated_tensors_are_whole(strategy_of):
    """DTensors that every rank holds whole: the same outputs and local gradients as of plain parameters."""

    def body(mesh, case):
        found = []
        for is_distributed in (False, True):
            mixer = filled()
            if is_distributed:
                replicate(mixer, mesh.device_mesh, Replicate())
            y = strategy_of(mesh, mixer).mix(own(mesh, PROJECTED))
            y.backward(y.detach())
            gradients = [mixer.get_parameter(name).grad for name in NAMES]
            found.append([y, *(g.to_local() if is_distributed else g for g in gradients)])
        return [torch.equal(a, b) for a, b in zip(*found, strict=True)]

    assert on_ranks(body).results == ([True] * 6,) * 2


@both
@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_is_cut_is_refused_before_anything_is_sent(strategy_of, name):
    def body(mesh, case):
        mixer = filled()
        replicate(mixer, mesh.device_mesh, Shard(0), only=name)
        with pytest.raises(ValueError, match=rf"{name} is .*Shard.*; unshard it first"):
            strategy_of(mesh, mixer).mix(own(mesh, PROJECTED))

    sent = {row.op for row in on_ranks(body).ledger.rows}
    assert sent == {"scatter"}  # by DTensor, to cut the parameter


def replicate(mixer, device_mesh, placement, only=None):
    for name in NAMES if only is None else (only,):
        module, _, last = name.rpartition(".")
        whole = distribute_tensor(mixer.get_parameter(name).detach(), device_mesh, [placement])
        setattr(mixer.get_submodule(module), last, torch.nn.Parameter(whole))
