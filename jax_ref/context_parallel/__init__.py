"""References for context parallelism: attention and batches on one device."""

from jax_ref.context_parallel.reference import attention as attention
from jax_ref.context_parallel.reference import continued_attention as continued_attention
from jax_ref.context_parallel.reference import continued_positions as continued_positions
from jax_ref.context_parallel.reference import dense_attention as dense_attention
from jax_ref.context_parallel.reference import layer_with_cross_attention as layer_with_cross_attention
from jax_ref.context_parallel.reference import packed_attention as packed_attention
from jax_ref.context_parallel.reference import packed_batch as packed_batch
from jax_ref.context_parallel.reference import padded_batch as padded_batch
from jax_ref.context_parallel.reference import seen_pairs as seen_pairs
from jax_ref.context_parallel.reference import shard_and_squares as shard_and_squares
from jax_ref.context_parallel.reference import slots as slots
from jax_ref.context_parallel.reference import stream as stream
from jax_ref.context_parallel.reference import tables as tables
