"""How far the backward of verl's entropy moves its logits, in float32 and in bfloat16."""

import torch
import torch._dynamo
import torch.distributed as dist
from megatron.core import parallel_state
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy

torch._dynamo.config.disable = True  # the compiler is not needed for it, and takes a minute
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
for dtype in (torch.float32, torch.bfloat16):
    logits = (torch.randn(6, 8, generator=torch.Generator().manual_seed(0)) * 5).to(dtype).requires_grad_()
    before = logits.detach().clone()
    vocab_parallel_entropy(logits).sum().backward()
    moved = (logits.detach() - before).abs().max().item()
    dist.get_rank() or print(f"{dtype}: the logits moved by up to {moved:.1e}", flush=True)
dist.destroy_process_group()
