"""Parity of pipelining.module_names: the specified cases by hand, laws, what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ref.pipelining.partition import layer_counts
from torch_impl.pipelining.module_names import MULTIMODAL, generate_hf_model_fqn_per_model_part

NAME = "pipelining.generate_hf_model_fqn_per_model_part"


def names(*args, **kwargs):
    return generate_hf_model_fqn_per_model_part(*args, include_multimodal_encoders=False, **kwargs)


def layers(*numbers):
    return [f"model.layers.{number}" for number in numbers]


EMBED, ROTARY, END = ["model.embed_tokens"], ["model.rotary_emb"], ["model.norm", "lm_head"]


@pytest.mark.parametrize(
    ("stages", "of_layers", "wanted"),
    [
        (1, 2, [[*EMBED, *layers(0, 1), *END, *ROTARY]]),
        (2, 5, [[*EMBED, *layers(0, 1, 2), *ROTARY], [*layers(3, 4), *END, *ROTARY]]),
        (
            3,
            8,
            [
                [*EMBED, *layers(0, 1, 2), *ROTARY],
                [*layers(3, 4, 5), *ROTARY],
                [*layers(6, 7), *END, *ROTARY],
            ],
        ),
    ],
)
def test_names_by_hand(stages, of_layers, wanted):
    assert names(stages, of_layers) == wanted


def test_the_example_of_the_page_with_rotary():
    first, second, third, last = names(4, 32)
    assert first == [*EMBED, *layers(*range(8)), *ROTARY]
    assert second == [*layers(*range(8, 16)), *ROTARY]
    assert third == [*layers(*range(16, 24)), *ROTARY]
    assert last == [*layers(*range(24, 32)), *END, *ROTARY]


def test_costs_move_layers_away_from_the_ends():
    counts = [sum(".layers." in name for name in stage) for stage in names(4, 32, embed_cost=1, head_cost=3)]
    assert counts == [8, 9, 9, 6]


def test_encoders_and_extra_modules_stand_between_embedding_and_layers():
    first, last = generate_hf_model_fqn_per_model_part(
        2, 2, extra_module_fqns=["audio.in", "x"], fqn_prefix="m.", lm_head_fqn="out"
    )
    encoders = [
        "vision_tower visual vision_model image_encoder vision_encoder embed_vision audio_tower audio_encoder",
        "audio_model mm_projector multi_modal_projector multimodal_projector vision_projector vit_large_projector",
        "audio_projector",
    ]
    prefixed = [f"m.{name}" for name in " ".join(encoders).split()]
    assert first == ["m.embed_tokens", *prefixed, "audio.in", "x", "m.layers.0", "m.rotary_emb"]
    assert last == ["m.layers.1", "m.norm", "out", "m.rotary_emb"]
    assert len(MULTIMODAL) == 15


SWITCHES = {
    "include_embeddings": {"model.embed_tokens"},
    "include_lm_head": {"lm_head"},
    "include_rotary_emb": {"model.rotary_emb"},
    "include_multimodal_encoders": {f"model.{name}" for name in MULTIMODAL},
}


@given(st.data())
def test_each_switch_removes_its_names_and_no_others(data):
    stages = data.draw(st.integers(1, 6))
    count = data.draw(st.integers(stages, 30))
    off = data.draw(st.sets(st.sampled_from(sorted(SWITCHES))))
    whole = generate_hf_model_fqn_per_model_part(stages, count)
    gone = set().union(*(SWITCHES[switch] for switch in off))
    cut = generate_hf_model_fqn_per_model_part(stages, count, **dict.fromkeys(off, False))
    assert cut == [[name for name in stage if name not in gone] for stage in whole]


@given(st.data())
def test_layers_come_once_and_in_order(data):
    stages = data.draw(st.integers(1, 8))
    count = data.draw(st.integers(stages, 40))
    parts = generate_hf_model_fqn_per_model_part(stages, count)
    of_layers = [[name for name in part if ".layers." in name] for part in parts]
    assert [name for part in of_layers for name in part] == layers(*range(count))
    assert [len(part) for part in of_layers] == layer_counts(stages, count)
    assert ["model.embed_tokens" in part for part in parts] == [True] + [False] * (stages - 1)
    assert ["lm_head" in part and "model.norm" in part for part in parts] == [False] * (stages - 1) + [True]
    assert all(part[-1] == "model.rotary_emb" for part in parts)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((0, 4), {}, "num_stages=0 must be a positive int"),
        ((2, 0), {}, "num_layers=0 must be a positive int"),
        ((9, 8), {}, "num_stages=9 exceeds num_layers=8; every stage needs a layer"),
        ((2, 4), {"embed_cost": -1}, "embed_cost=-1 must be finite and at least 0"),
        ((2, 4), {"head_cost": float("nan")}, "head_cost=nan must be finite and at least 0"),
        ((2, 4), {"head_cost": float("inf")}, "head_cost=inf must be finite and at least 0"),
    ],
)
def test_what_cannot_be_is_refused(args, kwargs, words):
    with pytest.raises(ValueError, match=f"^{NAME}: ") as refusal:
        names(*args, **kwargs)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((2.0, 4), {}, "num_stages=2.0 is a float; pass an int"),
        ((2, True), {}, "num_layers=True is a bool; pass an int"),
        ((2, 4), {"include_lm_head": "yes"}, "include_lm_head='yes' is a str; pass True or False"),
        ((2, 4), {"fqn_prefix": None}, "fqn_prefix=None is a NoneType; pass a str"),
        ((2, 4), {"extra_module_fqns": "visual"}, "extra_module_fqns='visual' is a str; pass a list of names"),
        ((2, 4), {"extra_module_fqns": [3]}, "extra_module_fqns[0]=3 is a int; pass a str"),
        ((2, 4), {"embed_cost": "much"}, "embed_cost='much' is a str; pass a number of layers"),
    ],
)
def test_other_kinds_are_refused(args, kwargs, words):
    with pytest.raises(TypeError, match=f"^{NAME}: ") as refusal:
        names(*args, **kwargs)
    assert words in str(refusal.value)
