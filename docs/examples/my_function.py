"""A function on DTensors, as code that runs already has it, and inputs for it: `shardproof new` makes it a scheme."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def scaled_logits(hidden: DTensor, weight: DTensor, scale: float = 2.0) -> DTensor:
    return scale * (hidden @ weight)


def inputs(mesh):
    hidden = distribute_tensor(torch.randn(4, 6), mesh, [Replicate()])
    weight = distribute_tensor(torch.randn(6, 8), mesh, [Shard(1)])
    return {"hidden": hidden, "weight": weight}
