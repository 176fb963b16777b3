"""How inputs are drawn: ids at borders, masks, and values of each kind with the properties of that kind."""

from collections import Counter

import numpy as np
import pytest
import torch

from parity_tests.specimens.drawn_schemes import array, cases, tokens
from shardproof import integers, mask, values
from shardproof.declare.draws import FLOAT_KINDS, shard_borders
from shardproof.judge.reference import UNIT_ROUNDOFF

# Ids


def test_half_of_the_ids_sit_on_a_border():
    """Counted where shards are long, so that a border is not hit by chance."""
    on_border = total = 0
    for case in cases(tokens, 400, tp=2, v=400):
        borders = {end for pair in shard_borders("v", case) for end in pair}
        target = array(tokens, case, "target").ravel()
        on_border += np.isin(target, list(borders)).sum()
        total += target.size
    assert 0.5 <= on_border / total <= 0.8


def test_every_place_of_every_shard_is_drawn():
    counts = Counter(tuple(pick) for case in cases(tokens, 400, tp=4) for pick in case.values["target"]["picks"])
    places = ("first", "middle", "last", "before", "after", "anywhere")
    assert set(counts) == {(shard, place) for shard in range(4) for place in places}


def test_places_mean_what_they_say():
    case = tokens.case(tp=4, b=1, s=5, v=20).replace(
        layouts={"v/tp": {"name": "ragged", "lengths": [6, 0, 9, 5]}},
        values={"target": {"kind": "ids", "dim": "v", "picks": [
            [1, "first"], [1, "middle"], [1, "last"], [1, "before"], [1, "after"]
        ]}},
    )  # fmt: skip
    assert shard_borders("v", case) == [(0, 5), (6, 14), (15, 19)]  # the empty shard has no border
    assert array(tokens, case, "target").tolist() == [[6, 10, 14, 5, 15]]


def test_some_ids_are_ignored_and_all_others_in_the_vocabulary():
    labels = [array(tokens, case, "label") for case in cases(tokens, 100)]
    ignored = [bool((label == -100).any()) for label in labels]
    assert 20 < sum(ignored) < 80
    assert all(((label == -100) | (label >= 0)).all() for label in labels)
    assert not any((array(tokens, case, "target") < 0).any() for case in cases(tokens, 100))


# Other integers


def test_masks():
    counts = Counter(case.values["keep"]["keep"] for case in cases(tokens, 100))
    assert set(counts) == {"all", "half", "none", "first", "last", "prefix", "shard", "others"}
    case = tokens.case(b=2, s=3)
    built = {
        keep: array(tokens, case.replace(values={"keep": {"kind": "mask", "keep": keep}}), "keep")[0].tolist()
        for keep in ("all", "none", "first", "last")
    }
    assert built == {
        "all": [True] * 3,
        "none": [False] * 3,
        "first": [True, False, False],
        "last": [False, False, True],
    }
    scalar = mask().build({"kind": "mask", "keep": "last"}, (), np.random.default_rng(0), case)
    assert (scalar.shape, scalar.dtype, bool(scalar)) == ((), bool, True)


def test_integers_reach_both_ends():
    levels = {int(level) for case in cases(tokens, 60) for level in array(tokens, case, "level")}
    assert levels == {-2, -1, 0, 1, 2}
    with pytest.raises(ValueError) as caught:
        integers(2, 1)
    assert str(caught.value) == "integers: low=2 is above high=1"


# Kinds of values


def test_every_kind_is_drawn():
    assert {case.values["logits"]["kind"] for case in cases(tokens, 200)} == set(FLOAT_KINDS)
    assert set(FLOAT_KINDS) == {
        "zeros", "ones", "iota", "normal", "large", "huge", "ties", "neg_inf_mask", "tiny", "peaked"
    }  # fmt: skip


def of_kind(kind, dtype="float32", shape=(40, 50), seed=0):
    case = tokens.case(tp=1, b=shape[0], s=1, v=shape[1]).replace(
        dtype=dtype, seed=seed, values={"logits": {"kind": kind}}
    )
    return array(tokens, case, "logits")[:, 0]


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_values_have_the_tested_dtype(kind, dtype):
    sample = of_kind(kind, dtype)
    again = torch.from_numpy(sample).to(getattr(torch, dtype)).double().numpy()
    assert sample.dtype == np.float64
    assert np.array_equal(sample, again)
    assert not np.isnan(sample).any()
    assert np.isfinite(sample).all() == (kind != "neg_inf_mask")


def test_plain_kinds():
    assert set(of_kind("zeros").ravel()) == {0.0}
    assert set(of_kind("ones").ravel()) == {1.0}
    assert of_kind("iota").ravel()[:103].tolist() == [*range(101), 0, 1]
    assert abs(of_kind("normal").mean()) < 0.1 and 0.9 < of_kind("normal").std() < 1.1


def test_ties_are_many():
    sample = of_kind("ties")
    assert len(np.unique(sample)) < 12
    assert (np.sort(sample)[:, -1] == np.sort(sample)[:, -2]).any()  # the largest of a row, twice


def test_an_inf_mask_never_covers_a_row():
    for seed in range(50):
        masked = np.isneginf(of_kind("neg_inf_mask", seed=seed, shape=(30, 3)))
        assert masked.any() and not masked.all(axis=-1).any()
    alone = of_kind("neg_inf_mask", shape=(30, 1))
    assert np.isfinite(alone).all()


def test_an_inf_mask_covers_rows_where_the_scheme_says_so():
    case = tokens.case()
    sample = values("neg_inf_mask", full_rows=True).build(
        {"kind": "neg_inf_mask"}, (200, 2), np.random.default_rng(0), case
    )
    assert np.isneginf(sample).all(axis=-1).any()


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
def test_huge_overflows_exp_and_large_not_a_product(dtype):
    tested = getattr(torch, dtype)
    huge = torch.from_numpy(of_kind("huge", dtype)).to(tested)
    assert torch.isinf(torch.exp(huge)).all()
    assert torch.isfinite(torch.softmax(huge, -1)).all()
    large = torch.from_numpy(of_kind("large", dtype, shape=(64, 4096))).to(tested)
    assert torch.isfinite((large * large).sum(-1)).all()
    assert large.abs().max() > {"float16": 3.0}.get(dtype, 1e12)
    tiny = of_kind("tiny", dtype)
    assert 0 < np.abs(tiny[tiny != 0]).max() < 1e-2


def test_kinds_can_be_narrowed():
    assert values("ones", "ties").kinds == ("ones", "ties")
    with pytest.raises(ValueError) as caught:
        values("gauss")
    assert str(caught.value).startswith("values: kind 'gauss' is not one of normal, zeros, ones, iota, ")
