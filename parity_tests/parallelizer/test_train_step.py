"""The reference against transformers in one process: every family, float64, every parameter."""

import pytest

from parity_tests.parallelizer.families import OWN, Chosen, batch
from parity_tests.parallelizer.promise import PROMISED, broken, deviation
from parity_tests.parallelizer.reference import reference
from parity_tests.parallelizer.whole_model import trained

WINDOWED = (("use_sliding_window", True), ("sliding_window", 3), ("max_window_layers", 1))
MODELS = [
    *(Chosen(family, tied) for family in OWN for tied in (False, True)),
    Chosen("qwen2", further=WINDOWED),  # one layer sees all, the next a window
    Chosen("gemma", tied=True, further=(("pad_token_id", 3),)),  # whose embedding has no gradient from the lookup
    Chosen("llama", further=(("num_key_value_heads", 1), ("num_hidden_layers", 1))),
]


@pytest.mark.parametrize("chosen", MODELS, ids=str)
def test_three_steps_are_those_of_transformers(chosen):
    batches = [batch(chosen, 3, 7, seed) for seed in range(3)]
    ours, theirs = reference(chosen, batches), trained(chosen, batches)
    assert deviation(theirs["loss"], ours.steps[0].loss) <= PROMISED
    assert deviation(theirs["logits"], ours.steps[0].logits) <= PROMISED
    assert broken(theirs["gradients"], ours.steps[0].gradients) == []
    assert broken(theirs["weights"], ours.parameters) == []
