"""Parity of vocab_parallel.logprob on real text: peaked logits with ties and -inf, targets the real next bytes."""

import numpy as np
import pytest

from parity_tests.vocab_parallel.test_logprob import (
    chunked_distributed_logprob,
    distributed_logprob,
    vocab_parallel_logprob,
)
from shardproof.cli import real_text

SCHEMES = (vocab_parallel_logprob, distributed_logprob, chunked_distributed_logprob)


@pytest.mark.fast_values(6)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_log_probabilities_of_real_text(scheme, tp, dtype):
    real_text.read_with(scheme, tp, dtype).report.raise_if_failed()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_perplexity_equals_the_reference_to_every_digit_shown(tp):
    reading = real_text.read_with(vocab_parallel_logprob, tp, "float64")
    assert reading.perplexity == reading.reference
    assert 1.0 < float(reading.perplexity) < real_text.BYTES


def test_processes_read_as_lockstep_does():
    reading = real_text.read_with(vocab_parallel_logprob, 2, "float64", engine="gloo")
    assert reading.ok
    assert reading.perplexity == real_text.read_with(vocab_parallel_logprob, 2, "float64").perplexity


def test_the_text_has_ties_and_pairs_that_never_occur():
    logits, target = real_text.passages()
    best = logits.max(-1)
    followed = np.take_along_axis(logits, target[..., None], -1)
    assert len(real_text.text()) > 100_000
    assert np.isneginf(logits).any(-1).all()  # every row has pairs that never occur
    assert ((logits == best[..., None]) & np.isfinite(logits)).any(-1).all()
    assert any(
        len(np.unique(row[np.isfinite(row)])) < np.isfinite(row).sum() for row in logits.reshape(-1, 256)
    )  # ties
    assert np.isfinite(followed).all()  # each next token has occurred before
    assert (best[..., None] > followed).any()  # and is not always the likeliest
