"""Where positions live, from the definition, in NumPy alone; the harness cuts and stitches with these."""

from jax_ref.layouts.contiguous import contiguous as contiguous
from jax_ref.layouts.draw import draw as draw
from jax_ref.layouts.dual_chunk_swap import dual_chunk_swap as dual_chunk_swap
from jax_ref.layouts.inverse import inverse as inverse
from jax_ref.layouts.needs import needs as needs
from jax_ref.layouts.needs import uncuttable as uncuttable
from jax_ref.layouts.packed import packed as packed
from jax_ref.layouts.partition import check_partition as check_partition
from jax_ref.layouts.ragged import ceil_lengths as ceil_lengths
from jax_ref.layouts.ragged import ragged as ragged
from jax_ref.layouts.striped import striped as striped

BUILTIN = {
    "contiguous": contiguous,
    "dual_chunk_swap": dual_chunk_swap,
    "packed": packed,
    "ragged": ragged,
    "striped": striped,
}
