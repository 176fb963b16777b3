"""A gradient of norm 20, clipped to 1 by Automodel, in float32 and in bfloat16."""

import torch
from nemo_automodel.components.distributed.grad_utils import clip_grad_by_total_norm_

for dtype in (torch.float32, torch.bfloat16):
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    parameter.grad = torch.full((4,), 10.0, dtype=dtype)
    clip_grad_by_total_norm_([parameter], max_grad_norm=1.0, total_norm=20.0)
    print(f"{dtype}: norm {parameter.grad.float().norm().item():.4f}, wanted 1")
