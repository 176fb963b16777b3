"""Where tokens and columns live: the global positions that each rank holds, as torch index arrays.

Arguments that mean this wherever a function says nothing else:

    size                length of the dim that is cut, over all ranks
    world, cp_size      number of ranks that it is cut over
    cp_rank             the rank that asks
    device              where the arrays stand; None: torch's default
    input_              a tensor of whole streams: [t, w] with `cu_seqlens`, [b, s, w] without
    cu_seqlens          offsets of the sequences in the stream, integers from 0 that never decrease
"""

from torch_impl.layouts.divisibility import needs as needs
from torch_impl.layouts.divisibility import uncuttable as uncuttable
from torch_impl.layouts.index_arrays import contiguous as contiguous
from torch_impl.layouts.index_arrays import draw as draw
from torch_impl.layouts.index_arrays import dual_chunk_swap as dual_chunk_swap
from torch_impl.layouts.index_arrays import inverse as inverse
from torch_impl.layouts.index_arrays import packed as packed
from torch_impl.layouts.index_arrays import ragged as ragged
from torch_impl.layouts.index_arrays import striped as striped
from torch_impl.layouts.reorder import _deinterleave_packed_seqs as _deinterleave_packed_seqs
from torch_impl.layouts.reorder import _redo_attention_load_balancing as _redo_attention_load_balancing
from torch_impl.layouts.reorder import _reinterleave_packed_seqs as _reinterleave_packed_seqs
from torch_impl.layouts.reorder import _reorder_chunks as _reorder_chunks
from torch_impl.layouts.reorder import _undo_attention_load_balancing as _undo_attention_load_balancing
from torch_impl.layouts.token_layout import TokenLayout as TokenLayout

BUILTIN = {
    "contiguous": contiguous,
    "dual_chunk_swap": dual_chunk_swap,
    "packed": packed,
    "ragged": ragged,
    "striped": striped,
}
