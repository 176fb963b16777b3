"""Row blocks: every row once, in order, as a view."""

import pytest
import torch

from torch_impl.vocab_parallel.statistics import row_blocks, rows_per_block

WHOLE = torch.arange(3 * 5 * 4.0).view(3, 5, 4)
VIEWS = {
    "contiguous": WHOLE,
    "short": WHOLE[:, :-1],
    "transposed": WHOLE.transpose(0, 1),
    "columns first": WHOLE.permute(2, 1, 0),
    "expanded": WHOLE[:, :1].expand(3, 5, 4),
    "one row": WHOLE[0, 0],
    "two dims": WHOLE[1],
    "four dims": WHOLE.view(3, 5, 2, 2),
    "no rows": WHOLE[:, :0],
    "no columns": WHOLE[..., :0],
}


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize("name", VIEWS)
def test_blocks_are_views_that_cover_the_rows_in_order(name, rows):
    x = VIEWS[name]
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    blocks = list(row_blocks(x, rows))
    assert torch.equal(torch.cat([view for _, view in blocks]), flat)
    assert [part.start for part, _ in blocks] == [0, *(part.stop for part, _ in blocks)][:-1]
    for part, view in blocks:
        assert torch.equal(view, flat[part]) and len(view) <= rows
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_chunk_counts_positions_of_each_sequence():
    assert rows_per_block(torch.empty(4, 6, 8), 3) == 12
    assert rows_per_block(torch.empty(6, 8), 3) == 3
    assert rows_per_block(torch.empty(0, 6, 8), 3) == 1


def test_automatic_blocks_have_a_mebibyte_in_the_accumulation_dtype():
    assert rows_per_block(torch.empty(4, 6, 1024), None) == 256
    assert rows_per_block(torch.empty(4, 6, 1024, dtype=torch.bfloat16), None) == 256
    assert rows_per_block(torch.empty(4, 6, 1024, dtype=torch.float64), None) == 128
    assert rows_per_block(torch.empty(1, 1, 1 << 20), None) == 1
