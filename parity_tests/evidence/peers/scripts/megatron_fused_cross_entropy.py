"""Megatron's cross entropies of float32 logits: how far each gradient is from torch's, and its dtype's step."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

dist.init_process_group("gloo")
rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
logits = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
target = torch.arange(8).view(4, 2)
exact = logits.double().requires_grad_()
torch.nn.functional.cross_entropy(exact.flatten(0, 1), target.flatten(), reduction="sum").backward()
losses = {
    "vocab_parallel_cross_entropy": lambda x: vocab_parallel_cross_entropy(x, target),
    "fused_vocab_parallel_cross_entropy": lambda x: fused_vocab_parallel_cross_entropy(x, target, group),
}
for name, loss in losses.items():
    x = logits.chunk(ranks, -1)[rank].clone().requires_grad_()
    loss(x * 1).sum().backward()
    error = (x.grad - exact.grad.chunk(ranks, -1)[rank]).abs().max().item()
    is_rounded = torch.equal(x.grad.bfloat16().float(), x.grad)
    if rank == 0:
        print(f"{name}: largest error {error:.0e}; every element is a bfloat16 number: {is_rounded}")
dist.destroy_process_group()
