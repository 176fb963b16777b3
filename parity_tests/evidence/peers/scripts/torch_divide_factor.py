"""FSDP2's gradient of ones, divided by 4 as sums, on meshes of one rank and of two."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
for ranks in (1, 2):
    for reduced_in in (torch.float32, torch.float16):
        mesh = init_device_mesh("cpu", (2 // ranks, ranks), mesh_dim_names=("ep", "edp"))["edp"]
        layer = torch.nn.Linear(2, 2, bias=False)
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced_in))
        layer.set_gradient_divide_factor(4.0)
        layer.set_force_sum_reduction_for_comms(True)
        layer(torch.ones(1, 2)).sum().backward()
        gradient = layer.weight.grad.full_tensor()[0, 0].item()
        dist.get_rank() or print(f"{ranks} rank(s), {reduced_in}: gradient {gradient}, wanted {ranks / 4}", flush=True)
dist.destroy_process_group()
