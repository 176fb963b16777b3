"""All faults, and the kinds that have a component to live in."""

from parity_tests.faults import (
    attention,
    attention_exchanges,
    batches,
    collectives,
    distillation,
    entropies,
    kept_set,
    layouts,
    linear_logprob,
    mamba,
    next_token,
    packed,
    radix,
    recreated,
    row_exchange,
    sampling,
    sequence_gather,
    several_ids,
    state_passing,
    token_layout,
    topk,
    vocab_parallel,
)
from parity_tests.faults.fault import KINDS

CATALOGUE = (
    *attention.FAULTS,
    *attention_exchanges.FAULTS,
    *batches.FAULTS,
    *collectives.FAULTS,
    *distillation.FAULTS,
    *entropies.FAULTS,
    *kept_set.FAULTS,
    *layouts.FAULTS,
    *linear_logprob.FAULTS,
    *mamba.FAULTS,
    *next_token.FAULTS,
    *packed.FAULTS,
    *radix.FAULTS,
    *row_exchange.FAULTS,
    *sampling.FAULTS,
    *sequence_gather.FAULTS,
    *several_ids.FAULTS,
    *state_passing.FAULTS,
    *token_layout.FAULTS,
    *topk.FAULTS,
    *vocab_parallel.FAULTS,
    *recreated.FAULTS,
)
WITHOUT_A_COMPONENT = {"random": "no scheme draws random numbers"}
APPLICABLE = tuple(kind for kind in KINDS if kind not in WITHOUT_A_COMPONENT)
