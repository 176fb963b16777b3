"""Megatron's vocabulary-parallel cross entropy with label smoothing, beside the same logits on one rank."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

dist.init_process_group("gloo")
rank, logits, target = dist.get_rank(), torch.tensor([[[0.0, 1.0, 2.0, 4.0]]]), torch.tensor([[1]])
for ranks in (1, 2):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    for smoothing in (0.0, 0.1):
        shard = logits.chunk(ranks, -1)[rank % ranks].clone()
        loss = tensor_parallel.vocab_parallel_cross_entropy(shard, target, smoothing).item()
        print(f"rank {rank} of tp={ranks}, label_smoothing={smoothing}: loss {loss:.4f}\n", end="", flush=True)
dist.destroy_process_group()
