"""The right values in the wrong places: the layout that mends it is named."""

import numpy as np

from jax_ref.layouts import dual_chunk_swap, packed, ragged, striped
from parity_tests.specimens.evidence_by_hand import headline, numbers
from shardproof.explain.clues import explain
from shardproof.explain.evidence import Evidence, ShardedDim

ORDER = "same values in another order: a layout is not undone, or applied twice"


def test_a_layout_not_undone():
    want = numbers(2, 8)
    order = np.concatenate(dual_chunk_swap(8, 2))
    tell = {"dims": ("b", "s")}
    assert headline(want[:, order], want, **tell) == f"{ORDER}; s is still in dual_chunk_swap order over cp"
    assert headline(want[:, np.argsort(order)], want, **tell) == (
        f"{ORDER}; s is in the inverse of dual_chunk_swap order over cp"
    )


def test_a_layout_applied_twice():
    want = numbers(12, 2)
    order = np.concatenate(dual_chunk_swap(12, 3))
    assert headline(want[order][order], want, axes={"cp": 3}) == (
        f"{ORDER}; dim 0 went through dual_chunk_swap twice over cp"
    )
    declared = (ShardedDim(0, "cp", "dual_chunk_swap", dual_chunk_swap(12, 3)),)
    # Rank by rank the twice swapped shards lie where the declared layout says that swapped ones do.
    got = np.empty_like(want)
    got[order] = want[order][order]
    assert headline(got, want, axes={"cp": 3}, layouts=declared) == (
        f"{ORDER}; dim 0 went through dual_chunk_swap twice over cp"
    )


def test_another_layout_than_the_declared_one():
    want = numbers(16)
    declared, used = dual_chunk_swap(16, 4), striped(16, 4)
    got = np.empty_like(want)
    got[np.concatenate(declared)] = want[np.concatenate(used)]
    fields = {"layouts": (ShardedDim(0, "tp", "dual_chunk_swap", declared),), "dims": ("s",)}
    assert headline(got, want, **fields) == f"{ORDER}; s is in striped order over tp, not in dual_chunk_swap order"
    got[np.concatenate(declared)] = want
    assert headline(got, want, **fields).endswith("s is in contiguous order over tp, not in dual_chunk_swap order")


def test_a_callers_own_layout():
    want = numbers(12)
    got = want[np.concatenate(packed(12, 2, [0, 4, 12]))]

    def mine(size, world):
        return packed(size, world, [0, 4, 12])

    fields = {"axes": {"cp": 2}}
    assert headline(got, want, **fields) == ORDER
    assert headline(got, want, custom_layouts={"mine": mine}, **fields).endswith("dim 0 is still in mine order over cp")
    ragged_now = (ShardedDim(0, "cp", "ragged", ragged(12, 2)),)
    clue = headline(got, want, custom_layouts={"mine": mine}, layouts=ragged_now, **fields)
    assert "in mine order over cp, not in ragged order" in clue


def test_a_layout_that_does_not_divide_this_size_explains_nothing():
    want = numbers(6)

    def stubborn(size, world):
        raise RuntimeError("not today")

    custom_layouts = {"stubborn": stubborn, "torn": lambda size, world: [np.zeros(3, int), np.full(3, 9)]}
    assert headline(want[::-1], want, custom_layouts=custom_layouts, axes={"cp": 2}) == ORDER


def test_any_other_order():
    want = numbers(7, 3)
    assert headline(want[[3, 1, 2, 0, 6, 5, 4]], want) == ORDER


def test_integers_in_another_order():
    want = np.arange(8.0)
    swapped = Evidence("ids", "output", want[::-1].copy(), want, np.full(8, 0.5), {})
    assert explain(swapped)[0] == ORDER


def test_noise_among_close_values_is_no_reordering():
    want = np.linspace(0, 1, 4000)
    got = want + np.where(np.arange(4000) % 2, 1, -1) * 3e-4
    got[[0, -1]] = want[[0, -1]]
    assert np.abs(np.sort(got) - want).max() < 2e-4  # sorted, the values agree
    blurred = Evidence("x", "output", got, want, np.full(4000, 2e-4), {})
    assert ORDER not in explain(blurred)
