"""Context parallelism: batches cut over cp, and attention over any sequence layout.

Arguments that mean this wherever a function says nothing else:

    batch                    a dict of tensors by name, as a data loader makes it, the same on each rank of cp
    cp_mesh                  the mesh of cp alone; None for one rank
    device_mesh              a mesh of which the axis cp is taken by its name
    padding_token_id         the id that stands at padding
    seq_lens_padding_value   what says in a table of lengths that a row has no further sequence; negative
    num_chunks               streams that rows are shared over: the microbatches of a pipeline
"""

from torch_impl.context_parallel.attention import context_parallel_attention as context_parallel_attention
from torch_impl.context_parallel.attention_cost import attention_bytes as attention_bytes
from torch_impl.context_parallel.attention_cost import fewest_bytes as fewest_bytes
from torch_impl.context_parallel.batch_ctx import _build_position_ids as _build_position_ids
from torch_impl.context_parallel.batch_ctx import make_cp_batch_and_ctx as make_cp_batch_and_ctx
from torch_impl.context_parallel.batch_te import _shard_thd_chunk_for_te as _shard_thd_chunk_for_te
from torch_impl.context_parallel.batch_te import make_cp_batch_for_te as make_cp_batch_for_te
from torch_impl.context_parallel.thd import process_input_for_thd as process_input_for_thd
from torch_impl.context_parallel.thd import split_batch_into_thd_chunks as split_batch_into_thd_chunks
from torch_impl.context_parallel.train_context import create_context_parallel_ctx as create_context_parallel_ctx
from torch_impl.context_parallel.train_context import get_train_context as get_train_context
