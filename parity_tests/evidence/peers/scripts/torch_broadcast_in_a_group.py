"""The gradient of a tensor that the first rank of each pair broadcasts; each rank's loss is the sum of its tensor."""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import broadcast

dist.init_process_group("gloo")  # each line below is one write, so that the ranks' lines stay whole
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
rank = dist.get_rank()
first = rank // 2 * 2
x = torch.ones(2, requires_grad=True)
broadcast(x, first, group=pairs[rank // 2]).sum().backward()
wanted = [2.0, 2.0] if rank == first else [0.0, 0.0]
print(f"rank {rank}, first of its pair {first}: gradient {x.grad.tolist()}, wanted {wanted}\n", end="")
dist.destroy_process_group()
