"""pipelining.partition: the specified cases by hand, then laws, then rejections."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from jax_ref.pipelining import reference
from torch_impl.pipelining.partition import (
    MULTIMODAL,
    calculate_virtual_stages,
    generate_hf_model_fqn_per_model_part,
    layer_counts,
    stage_ids_this_rank,
    stage_to_rank,
)

STYLES = st.sampled_from(["loop", "v"])

PLACED = [(p, p * passes, style) for p in (1, 2, 4) for passes in (1, 2, 3) for style in ("loop", "v")]
CUT = [(2, 5), (2, 5, 1), (3, 8, 0, 0), (4, 10, 1, 3), (3, 9, 0, 2.5), (4, 9, 0.5, 0), (1, 4, 1, 1)]
VIRTUAL = [(33, 4, 4, "up"), (33, 4, 4, "down"), (32, 4, 4, None), (17, 2, 2, "up"), (17, 2, 2, "down")]


ROUNDINGS = (None, "up", "down")
ADVISED = [
    (num_layers, per_stage, pp_size, is_single, rounding)
    for num_layers, per_stage, pp_size in (
        (8, 3, 3),
        (12, 5, 4),
        (10, 4, 2),
        (9, 9, 3),
        (5, 1, 2),
        (3, 2, 4),
        (7, 7, 7),
    )
    for is_single in (True, False)
    for rounding in ROUNDINGS
]
UNEVEN = [(3, 7), (4, 9), (2, 1), (5, 10)]  # (ranks, stages); only 5 ranks can share theirs evenly


def is_legal(stages, num_layers, pp_size, is_single):
    """Whether every rank has one stage, or at least two where it may have several, and each stage a layer."""
    of_rank, left = divmod(stages, pp_size)
    return not left and stages <= num_layers and (of_rank == 1 if is_single else of_rank > 1)


def expected_advice(num_layers, per_stage, pp_size, is_single, rounding):
    """The number of stages; if it is not legal, the advised layers per stage and the roundings that would help."""

    def legal(size, how):
        return is_legal(reference.stages_by_search(num_layers, size, pp_size, how), num_layers, pp_size, is_single)

    if legal(per_stage, rounding):
        return reference.stages_by_search(num_layers, per_stage, pp_size, rounding)
    sizes = [size for size in range(1, num_layers + 1) if legal(size, rounding)]
    others = [how for how in ROUNDINGS[1:] if sizes and rounding is None and legal(per_stage, how)]
    return max(sizes, default=None), others


def advice(*sizes):
    try:
        return calculate_virtual_stages(*sizes)[0]
    except ValueError as error:
        size = re.search(r"use layers_per_stage=(\d+)", str(error))
        others = [how for how in ROUNDINGS[1:] if f"or round_to_pp_multiple={how!r}" in str(error)]
        return int(size[1]) if size else None, others


def multiple_above(pp_size, num_stages):
    return min(number for number in range(pp_size, 99, pp_size) if number >= num_stages)


def placed_or_advised(pp_size, num_stages):
    """The number of stages that `stage_to_rank` places, or that its error advises."""
    try:
        return len(stage_to_rank(pp_size, num_stages))
    except ValueError as error:
        return int(str(error).rpartition(" ")[2])


@pytest.mark.parametrize(("ranks", "stages", "style"), PLACED)
def test_stages_of_the_last_rank(ranks, stages, style):
    expected = reference.stage_ids_this_rank(ranks - 1, ranks, stages, style)
    assert stage_ids_this_rank(ranks - 1, ranks, stages, style) == expected


@pytest.mark.parametrize("sizes", CUT, ids=str)
def test_layers_are_cut_where_the_reference_cuts_them(sizes):
    """Stages, layers, and the costs of the embedding and the head."""
    assert layer_counts(*sizes) == reference.dearest_stage_first(*(*sizes, 0, 0)[:4])


@pytest.mark.parametrize(("num_layers", "per_stage", "pp_size", "rounding"), VIRTUAL)
def test_virtual_stages_by_search(num_layers, per_stage, pp_size, rounding):
    expected = reference.stages_by_search(num_layers, per_stage, pp_size, rounding)
    assert calculate_virtual_stages(num_layers, per_stage, pp_size, False, rounding)[0] == expected


@pytest.mark.parametrize("sizes", ADVISED, ids=str)
def test_advice_on_virtual_stages(sizes):
    assert advice(*sizes) == expected_advice(*sizes)


@pytest.mark.parametrize(("ranks", "stages"), UNEVEN)
def test_stages_that_ranks_share_evenly(ranks, stages):
    assert placed_or_advised(ranks, stages) == multiple_above(ranks, stages)


@pytest.mark.parametrize(
    ("rank", "ranks", "stages", "style", "ids"),
    [
        (0, 2, 4, "loop", (0, 2)),
        (1, 2, 4, "loop", (1, 3)),
        (3, 4, 12, "loop", (3, 7, 11)),
        (0, 4, 4, "loop", (0,)),
        (0, 1, 3, "loop", (0, 1, 2)),
        (0, 2, 4, "v", (0, 3)),
        (1, 2, 4, "v", (1, 2)),
        (0, 4, 8, "v", (0, 7)),
        (3, 4, 8, "v", (3, 4)),
        (1, 2, 6, "v", (1, 2, 5)),
    ],
)
def test_stages_of_a_rank_by_hand(rank, ranks, stages, style, ids):
    assert (
        stage_ids_this_rank(rank, ranks, stages, style)
        == ids
        == reference.stage_ids_this_rank(*(rank, ranks, stages, style))
    )


@given(st.integers(1, 8), st.integers(1, 5), STYLES)
def test_stages_are_placed_as_torch_places_them(ranks, passes, style):
    stages = ranks * passes
    ids = [stage_ids_this_rank(rank, ranks, stages, style) for rank in range(ranks)]
    assert ids == [reference.stage_ids_this_rank(rank, ranks, stages, style) for rank in range(ranks)]
    assert sorted(stage for of_rank in ids for stage in of_rank) == list(range(stages))
    assert all(list(of_rank) == sorted(of_rank) for of_rank in ids)
    theirs = generate_stage_to_rank_mapping(ranks, stages, style)
    assert dict(enumerate(stage_to_rank(ranks, stages, style))) == theirs
    assert style == "loop" or passes != 2 or {sum(of_rank) for of_rank in ids} == {stages - 1}


def test_the_default_placement_is_a_loop():
    assert stage_ids_this_rank(1, 2, 4) == (1, 3)


@pytest.mark.parametrize(
    ("given_as", "words"),
    [
        ((0, 2, 5), "num_stages=5 is not a multiple of pp_size=2; use 6"),
        ((0, 0, 4), "pp_size=0 must be at least 1"),
        ((0, 2, 0), "num_stages=0 must be at least 1"),
        ((2, 2, 4), "pp_rank=2 is not a rank of pp_size=2; pass 0 to 1"),
        ((-1, 2, 4), "pp_rank=-1 is not a rank of pp_size=2"),
        ((0, 2, 4, "zigzag"), "style='zigzag' is not one of loop, v"),
        ((0, 2, 4, None), "style=None is not one of loop, v"),
    ],
)
def test_impossible_stages_are_rejected(given_as, words):
    with pytest.raises(ValueError, match=r"^pipelining\.stage_ids_this_rank: ") as rejection:
        stage_ids_this_rank(*given_as)
    assert words in str(rejection.value)


@pytest.mark.parametrize("given_as", [(True, 2, 4), (0, 2.0, 4), (0, 2, "4")])
def test_a_stage_number_is_an_int(given_as):
    with pytest.raises(TypeError, match="pass an int"):
        stage_ids_this_rank(*given_as)


@pytest.mark.parametrize(
    ("stages", "layers", "costs", "counts"),
    [
        (1, 2, (0, 0), [2]),
        (2, 5, (0, 0), [3, 2]),
        (3, 8, (0, 0), [3, 3, 2]),
        (4, 32, (0, 0), [8, 8, 8, 8]),
        (4, 33, (0, 0), [9, 8, 8, 8]),
        (4, 32, (1, 3), [8, 9, 9, 6]),
        (3, 3, (50, 9), [1, 1, 1]),
        (1, 4, (2, 7), [4]),
        (2, 3, (1e-17, 0), [1, 2]),  # no tie, although a float cannot tell 1 + 1e-17 from 1
    ],
)
def test_layers_by_hand(stages, layers, costs, counts):
    assert layer_counts(stages, layers, *costs) == counts


@given(st.data())
def test_without_costs_the_first_stages_have_one_more(data):
    stages = data.draw(st.integers(1, 9))
    layers = data.draw(st.integers(stages, 60))
    counts = layer_counts(stages, layers)
    assert counts == reference.layer_counts(stages, layers) == sorted(counts, reverse=True)


QUARTERS = st.integers(0, 40).map(lambda quarters: quarters / 4)


@given(st.data())
def test_no_partition_is_more_even(data):
    stages = data.draw(st.integers(1, 5))
    layers = data.draw(st.integers(stages, 11))
    costs = data.draw(QUARTERS), data.draw(QUARTERS)
    assert layer_counts(stages, layers, *costs) == reference.dearest_stage_first(stages, layers, *costs)


@pytest.mark.parametrize(
    ("given_as", "result"),
    [
        ((8, None, 4, True), (4, 1)),
        ((8, None, 4, False), (8, 2)),
        ((32, 8, 4, True), (4, 1)),
        ((32, 4, 4, False), (8, 2)),
        ((33, 8, 4, True, "down"), (4, 1)),
        ((33, 4, 4, False, "up"), (12, 3)),
        ((33, 4, 4, False, "down"), (8, 2)),
    ],
)
def test_virtual_stages_by_hand(given_as, result):
    assert calculate_virtual_stages(*given_as) == result


@pytest.mark.parametrize(
    ("given_as", "words"),
    [
        (
            (3, None, 4, False),
            "layers_per_stage=None gives 8 stages for num_layers=3 over pp_size=4, more than there are",
        ),
        ((33, 8, 4, True), "layers_per_stage=8 gives 5 stages for num_layers=33 over pp_size=4, not a multiple"),
        ((33, 8, 4, True, "up"), "gives 8 stages for num_layers=33 over pp_size=4, 2 on each rank where this schedule"),
        ((7, 1, 4, False, "up"), "gives 8 stages for num_layers=7 over pp_size=4, more than there are layers (7)"),
        (
            (7, 1, 4, False, "down"),
            "gives 4 stages for num_layers=7 over pp_size=4, 1 on each rank where this schedule",
        ),
        ((2, 4, 4, True, "down"), "gives 0 stages for num_layers=2 over pp_size=4, 0 on each rank"),
        ((33, 8, 4, True), "use layers_per_stage=10, or round_to_pp_multiple='down'"),
        ((2, 4, 4, True, "down"), "none exists for pp_size=4"),
        ((32, 8, 4, True, "sideways"), "round_to_pp_multiple='sideways' is not one of up, down"),
        ((32, 0, 4, True), "layers_per_stage=0 must be at least 1"),
        ((32, -1, 4, True), "layers_per_stage=-1 must be at least 1"),
        ((0, None, 4, True), "num_layers=0 must be at least 1"),
        ((8, None, 0, True), "pp_size=0 must be at least 1"),
    ],
)
def test_impossible_virtual_stages_are_rejected(given_as, words):
    with pytest.raises(ValueError, match=r"^pipelining\.calculate_virtual_stages: ") as rejection:
        calculate_virtual_stages(*given_as)
    assert words in str(rejection.value)


@pytest.mark.parametrize("given_as", [(32, 2.5, 4, True), (True, 8, 4, True), (32, 8, 4, 1), (32, 8, "4", True)])
def test_virtual_stages_take_ints_and_a_switch(given_as):
    with pytest.raises(TypeError, match=r"^pipelining\.calculate_virtual_stages: "):
        calculate_virtual_stages(*given_as)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6), st.booleans(), st.sampled_from([None, "up", "down"]))
def test_virtual_stages_are_as_defined_or_the_advice_works(layers, per_stage, ranks, is_single, rounding):
    try:
        stages, each = calculate_virtual_stages(layers, per_stage, ranks, is_single, rounding)
    except ValueError as rejection:
        advice = str(rejection).rpartition("; ")[2]
        legal = [
            other
            for other in range(1, layers + 1)
            if fits(reference.stages_by_search(layers, other, ranks, rounding), layers, ranks, is_single)
        ]
        assert per_stage not in legal
        assert advice.partition(", or ")[0] == f"use layers_per_stage={max(legal)}" if legal else "fewer" in advice
        for saved in advice.split("round_to_pp_multiple=")[1:]:
            assert calculate_virtual_stages(layers, per_stage, ranks, is_single, saved.partition(",")[0].strip("'"))
    else:
        assert stages == reference.stages_by_search(layers, per_stage, ranks, rounding) == each * ranks
        assert fits(stages, layers, ranks, is_single)
        assert sum(layer_counts(stages, layers)) == layers


def fits(stages, layers, ranks, is_single):
    each = stages / ranks
    return stages <= layers and each == int(each) and (each == 1 if is_single else each >= 2)


@pytest.mark.parametrize(("sizes", "name"), [((0, 4), "pp_size"), ((2, 0), "num_stages"), ((-1, 4), "pp_size")])
def test_sizes_below_one_are_rejected(sizes, name):
    with pytest.raises(ValueError, match=f"stage_to_rank: {name}="):
        stage_to_rank(*sizes)


NAME = "pipelining.generate_hf_model_fqn_per_model_part"


def names(*args, **kwargs):
    return generate_hf_model_fqn_per_model_part(*args, include_multimodal_encoders=False, **kwargs)


def layers(*numbers):
    return [f"model.layers.{number}" for number in numbers]


EMBED, ROTARY, END = ["model.embed_tokens"], ["model.rotary_emb"], ["model.norm", "lm_head"]


@pytest.mark.parametrize(
    ("stages", "of_layers", "expected"),
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
def test_names_by_hand(stages, of_layers, expected):
    assert names(stages, of_layers) == expected


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
    full = generate_hf_model_fqn_per_model_part(stages, count)
    gone = set().union(*(SWITCHES[switch] for switch in off))
    cut = generate_hf_model_fqn_per_model_part(stages, count, **dict.fromkeys(off, False))
    assert cut == [[name for name in stage if name not in gone] for stage in full]


@given(st.data())
def test_layers_come_once_and_in_order(data):
    stages = data.draw(st.integers(1, 8))
    count = data.draw(st.integers(stages, 40))
    parts = generate_hf_model_fqn_per_model_part(stages, count)
    of_layers = [[name for name in part if ".layers." in name] for part in parts]
    assert [name for part in of_layers for name in part] == layers(*range(count))
    assert [len(part) for part in of_layers] == reference.layer_counts(stages, count)
    assert ["model.embed_tokens" in part for part in parts] == [True] + [False] * (stages - 1)
    assert ["lm_head" in part and "model.norm" in part for part in parts] == [False] * (stages - 1) + [True]
    assert all(part[-1] == "model.rotary_emb" for part in parts)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((0, 4), {}, "num_stages=0 must be at least 1"),
        ((2, 0), {}, "num_layers=0 must be at least 1"),
        ((9, 8), {}, "num_stages=9 exceeds num_layers=8; every stage needs a layer"),
        ((2, 4), {"embed_cost": -1}, "embed_cost=-1 must be at least 0"),
        ((2, 4), {"head_cost": float("nan")}, "head_cost=nan must be finite"),
        ((2, 4), {"head_cost": float("inf")}, "head_cost=inf must be finite"),
    ],
)
def test_impossible_arguments_are_rejected(args, kwargs, words):
    with pytest.raises(ValueError, match=f"^{NAME}: ") as rejection:
        names(*args, **kwargs)
    assert words in str(rejection.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((2.0, 4), {}, "num_stages=2.0 is a float; pass an int"),
        ((2, True), {}, "num_layers=True is a bool; pass an int"),
        ((2, 4), {"include_lm_head": "yes"}, "include_lm_head='yes' is a str; pass True or False"),
        ((2, 4), {"fqn_prefix": None}, "fqn_prefix=None is None; pass a str"),
        ((2, 4), {"extra_module_fqns": "visual"}, "extra_module_fqns='visual' is a str; pass a list of names"),
        ((2, 4), {"extra_module_fqns": [3]}, "extra_module_fqns[0]=3 is an int; pass a str"),
        ((2, 4), {"embed_cost": "much"}, "embed_cost='much' is a str; pass a number"),
    ],
)
def test_other_kinds_are_rejected(args, kwargs, words):
    with pytest.raises(TypeError, match=f"^{NAME}: ") as rejection:
        names(*args, **kwargs)
    assert words in str(rejection.value)
