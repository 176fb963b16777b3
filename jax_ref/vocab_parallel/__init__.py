"""References for the vocab-parallel functions: softmax, log-probabilities, sampling, top-k and distillation."""

from jax_ref.vocab_parallel.reference import argmax as argmax
from jax_ref.vocab_parallel.reference import columns as columns
from jax_ref.vocab_parallel.reference import cross_entropy as cross_entropy
from jax_ref.vocab_parallel.reference import distillation as distillation
from jax_ref.vocab_parallel.reference import gather_logprob as gather_logprob
from jax_ref.vocab_parallel.reference import kl_divergence as kl_divergence
from jax_ref.vocab_parallel.reference import linear_logprob as linear_logprob
from jax_ref.vocab_parallel.reference import linear_next_token_logprob as linear_next_token_logprob
from jax_ref.vocab_parallel.reference import log_probabilities as log_probabilities
from jax_ref.vocab_parallel.reference import log_softmax as log_softmax
from jax_ref.vocab_parallel.reference import logits_at as logits_at
from jax_ref.vocab_parallel.reference import logits_of_hidden as logits_of_hidden
from jax_ref.vocab_parallel.reference import logprob as logprob
from jax_ref.vocab_parallel.reference import logprob_and_negative_entropy as logprob_and_negative_entropy
from jax_ref.vocab_parallel.reference import negative_entropy as negative_entropy
from jax_ref.vocab_parallel.reference import next_positions as next_positions
from jax_ref.vocab_parallel.reference import next_token_logprob as next_token_logprob
from jax_ref.vocab_parallel.reference import next_token_logprob_of_stored as next_token_logprob_of_stored
from jax_ref.vocab_parallel.reference import packed_next_token_logprob as packed_next_token_logprob
from jax_ref.vocab_parallel.reference import (
    packed_next_token_negative_entropy as packed_next_token_negative_entropy,
)
from jax_ref.vocab_parallel.reference import same as same
from jax_ref.vocab_parallel.reference import sampled_logprob as sampled_logprob
from jax_ref.vocab_parallel.reference import sampling_mask as sampling_mask
from jax_ref.vocab_parallel.reference import sequence as sequence
from jax_ref.vocab_parallel.reference import softmax as softmax
from jax_ref.vocab_parallel.reference import tokens_ahead as tokens_ahead
from jax_ref.vocab_parallel.reference import topk as topk
