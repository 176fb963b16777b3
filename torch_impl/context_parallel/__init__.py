"""Context parallelism: batches sharded over cp, and attention over any sequence layout.

Arguments with one meaning throughout the package, unless a function says otherwise:

    batch                    a dict of tensors by name, from a data loader, the same on each rank of cp
    cp_mesh                  the 1-D mesh of cp; None for one rank
    device_mesh              a mesh; its dim named cp is used
    padding_token_id         the token id of padding
    seq_lens_padding_value   the negative number that fills a row of a table of lengths after its last sequence
    num_chunks               number of streams that the rows are split into: the micro-batches of a pipeline
"""

from torch_impl.context_parallel.attention import context_parallel_attention as context_parallel_attention
from torch_impl.context_parallel.attention_cost import attention_bytes as attention_bytes
from torch_impl.context_parallel.attention_cost import fewest_bytes as fewest_bytes
from torch_impl.context_parallel.batch_ctx import _build_position_ids as _build_position_ids
from torch_impl.context_parallel.batch_ctx import make_cp_batch_and_ctx as make_cp_batch_and_ctx
from torch_impl.context_parallel.batch_layout import BatchLayout as BatchLayout
from torch_impl.context_parallel.batch_te import _shard_thd_chunk_for_te as _shard_thd_chunk_for_te
from torch_impl.context_parallel.batch_te import make_cp_batch_for_te as make_cp_batch_for_te
from torch_impl.context_parallel.key_routes import KeyTraffic as KeyTraffic
from torch_impl.context_parallel.key_routes import key_traffic as key_traffic
from torch_impl.context_parallel.model_hooks import ModelHooks as ModelHooks
from torch_impl.context_parallel.model_hooks import adapt_model_to_context as adapt_model_to_context
from torch_impl.context_parallel.sdpa_mode import local_attention as local_attention
from torch_impl.context_parallel.thd import process_input_for_thd as process_input_for_thd
from torch_impl.context_parallel.thd import split_batch_into_thd_chunks as split_batch_into_thd_chunks
from torch_impl.context_parallel.train_context import create_context_parallel_ctx as create_context_parallel_ctx
from torch_impl.context_parallel.train_context import get_train_context as get_train_context
