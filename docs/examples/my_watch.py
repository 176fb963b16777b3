"""A tensor-parallel layer over two ranks, watched: `torchrun --standalone --nproc-per-node 2 my_watch.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardproof import ledger_table, watch


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x):
        return x + self.second(self.first(x))


PLAN = {f"{mlp}.up": ColwiseParallel() for mlp in ("first", "second")}
PLAN |= {f"{mlp}.down": RowwiseParallel() for mlp in ("first", "second")}


def main():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(Block(), mesh, PLAN)
    with watch(mesh) as ledger:
        model(torch.ones(10, 64)).sum().backward()
    if dist.get_rank() == 0:
        print(ledger_table(ledger))
        print()
        for row in ledger.rows:
            print(row.module, "|", row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
