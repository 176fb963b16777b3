"""Context parallelism: batches cut over cp, and attention over any sequence layout."""

from torch_impl.context_parallel.batch_te import _shard_thd_chunk_for_te as _shard_thd_chunk_for_te
from torch_impl.context_parallel.batch_te import make_cp_batch_for_te as make_cp_batch_for_te
from torch_impl.context_parallel.thd import process_input_for_thd as process_input_for_thd
from torch_impl.context_parallel.thd import split_batch_into_thd_chunks as split_batch_into_thd_chunks
