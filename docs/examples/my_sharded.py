"""A tensor-parallel block and its single-device twin, for `shardproof trace`."""

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def single():
    return nn.Sequential(Mlp(), Mlp())


def sharded(mesh):
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    return parallelize_module(single(), mesh["tp"], plan)


def inputs():
    return (torch.randn(3, 16),)
