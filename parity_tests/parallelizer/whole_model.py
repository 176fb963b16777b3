"""One process, the whole model, plain torch: what transformers computes without any parallelizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from parity_tests.parallelizer.families import IGNORED, Chosen, made

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the token losses, in the logits' dtype or float32, whichever is wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def trained(chosen: Chosen, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Loss, logits and gradients of the first batch, weights after a step of AdamW for each; arrays by name."""
    model, found = made(chosen), {}
    named = dict(model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for ids, targets in batches:
        optimizer.zero_grad()
        logits = model(input_ids=torch.from_numpy(ids)).logits
        loss = summed_loss(logits, torch.from_numpy(targets)) / int((targets != IGNORED).sum())
        loss.backward()
        if not found:
            found = {"loss": loss.item(), "logits": logits.detach().numpy()}
            found["gradients"] = {name: p.grad.numpy().copy() for name, p in named.items()}
        optimizer.step()
    return {**found, "weights": {name: p.detach().numpy() for name, p in named.items()}}
