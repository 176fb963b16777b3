"""gathered + bias: the gradient of the bias beside a gather of experts, on two ranks with cotangents 1 and 2."""

import torch
import torch.distributed as dist
from nemo_automodel.components.moe.experts import _AllGatherConcatVarlenFn

dist.init_process_group("gloo")
rank = dist.get_rank()
x, bias = torch.ones(2, requires_grad=True), torch.ones(4, requires_grad=True)
term = bias * 1
out = _AllGatherConcatVarlenFn.apply(x, dist.group.WORLD, [2, 2], 2) + term
(out * (rank + 1)).sum().backward()
print(f"rank {rank}: gradient of the bias {bias.grad.tolist()}, wanted {[rank + 1.0] * 4}\n", end="", flush=True)
dist.destroy_process_group()
