"""Scans of a DTensor along its sharded dim, named 1 and named -1, beside scans of the same tensor on one device."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
for scan in (torch.cumsum, torch.cumprod, torch.logcumsumexp):
    for dim in (1, -1):
        full = scan(distribute_tensor(x, mesh, [Shard(1)]), dim).full_tensor()
        dist.get_rank() or print(f"{scan.__name__}(x, {dim}): {full.tolist()}, on one device {scan(x, dim).tolist()}")
dist.destroy_process_group()
