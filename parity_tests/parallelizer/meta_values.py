"""The values of a net that a mesh initialises from the meta device, beside those of one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parity_tests.parallelizer.small_net import BLOCK, Net, full_tensors, plan
from torch_impl.parallelizer.adapters.meta_init import materialize
from torch_impl.parallelizer.adapters.nvfsdp import nvfsdp_strategy_parallelize

SEED = 11
SEEDS = {"small": SEED, "large": 2**64 - 2**8}  # a generator takes 64 bits without a sign
AXES = ("dp_replicate", "dp_shard", "tp")
UNITS = ("model", "blocks", "modules")


def net_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net().double()


def alone(model: nn.Module, seed: int = SEED, device: str = "cpu") -> dict[str, Tensor]:
    """The model's initial values in one process, all at once."""
    materialize(model, model.named_modules(), torch.device(device), seed)
    return dict(model.named_parameters())


def names_of_other_values(device_mesh: DeviceMesh, strategy: str, units: str, seed: str) -> list[str]:
    """The parameters whose values on a mesh differ from one process's in any bit."""
    # Each rank's own generator is read for its seed, and only the first one's counts.
    first, own = int(device_mesh.mesh.flatten()[0]), torch.distributed.get_rank()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS[seed] + own - first)
        net = nvfsdp_strategy_parallelize(
            net_on_meta(),
            device_mesh,
            [BLOCK] if units == "blocks" else None,
            plan(),
            strategy,
            init_nvfsdp_with_meta_device=True,
            disable_bucketing=units == "modules",
        )
    outcome, expected = full_tensors(net), alone(net_on_meta(), SEEDS[seed])
    return [name for name in expected if not torch.equal(outcome[name].cpu(), expected[name])]
