"""Megatron's sums over two ranks of a contiguous tensor and of a transposed view of one, both of ones."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

dist.init_process_group("gloo")
group, x = dist.group.WORLD, torch.ones(2, 2, requires_grad=True)
sums = [
    mappings.reduce_from_tensor_model_parallel_region(ones, group).tolist()
    for ones in (torch.ones(2, 2), torch.ones(2, 2).t())
]
copied = mappings.copy_to_tensor_model_parallel_region(x, group)
straight = torch.autograd.grad((copied * torch.ones(2, 2)).sum(), x, retain_graph=True)[0]
turned = torch.autograd.grad((copied.t() * torch.ones(2, 2)).sum(), x)[0]
dist.barrier()
if dist.get_rank() == 0:
    print(f"reduce_from, forward: contiguous {sums[0]}, transposed {sums[1]}")
    print(f"copy_to, backward:    contiguous {straight.tolist()}, transposed {turned.tolist()}")
dist.destroy_process_group()
