"""AutoTP's sums of a contiguous tensor and of a transposed view of one, both of ones on two ranks."""

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import ColumnParallel, RowParallel

deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
world, x = dist.group.WORLD, torch.ones(2, 2, requires_grad=True)
rows = [RowParallel.apply(world, ones, False).tolist() for ones in (torch.ones(2, 2), torch.ones(2, 2).t())]
straight = torch.autograd.grad((ColumnParallel.apply(world, x) * torch.ones(2, 2)).sum(), x)[0]
turned = torch.autograd.grad((ColumnParallel.apply(world, x).t() * torch.ones(2, 2)).sum(), x)[0]
dist.barrier()
if dist.get_rank() == 0:
    print(f"RowParallel, forward:     contiguous {rows[0]}, transposed {rows[1]}")
    print(f"ColumnParallel, backward: contiguous {straight.tolist()}, transposed {turned.tolist()}")
dist.destroy_process_group()
