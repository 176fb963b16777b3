"""Where tokens and columns live: the global positions that each rank holds, as torch index arrays."""

from torch_impl.layouts.contiguous import contiguous as contiguous
from torch_impl.layouts.draw import draw as draw
from torch_impl.layouts.dual_chunk_swap import dual_chunk_swap as dual_chunk_swap
from torch_impl.layouts.inverse import inverse as inverse
from torch_impl.layouts.needs import needs as needs
from torch_impl.layouts.needs import uncuttable as uncuttable
from torch_impl.layouts.packed import packed as packed
from torch_impl.layouts.ragged import ragged as ragged
from torch_impl.layouts.reorder import _deinterleave_packed_seqs as _deinterleave_packed_seqs
from torch_impl.layouts.reorder import _redo_attention_load_balancing as _redo_attention_load_balancing
from torch_impl.layouts.reorder import _reinterleave_packed_seqs as _reinterleave_packed_seqs
from torch_impl.layouts.reorder import _reorder_chunks as _reorder_chunks
from torch_impl.layouts.reorder import _undo_attention_load_balancing as _undo_attention_load_balancing
from torch_impl.layouts.striped import striped as striped
from torch_impl.layouts.token_layout import TokenLayout as TokenLayout

BUILTIN = {
    "contiguous": contiguous,
    "dual_chunk_swap": dual_chunk_swap,
    "packed": packed,
    "ragged": ragged,
    "striped": striped,
}
