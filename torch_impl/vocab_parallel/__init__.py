"""Softmax, log-probabilities, top-k and sampling of logits whose vocabulary is sharded over the ranks of a group.

`fused_logprob` has the formula, its forward and its backward; `logprob` has the public functions. The functions in
`adapters` have the names of other libraries and only pass their arguments on. A table in
`docs/reference/vocab-parallel.md` says when each of the six routes to a softmax and to a sampler's bounds is taken.

These arguments mean the same throughout the package, unless a function says otherwise:

    vocab_start_index, vocab_end_index   this rank's columns are the ids [vocab_start_index, vocab_end_index)
    tp_group, vocab_parallel_group       the ranks over which the vocabulary is sharded
    vocab_parallel_rank                  this rank's index in the tp group
    cp_group, context_parallel_group     the ranks over which the sequence is sharded; None for a full sequence
    cp_rank                              a rank of the cp group
    input_ids, target                    token ids, unshifted unless a function says otherwise
    seq_index                            the original position of each stored position
    seq_dim                              the dim of the sequence
    chunk_size                           rows per block: b * chunk_size; bounds memory and changes no value
    inference_only                       save nothing; backward raises an error
    sampling_params                      a TrainingSamplingParams, or None for no scaling and no filter
    with_entropy                         return a pair: the result and the negative entropy, sum p log p
    temperature                          the divisor of the logits
    top_k, top_p, min_p                  the sampler's filters, see TrainingSamplingParams
"""

from torch_impl.vocab_parallel.adapters.columns import group_all_reduce_sum as group_all_reduce_sum
from torch_impl.vocab_parallel.adapters.columns import vocab_parallel_argmax as vocab_parallel_argmax
from torch_impl.vocab_parallel.adapters.columns import (
    vocab_parallel_full_log_softmax as vocab_parallel_full_log_softmax,
)
from torch_impl.vocab_parallel.adapters.columns import vocab_parallel_gather_columns as vocab_parallel_gather_columns
from torch_impl.vocab_parallel.adapters.gpt_model import (
    _gpt_forward_with_linear_ce_fusion as _gpt_forward_with_linear_ce_fusion,
)
from torch_impl.vocab_parallel.adapters.gpt_model import (
    patch_gpt_model_forward_for_linear_ce_fusion as patch_gpt_model_forward_for_linear_ce_fusion,
)
from torch_impl.vocab_parallel.adapters.next_token import (
    dtensor_from_parallel_logits_to_logprobs as dtensor_from_parallel_logits_to_logprobs,
)
from torch_impl.vocab_parallel.adapters.next_token import (
    from_parallel_logits_to_logprobs as from_parallel_logits_to_logprobs,
)
from torch_impl.vocab_parallel.adapters.next_token import (
    get_logprobs_from_vocab_parallel_logits as get_logprobs_from_vocab_parallel_logits,
)
from torch_impl.vocab_parallel.adapters.row_exchange import all_to_all_sq2vp as all_to_all_sq2vp
from torch_impl.vocab_parallel.adapters.row_exchange import all_to_all_vp2sq as all_to_all_vp2sq
from torch_impl.vocab_parallel.contiguous_sequence import (
    cp_load_balanced_to_contiguous as cp_load_balanced_to_contiguous,
)
from torch_impl.vocab_parallel.contiguous_sequence import cp_shift_next as cp_shift_next
from torch_impl.vocab_parallel.cross_entropy import DistributedCrossEntropy as DistributedCrossEntropy
from torch_impl.vocab_parallel.distillation import (
    get_distillation_topk_logprobs_from_logits as get_distillation_topk_logprobs_from_logits,
)
from torch_impl.vocab_parallel.kl_divergence import vocab_parallel_kl as vocab_parallel_kl
from torch_impl.vocab_parallel.linear_logprob import (
    ChunkedDistributedHiddenStatesToLogprobs as ChunkedDistributedHiddenStatesToLogprobs,
)
from torch_impl.vocab_parallel.linear_logprob import (
    from_parallel_hidden_states_to_logprobs as from_parallel_hidden_states_to_logprobs,
)
from torch_impl.vocab_parallel.logprob import ChunkedDistributedEntropy as ChunkedDistributedEntropy
from torch_impl.vocab_parallel.logprob import ChunkedDistributedGatherLogprob as ChunkedDistributedGatherLogprob
from torch_impl.vocab_parallel.logprob import ChunkedDistributedLogprob as ChunkedDistributedLogprob
from torch_impl.vocab_parallel.logprob import DistributedLogprob as DistributedLogprob
from torch_impl.vocab_parallel.logprob import vocab_parallel_logprob as vocab_parallel_logprob
from torch_impl.vocab_parallel.next_token import (
    get_next_token_logprobs_from_logits as get_next_token_logprobs_from_logits,
)
from torch_impl.vocab_parallel.packed import (
    from_parallel_logits_to_logprobs_packed_sequences as from_parallel_logits_to_logprobs_packed_sequences,
)
from torch_impl.vocab_parallel.sampling import (
    ChunkedDistributedLogprobWithSampling as ChunkedDistributedLogprobWithSampling,
)
from torch_impl.vocab_parallel.sampling import DistributedLogprobWithSampling as DistributedLogprobWithSampling
from torch_impl.vocab_parallel.sampling import TrainingSamplingParams as TrainingSamplingParams
from torch_impl.vocab_parallel.sequence_gather import AllGatherCPTensor as AllGatherCPTensor
from torch_impl.vocab_parallel.sequence_gather import _get_tokens_on_this_cp_rank as _get_tokens_on_this_cp_rank
from torch_impl.vocab_parallel.sequence_gather import allgather_cp_sharded_tensor as allgather_cp_sharded_tensor
from torch_impl.vocab_parallel.softmax import _compute_distributed_log_softmax as _compute_distributed_log_softmax
from torch_impl.vocab_parallel.softmax import _compute_distributed_softmax as _compute_distributed_softmax
from torch_impl.vocab_parallel.softmax import vocab_parallel_log_softmax as vocab_parallel_log_softmax
from torch_impl.vocab_parallel.tokens_ahead import tokens_ahead as tokens_ahead
from torch_impl.vocab_parallel.topk import distributed_vocab_topk as distributed_vocab_topk
from torch_impl.vocab_parallel.topk import gather_logits_at_global_indices as gather_logits_at_global_indices
