"""The largest element along a dim that is sharded so that one rank has none of it."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.tensor([[1.0], [2.0]]), mesh, [Shard(1)])  # two rows of one column: rank 1 has no column
for name in ("sum", "amax"):
    try:
        print(f"rank {dist.get_rank()}: {name} {getattr(x, name)(1).full_tensor().tolist()}\n", end="", flush=True)
    except (IndexError, RuntimeError) as error:
        words = str(error).partition("[")[0].strip() or "the connection to the other rank is lost"
        print(f"rank {dist.get_rank()}: {name} {type(error).__name__}: {words}\n", end="", flush=True)
