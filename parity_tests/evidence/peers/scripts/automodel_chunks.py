"""Three rows of four tokens in two chunks: how many tokens come out, and which keys."""

import torch
from nemo_automodel.components.distributed.thd_utils import split_batch_into_thd_chunks

tokens, lengths = torch.arange(1, 13).view(3, 4), torch.full((3, 1), 4)
batch = dict(input_ids=tokens, labels=tokens, position_ids=torch.arange(4).repeat(3, 1))
batch |= dict(seq_lens=lengths, seq_lens_padded=lengths, pixel_values=torch.zeros(3, 5))
for chunks in (1, 2):
    out = split_batch_into_thd_chunks(batch, chunks)
    print(f"{chunks} chunk(s): {out['input_ids'].numel()} of 12 tokens, pixel_values kept: {'pixel_values' in out}")
