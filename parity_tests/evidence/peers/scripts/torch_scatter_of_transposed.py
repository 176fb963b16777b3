"""On gloo: gradients of gathered tensors that are used transposed, and a scatter of transposed slices."""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather, gather

dist.init_process_group("gloo")  # each line below is one write, so that the ranks' lines stay whole
rank = dist.get_rank()
weights = torch.arange(8.0).view(2, 4)  # of the gathered rows, transposed; the loss is rank 0's
for name, gathered in (("gather", lambda x: gather(x, 0)), ("all_gather", all_gather)):
    x = torch.zeros(2, 2, requires_grad=True)
    (torch.cat(gathered(x)).t() * weights * (rank == 0)).sum().backward()
    wanted = weights.t()[2 * rank : 2 * rank + 2].tolist()
    print(f"rank {rank}: gradient of {name} {x.grad.tolist()}, on one device {wanted}\n", end="")
slices = list(weights.t().chunk(2))
out = torch.empty(2, 2)
dist.scatter(out, slices if rank == 0 else None)
print(f"rank {rank}: scattered {slices[rank].tolist()}, received {out.tolist()}\n", end="")
dist.destroy_process_group()
