"""A model to which data parallelism was applied is rejected, by the name of the part that has it."""

from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from parity_tests.parallelizer.styled import linear_layer
from shardproof import check_cases, scheme, values
from torch_impl.parallelizer import fsdp2_strategy_parallelize, nvfsdp_strategy_parallelize

PARTS = {"model": "", "block": "blocks.1", "layer": "blocks.1.up"}
KINDS = {"FSDP": "already an FSDPModule", "DDP": "a DistributedDataParallel"}
ENTRIES = {"fsdp2": fsdp2_strategy_parallelize, "nvfsdp": nvfsdp_strategy_parallelize}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = linear_layer(torch.ones(2, 2))


def network():
    """Two blocks of one layer each."""
    return nn.Sequential(OrderedDict(blocks=nn.ModuleList([Block(), Block()])))


def replica(module, group):
    return nn.parallel.DistributedDataParallel(module, process_group=group)


def made_parallel(model, path, kind, mesh):
    """The model with a part that FSDP or DistributedDataParallel has been applied to, in place."""
    part = model.get_submodule(path)
    if kind == "FSDP":
        fully_shard(part, mesh=mesh.device_mesh)
        return model
    if not path:
        return replica(part, mesh["dp_shard"])
    model.set_submodule(path, replica(part, mesh["dp_shard"]))
    return model


def part_and_kind(x, part, kind):
    return x * (0 if part == "none" else 1 + list(PARTS).index(part) + 10 * (kind == "DDP"))


@scheme(
    reference=part_and_kind,
    mesh={"dp_shard": (1, 2)},
    inputs={"x": "b dp_shard=I"},
    outputs="b dp_shard=I",
    dims={"b": (1,)},
    options={"part": ("none", *PARTS), "kind": tuple(KINDS)},
    rank_options={"entry": tuple(ENTRIES)},
    nograd=("x",),
    draw={"x": values("ones")},
)
def parallelized_once(mesh, x, part, kind, entry):
    """0 where a model was not parallel, else the number of the part that is named, and 10 more for a replica of DDP."""
    model = network().to(x.device)
    if part != "none":
        model = made_parallel(model, PARTS[part], kind, mesh)
    try:
        ENTRIES[entry](model, mesh.device_mesh)
    except ValueError as error:
        # The model itself has no path and is named by its class.
        labels = [repr(each) if each else type(model).__name__ for each in PARTS.values()]
        starts = [f"model: {label} is {of_kind};" for of_kind in KINDS.values() for label in labels]
        (number,) = [number for number, start in enumerate(starts) if str(error).startswith(start)]
        return x * (1 + number % len(labels) + 10 * (number // len(labels)))
    return x * 0


def test_parity():
    check_cases(parallelized_once, 25)
