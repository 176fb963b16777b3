"""The borders of rank 1 of 2 in a stream of 16 tokens, from a buffer that two steps fill."""

import torch
from fla.ops.cp.context import get_cp_cu_seqlens

buffer = torch.tensor([0, 4, 16])
for step, borders in enumerate(([0, 4, 16], [0, 12, 16]), 1):
    buffer.copy_(torch.tensor(borders))
    same = get_cp_cu_seqlens(buffer, world_size=2, rank=1).cu_seqlens.tolist()
    other = get_cp_cu_seqlens(buffer.clone(), world_size=2, rank=1).cu_seqlens.tolist()
    print(f"step {step}, {borders}: from the buffer {same}, from a new tensor {other}")
