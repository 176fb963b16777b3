"""Layouts of tokens and columns: the global positions that each rank holds, as torch index arrays.

These arguments mean the same throughout the package, unless a function says otherwise:

    size                global length of the sharded dim
    world, cp_size      number of ranks that the dim is sharded over
    cp_rank             the calling rank
    device              device of the index arrays; None: torch's default
    input_              an unsharded tensor: [t, w] with `cu_seqlens`, [b, s, w] without
    cu_seqlens          offsets of the sequences in the stream: non-decreasing integers from 0
"""

from torch_impl.layouts.divisibility import indivisible as indivisible
from torch_impl.layouts.divisibility import needs as needs
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

# Every layout by name, for tests and drawings.
BUILTIN = {
    "contiguous": contiguous,
    "dual_chunk_swap": dual_chunk_swap,
    "packed": packed,
    "ragged": ragged,
    "striped": striped,
}
