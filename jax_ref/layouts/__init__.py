"""The positions of each rank under a layout, in NumPy alone, so that ranks need not import JAX."""

from jax_ref.layouts.reference import DIGITS as DIGITS
from jax_ref.layouts.reference import ceil_lengths as ceil_lengths
from jax_ref.layouts.reference import check_partition as check_partition
from jax_ref.layouts.reference import contiguous as contiguous
from jax_ref.layouts.reference import conv_channels as conv_channels
from jax_ref.layouts.reference import draw as draw
from jax_ref.layouts.reference import dual_chunk_swap as dual_chunk_swap
from jax_ref.layouts.reference import indivisible as indivisible
from jax_ref.layouts.reference import inverse as inverse
from jax_ref.layouts.reference import needs as needs
from jax_ref.layouts.reference import packed as packed
from jax_ref.layouts.reference import padding_mask as padding_mask
from jax_ref.layouts.reference import position_ids as position_ids
from jax_ref.layouts.reference import projection_columns as projection_columns
from jax_ref.layouts.reference import ragged as ragged
from jax_ref.layouts.reference import reorder_chunks as reorder_chunks
from jax_ref.layouts.reference import sequence_ids as sequence_ids
from jax_ref.layouts.reference import striped as striped

BUILTIN = {
    "contiguous": contiguous,
    "dual_chunk_swap": dual_chunk_swap,
    "packed": packed,
    "ragged": ragged,
    "striped": striped,
}
