"""The reference against transformers in one process, and further properties of a decoder."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from jax_ref.parallelizer import EMBEDDING, HEAD, DecoderTraits, by_name, from_state_dict
from parity_tests.parallelizer.families import OWN, Chosen, arrays, batch, model_of
from parity_tests.parallelizer.reference import reference
from parity_tests.parallelizer.training import PROMISED, broken, broken_on_ranks, deviation, trained
from shardproof.judge import bridge
from shardproof.judge.reference import evaluated

bridge.start()
LLAMA = Chosen("llama")
MODELS = [Chosen(family, tied) for family in OWN for tied in (False, True)]


@pytest.mark.fast_values(5)
@pytest.mark.parametrize("chosen", MODELS, ids=str)
def test_names_match_the_torch_state_dict(chosen):
    state = model_of(chosen).state_dict()
    decoder = from_state_dict(chosen.config, {name: tensor.numpy() for name, tensor in state.items()})
    local = by_name(DecoderTraits.of(chosen.config), nnx.state(decoder))
    assert set(local) == set(state)
    assert all(np.array_equal(local[name], tensor.numpy()) for name, tensor in state.items())


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("family", OWN)
def test_stages_are_the_full_model(family):
    chosen = Chosen(family)
    decoder, (ids, _) = from_state_dict(chosen.config, arrays(chosen)), batch(chosen, 2, 5)

    def in_stages(ids):
        x = decoder.embed(ids)
        for layer in decoder.layers:
            x = layer(x)
        return decoder.head(x)

    assert np.array_equal(evaluated(in_stages)(ids), evaluated(decoder)(ids))


@pytest.mark.parametrize("family", OWN)
def test_a_token_changes_nothing_before_it(family):
    chosen = Chosen(family)
    logits, (ids, _) = evaluated(from_state_dict(chosen.config, arrays(chosen))), batch(chosen, 1, 6)
    other = ids.copy()
    other[0, 4] = (other[0, 4] + 1) % chosen.config.vocab_size
    same = (logits(ids) == logits(other))[0].all(-1)
    assert same.tolist() == [True] * 4 + [False] * 2


def test_a_window_ends():
    """Of two layers with a window of three, a token reaches four tokens on and no farther."""
    chosen = Chosen("mistral")
    logits, (ids, _) = evaluated(from_state_dict(chosen.config, arrays(chosen))), batch(chosen, 1, 8)
    other = ids.copy()
    other[0, 1] = (other[0, 1] + 1) % chosen.config.vocab_size
    same = (logits(ids) == logits(other))[0].all(-1)
    assert same.tolist() == [True, *[False] * 5, True, True]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model.norm.weight": None}, r"parameters \['model.norm.weight'\] are missing, \[\] are unknown"),
        ({"model.norm.bias": np.zeros(12)}, r"\[\] are missing, \['model.norm.bias'\] are unknown"),
        ({"model.norm.weight": np.zeros(8)}, r"model.norm.weight is \(8,\); this configuration gives it \(12,\)"),
    ],
)
def test_parameters_of_another_model(edit, message):
    parameters = {name: array for name, array in {**arrays(LLAMA), **edit}.items() if array is not None}
    with pytest.raises(ValueError, match=message):
        from_state_dict(LLAMA.config, parameters)


def test_a_tied_head_that_differs():
    chosen = Chosen("llama", tied=True)
    parameters = arrays(chosen)
    from_state_dict(chosen.config, {**parameters, HEAD: parameters[EMBEDDING].copy()})
    with pytest.raises(ValueError, match=r"lm_head.weight is tied to model.embed_tokens.weight and differs from it"):
        from_state_dict(chosen.config, {**parameters, HEAD: parameters[EMBEDDING] + 1})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of llama, qwen2"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not one of silu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn' is not 'default'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not defined here"),
    ],
)
def test_a_configuration_that_is_not_stated(edit, message):
    config = LLAMA.config
    for name, value in edit.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=message):
        DecoderTraits.of(config)


def test_traits_are_data():
    assert dataclasses.is_dataclass(DecoderTraits) and hash(DecoderTraits.of(LLAMA.config))


def test_a_deviation_is_named_with_its_factor():
    want = {"a": np.arange(1.0, 4.0), "b": np.ones(2), "c": np.zeros(2)}
    assert broken(want, want) == []
    assert broken({**want, "b": np.full(2, 2.0)}, want) == ["b is 1.0e+00 off by the factor 2"]
    assert broken({**want, "b": np.array([1.0, 2.0])}, want) == ["b is 7.1e-01 off"]
    assert broken({**want, "c": np.ones(2)}, want) == ["c is inf off"]
    assert broken({**want, "a": np.ones(2)}, want) == ["a is inf off: (2,) for (3,)"]
    assert broken({"a": want["a"]}, want) == ["['b', 'c'] are missing, [] are unknown"]
    assert broken({**want, "b": want["b"] * np.nan}, want)[0].startswith("b is nan off")


def test_a_missing_sum_is_named():
    want, mesh = {"w": np.array([3.0, 5.0])}, {"dp": 2, "tp": 2}
    parts = [np.array([1.0, 4.0]), np.array([2.0, 1.0])]
    ranks = [{"w": parts[rank % 2]} for rank in range(4)]
    assert broken_on_ranks([want] * 4, want, mesh) == []
    assert broken_on_ranks(ranks, want, mesh)[-1] == "w misses a sum over tp"


WINDOWED = (("use_sliding_window", True), ("sliding_window", 3), ("max_window_layers", 1))
TRAINED = [
    *(Chosen(family, tied) for family in OWN for tied in (False, True)),
    Chosen("qwen2", changes=WINDOWED),  # one layer sees all, the next a window
    Chosen("gemma", tied=True, changes=(("pad_token_id", 3),)),  # whose embedding has no gradient from the lookup
    Chosen("llama", changes=(("num_key_value_heads", 1), ("num_hidden_layers", 1))),
]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("chosen", TRAINED, ids=str)
def test_three_steps_match_transformers(chosen):
    batches = [batch(chosen, 3, 7, seed) for seed in range(3)]
    ours, theirs = reference(chosen, batches), trained(chosen, batches)
    assert deviation(theirs["loss"], ours.steps[0].loss) <= PROMISED
    assert deviation(theirs["logits"], ours.steps[0].logits) <= PROMISED
    assert broken(theirs["gradients"], ours.steps[0].gradients) == []
    assert broken(theirs["weights"], ours.parameters) == []
