"""verl's five ways to aggregate losses, one of which is NaN where the mask is 0."""

import torch
from verl.trainer.ppo.core_algos import agg_loss

mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
losses = torch.tensor([[1.0, 2.0, float("nan")], [1.0, 2.0, 3.0]])
for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"):
    wanted = agg_loss(losses.nan_to_num(0.0), mask, mode).item()
    print(f"{mode}: {agg_loss(losses, mask, mode).item():.4f}, wanted {wanted:.4f}")
