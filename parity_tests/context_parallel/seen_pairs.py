"""The pairs of queries and keys that blocks meet, counted one by one."""

import numpy as np
import torch

from torch_impl.context_parallel.block_schedule import schedule_of
from torch_impl.layouts import TokenLayout

KINDS = ("packed", "contiguous", "striped")


def streams(lengths, kind, cp):
    """The layout of every rank, with a padding token at the end of each sequence of 16."""
    padded = np.cumsum([0, *lengths])
    real = np.cumsum([0, *(length - (length == 16) for length in lengths)])
    return [TokenLayout.packed(padded.tolist(), real.tolist(), cp_size=cp, cp_rank=r, kind=kind) for r in range(cp)]


def times_seen(layout, causal, window):
    """How often each query of a rank meets each key of the stream."""
    pairs = [np.zeros(0, np.int64)]  # each as query * total + key
    for source, blocks in enumerate(schedule_of(layout, causal, window).blocks):
        for block in (part for coarse in blocks for part in coarse.triangle_blocks):
            queries, keys = (
                torch.arange(layout.total)[rows][None] if isinstance(rows, slice) else rows
                for rows in (block.queries, block.keys)
            )
            for run in range(len(queries)):
                seen = np.ones((queries.shape[1], keys.shape[1]), bool)
                if block.is_causal:
                    seen = np.tril(seen)
                if block.mask is not None:
                    seen &= block.mask.expand(len(queries), -1, -1, -1)[run, 0].numpy()
                if block.is_query is not None:
                    seen &= block.is_query[run].numpy()[:, None]
                i = layout.index[layout.cp_rank][queries[run]].numpy()
                j = layout.index[source][keys[run]].numpy()
                rows, columns = seen.nonzero()
                pairs.append(i[rows] * layout.total + j[columns])
    counts = np.bincount(np.concatenate(pairs), minlength=layout.total**2)
    return counts.reshape(layout.total, layout.total)
