"""All injected bugs, one file of data for each component; those of vocab_parallel by topic.

The files are long because they are tables: an entry is looked up by its name.
"""

from parity_tests.injected_bugs.catalogue import (
    calls_backward,
    calls_storage,
    collectives,
    context_parallel,
    layouts,
    mamba,
    models,
    optimizers,
    parallelizer,
    pipelining,
    vocab_parallel_columns,
    vocab_parallel_entropy,
    vocab_parallel_logprob,
    vocab_parallel_long,
    vocab_parallel_selection,
    vocab_parallel_sequences,
    vocab_parallel_small,
)
from parity_tests.injected_bugs.injected_bug import KINDS

CATALOGUE = (
    *collectives.BUGS,
    *context_parallel.BUGS,
    *layouts.BUGS,
    *mamba.BUGS,
    *models.BUGS,
    *optimizers.BUGS,
    *parallelizer.BUGS,
    *pipelining.BUGS,
    *vocab_parallel_columns.BUGS,
    *vocab_parallel_entropy.BUGS,
    *vocab_parallel_logprob.BUGS,
    *vocab_parallel_long.BUGS,
    *vocab_parallel_selection.BUGS,
    *vocab_parallel_sequences.BUGS,
    *vocab_parallel_small.BUGS,
    *calls_storage.BUGS,
    *calls_backward.BUGS,
)
WITHOUT_A_COMPONENT = {"random": "no scheme draws random numbers"}
APPLICABLE = tuple(kind for kind in KINDS if kind not in WITHOUT_A_COMPONENT)
