"""Results of the ranks that were never summed, summed too often, or are not alike."""

import numpy as np

from parity_tests.specimens.evidence_by_hand import evidence, headline, numbers
from shardproof.explain.clues import explain
from shardproof.explain.evidence import ShardedDim


def test_missing_sum():
    pieces = numbers(4, 3, 5)
    want = pieces.sum(0)
    for role in ("gradient", "output"):
        assert headline(pieces[1], want, role=role, by_rank={"tp": pieces}, at={"tp": 1}) == (
            f"{role} missing a sum over tp: the ranks' {role}s add up to the reference"
        )


def test_missing_sum_through_noise():
    want = numbers(6)
    pieces = numbers(4, 6, seed=1)
    pieces[3] = want - pieces[:3].sum(0)
    noise = 0.9 * (np.abs(want) * 2.0**-8 + 1e-12)
    fields = {"relative": 2.0**-8, "by_rank": {"tp": pieces + noise}, "at": {"tp": 0}}
    assert headline(pieces[0] + noise, want, **fields).startswith("output missing a sum over tp")


def test_equal_shares_are_a_factor_alone():
    """A sum divided by the number of ranks leaves equal shares, and so does a missing sum."""
    want = numbers(6)
    notes = explain(evidence(want / 4, want, role="gradient", by_rank={"tp": np.stack([want / 4] * 4)}, at={"tp": 0}))
    assert notes == (
        "off by the constant factor 0.25 (= 1/tp): "
        "a reduction is missing or repeated, or a mean divides by a local count",
    )


def test_summed_once_too_often():
    want = numbers(6)
    notes = explain(evidence(4 * want, want, role="gradient", by_rank={"tp": np.stack([want] * 4)}))
    assert notes == (
        "off by the constant factor 4 (= tp): a reduction is missing or repeated, or a mean divides by a local count",
        "gradient summed over tp once too often: each rank already has the reference",
    )


def test_copies_that_differ():
    want = numbers(6)
    copies = np.stack([want, want, want + numbers(6, seed=1), want])
    assert headline(copies[2], want, by_rank={"tp": copies}, at={"tp": 2}) == (
        "wrong only on tp rank 2: the copies of the other ranks are right"
    )
    copies[0] = numbers(6, seed=2)
    assert headline(copies[2], want, by_rank={"tp": copies}, at={"tp": 2}) == (
        "wrong only on tp ranks 0, 2: the copies of the other ranks are right"
    )
    copies = numbers(2, 6, seed=3)
    assert headline(copies[0], want, by_rank={"cp": copies}, at={"cp": 0}) == (
        "cp ranks hold different copies of what should be one value"
    )


def test_an_axis_of_one_rank_has_no_sum():
    want = numbers(4)
    pieces = {"tp": numbers(1, 4, seed=1)}
    assert headline(pieces["tp"][0], want, by_rank=pieces, axes={"tp": 1}) == "no pattern; worst at " + (
        f"({int(np.argmax(np.abs(pieces['tp'][0] - want) / np.abs(want)))})"
    )


def test_copies_that_add_up_are_not_reported_twice():
    pieces = numbers(2, 3)
    notes = explain(evidence(pieces[0], pieces.sum(0), by_rank={"cp": pieces}, at={"cp": 0}))
    assert notes == ("output missing a sum over cp: the ranks' outputs add up to the reference",)


def test_a_rank_that_gave_nothing():
    pieces = numbers(4, 6)
    want = pieces.sum(0)
    pieces[2] = 0.0
    assert headline(pieces.sum(0), want, role="gradient", by_rank={"tp": pieces}) == (
        "tp rank 2 gave only zeros to the sum"
    )


def shards(count: int, length: int) -> tuple[ShardedDim, ...]:
    return (ShardedDim(0, "cp", "contiguous", np.split(np.arange(count * length), count)),)


def test_terms_that_reach_other_ranks():
    """Each rank of a ring adds the terms of its own queries to another rank's keys."""
    terms = numbers(3, 3, 4, 5)  # [queries' rank, keys' rank, keys, features]
    want = terms.sum(0).reshape(12, 5)
    wrong_way = np.stack([sum(terms[rank, (key - rank) % 3] for rank in range(3)) for key in range(3)])
    assert headline(wrong_way.reshape(12, 5), want, role="gradient", outputs_pass=True, layouts=shards(3, 4)) == (
        "terms reach other ranks of cp than in the reference: over the ranks, gradients add up as there"
    )


def test_no_terms_are_misplaced_where_a_sum_is_zero_or_one_rank_is_right():
    """The gradient of a softmax adds up to zero whatever its values are."""
    of_softmax = [each - each.mean(0) for each in (numbers(2, 5), numbers(2, 5, seed=1))]
    one_index = explain(evidence(*of_softmax, layouts=shards(2, 1)))
    want = numbers(6, 5)
    rows = numbers(2, 5, seed=1)
    last_is_right = explain(evidence(want + np.concatenate([rows, -rows, 0 * rows]), want, layouts=shards(3, 2)))
    assert not any("in another order" in note for note in (*one_index, *last_is_right))
