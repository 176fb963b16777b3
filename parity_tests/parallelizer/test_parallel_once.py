"""A model that is data-parallel already is rejected, and the message names the parallel part."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from parity_tests.parallelizer.styled import linear_layer
from shardproof import CaseSpec
from shardproof.engines.engines import run
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


def apply_parallelism(model, path, kind, mesh):
    """Apply FSDP or DistributedDataParallel to one part of the model, in place; return the model."""
    part = model.get_submodule(path)
    if kind == "FSDP":
        fully_shard(part, mesh=mesh.device_mesh)
        return model
    if not path:
        return replica(part, mesh["dp_shard"])
    model.set_submodule(path, replica(part, mesh["dp_shard"]))
    return model


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_parallel_is_named(part, kind, entry, ranks):
    def body(mesh, case):
        model = apply_parallelism(network(), PARTS[part], kind, mesh)
        # The model itself has no path and is named by its class.
        label = repr(PARTS[part]) if PARTS[part] else type(model).__name__
        with pytest.raises(ValueError) as caught:
            ENTRIES[entry](model, mesh.device_mesh)
        return str(caught.value), f"model: {label} is {KINDS[kind]};"

    for sentence, beginning in run(body, CaseSpec(scheme="once", mesh={"dp_shard": ranks})).results:
        assert sentence[: len(beginning)] == beginning


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_model_that_is_not_parallel_is_accepted(entry, ranks):
    def body(mesh, case):
        ENTRIES[entry](network(), mesh.device_mesh)

    run(body, CaseSpec(scheme="once", mesh={"dp_shard": ranks}))
