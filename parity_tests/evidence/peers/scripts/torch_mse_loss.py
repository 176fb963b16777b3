"""Mean losses of evenly and unevenly sharded DTensors and their gradients, beside one device's."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
for name in (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy_with_logits",
    "l1_loss",
):
    for rows in (4, 3):
        x, y = torch.arange(2.0 * rows).view(rows, 2) / 8, torch.ones(rows, 2)
        one, two = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        expected, loss = getattr(F, name)(one, y), getattr(F, name)(two, distribute_tensor(y, mesh, [Shard(0)]))
        expected.backward(), loss.backward()
        ratio = (two.grad.full_tensor().norm() / one.grad.norm()).item()
        if value := loss.full_tensor().item() / expected.item():
            dist.get_rank() or print(f"{name:32} {rows} rows: value {value:.3f} times, gradient {ratio:.3f} times")
dist.destroy_process_group()
