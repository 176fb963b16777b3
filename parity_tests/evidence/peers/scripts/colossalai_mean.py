"""The mean of two tokens' losses of sharded logits, beside the mean for the same logits on one device."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.shardformer.layer.loss import cross_entropy_1d

dist.init_process_group("gloo")
for logit in (10.0, 20.0):
    logits, target = torch.zeros(1, 2, 4), torch.tensor([[0, 3]])
    logits[0, 0, 0] = logit  # the first token is sure of its label, the second is not
    shard = logits.chunk(2, -1)[dist.get_rank()].clone()
    loss = cross_entropy_1d(shard, target, process_group=dist.group.WORLD, vocab_size=4, dtype=torch.float32)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    dist.get_rank() or print(f"logit {logit}: {loss.item():.4f}, on one device {expected.item():.4f}")
dist.destroy_process_group()
