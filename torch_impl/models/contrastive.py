"""A contrastive loss over dp: each query against the keys of all ranks, and each key against all queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator, no_autocast
from torch_impl.collectives.gathers import gather_rows
from torch_impl.collectives.plain import all_gather_stack
from torch_impl.contract import Group, PositiveInt, Rejected, Sharded, contract, dtype_name


@contract
def contrastive_loss(
    queries: Sharded[Tensor, "b/dp d"],
    keys: Sharded[Tensor, "b/dp d"],
    log_scale: Sharded[Tensor, "dp=R"],
    dp_group: Group[ProcessGroup, "dp"],
    *,
    averaged_over: PositiveInt = 1,
) -> Sharded[Tensor, "dp=P"]:
    """This rank's share of the InfoNCE loss in both directions, as CLIP's: row i of `keys` belongs to query i.

        z[i, j] = exp(log_scale) <queries[i], keys[j]>
        loss    = mean over i of  -(log softmax_j z[i, j] + log softmax_j z[j, i]) / 2  at j = i

    The mean is over the pairs of all ranks of `dp_group`, which may have unequally many, or none; the loss of a step
    without pairs is 0. Pass normalised vectors for a cosine, and the log of the inverse temperature as `log_scale`.
    Gradients of queries and keys contain their terms as negatives of other ranks. That of `log_scale` is the sum over
    dp. `averaged_over` is the number of ranks that gradients are averaged over afterwards: dp under FSDP, 1 if they are
    summed.

    Products run in the dtype of the queries, also under autocast; the softmax and its sums in float32 or wider.

    Cost:   forward 1 all_gather of one int64, with a host read (none for dp=1), and 1 all_gather of queries and keys
            together, padded to the most pairs of a rank; backward 1 reduce_scatter of all of them, bfloat16 and float16
            as float32. Holds the vectors of all ranks and 2 * b/dp * b scores.
    Errors: TypeError for tensors that are not floating, or a group of another type; ValueError if shapes or dtypes
            differ, or for a `log_scale` with dims.
    Source: arXiv 2103.00020, section 2.3.
    """
    if queries.dtype != keys.dtype:
        raise Rejected(f"keys is {dtype_name(keys)} but queries is {dtype_name(queries)}; convert one of them")
    # 1. Gather the vectors of all ranks. Every rank's scores have them, so their gradients are summed over ranks.
    rank, d = dp_group.rank(), queries.shape[1]
    counts = all_gather_stack(torch.tensor(len(queries), device=queries.device), dp_group).tolist()
    both = gather_rows(torch.cat([queries, keys], 1), dp_group, counts, "R")
    all_queries, all_keys = both.split(d, 1)
    # 2. This rank's rows of the scores, in both directions. The pair of row i is this rank's row i.
    wide = accumulator(queries.dtype)
    pair = sum(counts[:rank]) + torch.arange(len(queries), device=queries.device)
    with no_autocast(queries.device):
        scores = queries @ all_keys.T, keys @ all_queries.T
        scale = log_scale.to(wide).exp()
        losses = [F.cross_entropy(scale * each.to(wide), pair, reduction="sum") for each in scores]
    return torch.stack(losses).sum() * (averaged_over / (2 * max(sum(counts), 1)))
