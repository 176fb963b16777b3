"""The slice of 0..7 that verl gives each of two ranks, of a group that is given and of one that is set."""

import torch
import torch.distributed as dist
from verl.utils import ulysses

dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.arange(8)
given = ulysses.slice_input_tensor(x, 0, group=dist.group.WORLD).tolist()
ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
is_set = ulysses.slice_input_tensor(x, 0).tolist()
print(f"rank {rank}: group given {given}, group set {is_set}\n", end="", flush=True)
dist.destroy_process_group()
