"""Each kind of mistake, built by hand in NumPy, is called by its name."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ref.layouts import dual_chunk_swap, packed, ragged, striped
from parity_tests.harness.explain import Evidence, Placed, explain

AXES = {"cp": 2, "tp": 4}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def evidence(got, want, relative=2.0**-20, role="output", axes=AXES, **known):
    """Evidence with a budget relative to each wanted value, and a floor."""
    with np.errstate(invalid="ignore"):
        budget = np.where(np.isfinite(want), np.abs(want), 0.0) * relative + 1e-12
    return Evidence("x", role, np.asarray(got, float), np.asarray(want, float), budget, axes, **known)


def headline(got, want, **known):
    return explain(evidence(got, want, **known))[0]


def columns_of(shape, world):
    """The rank that owns each element where the last dim is cut in equal blocks."""
    return np.broadcast_to(np.repeat(np.arange(world), shape[-1] // world), shape)


# Nothing to say


def test_nothing_wrong_is_nothing_to_say():
    want = numbers(2, 3)
    assert explain(evidence(want * (1 + 2.0**-22), want)) == ()
    assert explain(evidence(np.zeros((0, 3)), np.zeros((0, 3)))) == ()
    special = np.array([np.nan, np.inf, -np.inf, 0.0])
    assert explain(evidence(special, special)) == ()


def test_an_overflow_of_the_dtype_is_right():
    want = np.array([1e39, -1e39, 1.0])
    assert explain(evidence([np.inf, -np.inf, 1.0], want, largest=3.4e38)) == ()
    assert headline([-np.inf, -np.inf, 1.0], want, largest=3.4e38).startswith("not finite first at (0)")


def test_shapes_agree():
    with pytest.raises(ValueError) as caught:
        Evidence("x", "output", np.zeros(2), np.zeros(3), np.zeros(3))
    assert str(caught.value) == "evidence of 'x': got, want and budget are (2,), (3,) and (3,); they share one shape"


# Not finite


def test_not_finite_names_the_first_element_and_its_rank():
    want = numbers(2, 8)
    got = want.copy()
    got[0, 5] = np.nan
    got[1, 6] = np.inf
    owners = {"tp": columns_of((2, 8), 4)}
    assert headline(got, want, owners=owners, axes={"tp": 4}) == "not finite first at (0,5), rank 2"
    assert headline(got, want, owners=owners) == "not finite first at (0,5), tp rank 2"
    assert headline(got, want, owners=owners, at={"cp": 1}) == "not finite first at (0,5), rank 6"
    assert headline(got, want) == "not finite first at (0,5)"


def test_poison_is_told_from_an_infinity():
    want = numbers(4)
    poison = "all_reduce at logprob.py:41"
    assert (
        headline([want[0], np.nan, want[2], np.nan], want, poison=poison)
        == "not finite first at (1); read before its wait: all_reduce at logprob.py:41"
    )
    assert headline([np.inf, np.nan, *want[2:]], want, poison=poison) == "not finite first at (0)"


def test_a_mask_that_was_lost():
    assert headline([0.0, 1.0], [-np.inf, 1.0]).startswith("finite where the reference is -inf, first at (0)")


# One number explains everything


@pytest.mark.parametrize(
    ("factor", "written"),
    [
        (4.0, "4 (= tp)"),
        (2.0, "2 (= cp)"),
        (8.0, "8 (= cp*tp)"),
        (0.25, "0.25 (= 1/tp)"),
        (0.125, "0.125 (= 1/(cp*tp))"),
        (3.0, "3 (= microbatches)"),
        (12.0, "12 (= tp*microbatches)"),
        (1.5, "1.5 (= microbatches/cp)"),
        (-4.0, "-4 (= -tp)"),
    ],
)
def test_constant_factor(factor, written):
    want = numbers(3, 4)
    assert (
        headline(factor * want, want, factors={"microbatches": 3})
        == f"off by the constant factor {written}: a reduction is missing or repeated"
    )


def test_two_names_for_one_factor_are_both_told():
    want = numbers(5)
    assert "factor 2 (= cp or dp):" in headline(2 * want, want, axes={"cp": 2, "dp": 2, "tp": 3})


def test_a_factor_through_noise_and_zeros():
    want = numbers(50)
    want[::5] = 0.0
    noise = 1 + 2.0**-9 * np.sign(numbers(50, seed=1))
    assert headline(4 * want * noise, want, relative=2.0**-8) == (
        "off by the constant factor 4 (= tp): a reduction is missing or repeated"
    )


def test_a_factor_in_huge_and_tiny_numbers():
    for scale in (1e300, 1e-300):
        want = numbers(6) * scale
        wide = Evidence("x", "output", want / 4, want, np.abs(want) * 2.0**-20, AXES)
        assert explain(wide)[0].startswith("off by the constant factor 0.25 (= 1/tp)")


def test_one_element_says_less():
    assert headline([20.0], [5.0]) == (
        "off by the constant factor 4 (= tp): a reduction is missing or repeated; only one element tells"
    )
    assert headline(20.0, 5.0).endswith("only one element tells")
    assert headline([10.0], [5.0], axes={"tp": 4, "m": 8}) == "no pattern; worst at (0)"  # not m/tp
    assert headline([3.65], [5.0]) == "no pattern; worst at (0)"  # any number is some factor


def test_a_factor_without_a_name():
    want = numbers(6)
    assert headline(0.7 * want, want) == "off by the constant factor 0.7: a scale is missing or wrong"


def test_a_factor_must_fit_everywhere():
    want = numbers(3, 4)
    got = 4 * want
    got[1, 1] = want[1, 1]
    assert not any("factor" in note for note in explain(evidence(got, want)))


def test_opposite_sign():
    want = numbers(6)
    assert headline(-want, want) == "opposite sign"


def test_zero_is_not_a_factor():
    want = numbers(2, 3)
    assert headline(0 * want, want, role="gradient") == "gradient is zero: backward does not reach this input"
    assert headline(0 * want, want) == "output is zero: nothing was written to it"


@pytest.mark.parametrize(
    ("constant", "written"),
    [
        (math.log(4), "log 4 (= log tp)"),
        (-math.log(4), "-log 4 (= -log tp)"),
        (math.log(8), "log 8 (= log(cp*tp))"),
        (0.3, "0.3"),
    ],
)
def test_added_constant(constant, written):
    want = numbers(2, 5)
    assert headline(want + constant, want) == f"off by the added constant {written}"


def test_another_factor_on_each_rank():
    want = numbers(3, 8)
    owners = columns_of((3, 8), 4)
    got = want * np.array([2.0, 1.0, 0.5, 3.0])[owners]
    assert headline(got, want, owners={"tp": owners}) == (
        "off by a constant factor on each tp rank (2, 1, 0.5, 3): a local count or sum stands for the global one"
    )


def test_another_constant_on_each_rank():
    want = numbers(3, 8)
    owners = columns_of((3, 8), 2)
    got = want + np.array([0.5, -1.25])[owners]
    assert headline(got, want, owners={"cp": owners}) == (
        "off by an added constant on each cp rank (0.5, -1.25): a local statistic stands for the global one"
    )


# The ranks' own terms


def test_terms_of_a_sum():
    terms = numbers(4, 5)
    want = terms.sum(0)
    addends = {("tp", rank): term for rank, term in enumerate(terms)}
    assert headline(want - terms[2], want, addends=addends) == "one rank's term is missing: tp rank 2"
    assert headline(want + terms[1], want, addends=addends) == "one rank's term is counted twice: tp rank 1"
    assert headline(terms[3], want, addends=addends) == "only one rank's term is there: tp rank 3"


def test_missing_sum():
    pieces = numbers(4, 3, 5)
    want = pieces.sum(0)
    for role in ("gradient", "output"):
        assert headline(pieces[1], want, role=role, pieces={"tp": pieces}) == (
            f"{role} missing a sum over tp: the ranks' {role}s add up to the reference"
        )


def test_missing_sum_of_equal_shares_is_a_factor_too():
    want = numbers(6)
    notes = explain(evidence(want / 4, want, role="gradient", pieces={"tp": np.stack([want / 4] * 4)}))
    assert notes == (
        "off by the constant factor 0.25 (= 1/tp): a reduction is missing or repeated",
        "gradient missing a sum over tp: the ranks' gradients add up to the reference",
    )


def test_summed_once_too_often():
    want = numbers(6)
    notes = explain(evidence(4 * want, want, role="gradient", pieces={"tp": np.stack([want] * 4)}))
    assert notes == (
        "off by the constant factor 4 (= tp): a reduction is missing or repeated",
        "gradient summed over tp once too often: each rank already has the reference",
    )


def test_copies_that_differ():
    want = numbers(6)
    copies = np.stack([want, want, want + numbers(6, seed=1), want])
    assert headline(copies[2], want, pieces={"tp": copies}) == (
        "wrong only on tp rank 2: the copies of the other ranks are right"
    )
    copies[0] = numbers(6, seed=2)
    assert headline(copies[2], want, pieces={"tp": copies}) == (
        "wrong only on tp ranks 0, 2: the copies of the other ranks are right"
    )
    copies = numbers(2, 6, seed=3)
    assert headline(copies[0], want, pieces={"cp": copies}) == (
        "cp ranks hold different copies of what should be one value"
    )


def test_an_axis_of_one_rank_has_no_sum():
    want = numbers(4)
    pieces = {"tp": numbers(1, 4, seed=1)}
    assert headline(pieces["tp"][0], want, pieces=pieces, axes={"tp": 1}) == "no pattern; worst at " + (
        f"({int(np.argmax(np.abs(pieces['tp'][0] - want) / np.abs(want)))})"
    )


# Order

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
    declared = (Placed(0, "cp", "dual_chunk_swap", dual_chunk_swap(12, 3)),)
    # Rank by rank the twice swapped pieces lie where the declared layout says that swapped ones do.
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
    known = {"layouts": (Placed(0, "tp", "dual_chunk_swap", declared),), "dims": ("s",)}
    assert headline(got, want, **known) == f"{ORDER}; s is in striped order over tp, not in dual_chunk_swap order"
    got[np.concatenate(declared)] = want
    assert headline(got, want, **known).endswith("s is in contiguous order over tp, not in dual_chunk_swap order")


def test_a_layout_of_the_callers():
    want = numbers(12)
    got = want[np.concatenate(packed(12, 2, [0, 4, 12]))]

    def mine(size, world):
        return packed(size, world, [0, 4, 12])

    known = {"axes": {"cp": 2}}
    assert headline(got, want, **known) == ORDER
    assert headline(got, want, candidates={"mine": mine}, **known).endswith("dim 0 is still in mine order over cp")
    known["layouts"] = (Placed(0, "cp", "ragged", ragged(12, 2)),)
    assert "in mine order over cp, not in ragged order" in headline(got, want, candidates={"mine": mine}, **known)


def test_a_layout_that_cannot_cut_this_size_explains_nothing():
    want = numbers(6)

    def stubborn(size, world):
        raise RuntimeError("not today")

    candidates = {"stubborn": stubborn, "torn": lambda size, world: [np.zeros(3, int), np.full(3, 9)]}
    assert headline(want[::-1], want, candidates=candidates, axes={"cp": 2}) == ORDER


def test_any_other_order():
    want = numbers(7, 3)
    assert headline(want[[3, 1, 2, 0, 6, 5, 4]], want) == ORDER


def test_integers_in_another_order():
    want = np.arange(8.0)
    swapped = Evidence("ids", "output", want[::-1].copy(), want, np.full(8, 0.5), {})
    assert explain(swapped)[0] == ORDER


def test_noise_among_close_values_is_no_reordering():
    want = np.sort(numbers(4000))
    got = want + np.where(np.arange(4000) % 2, 1, -1) * 3e-4
    blurred = Evidence("x", "output", got, want, np.full(4000, 2e-4), {})
    assert ORDER not in explain(blurred)


# Places


def test_wrong_where_one_rank_owns():
    want, other = numbers(2, 8), numbers(2, 8, seed=1)
    owners = columns_of((2, 8), 4)
    got = np.where(owners == 2, other, want)
    assert headline(got, want, owners={"tp": owners}) == "wrong only where tp rank 2 owns (all of its elements)"
    got[1] = want[1]
    assert headline(got, want, owners={"tp": owners}) == "wrong only where tp rank 2 owns (2 of 4 of its elements)"


def test_one_ranks_other_constant():
    want = numbers(2, 8)
    owners = columns_of((2, 8), 4)
    got = np.where(owners == 2, 4 * want, want)
    assert headline(got, want, owners={"tp": owners}) == (
        "wrong only where tp rank 2 owns (all of its elements); there off by the constant factor 4 (= tp): "
        "a reduction is missing or repeated"
    )


def test_wrong_where_a_pair_of_ranks_owns():
    want, other = numbers(4, 8), numbers(4, 8, seed=1)
    tp, cp = columns_of((4, 8), 4), columns_of((8, 4), 2).T
    got = np.where((tp == 1) & (cp == 0), other, want)
    assert headline(got, want, owners={"cp": cp, "tp": tp}) == (
        "wrong only where cp rank 0 and tp rank 1 own (all of its elements)"
    )


def test_right_where_one_rank_owns():
    want, other = numbers(3, 8), numbers(3, 8, seed=1)
    owners = columns_of((3, 8), 4)
    got = np.where(owners == 0, want, other)
    assert headline(got, want, owners={"tp": owners}) == "right only where tp rank 0 owns"


def test_a_tensor_of_one_rank_is_no_pattern():
    want, other = numbers(4), numbers(4, seed=1)
    owners = np.full(4, 1)
    assert headline(other, want, owners={"tp": owners}).startswith("no pattern; worst at (")


@pytest.mark.parametrize("name", ["sequence boundaries", "padding", "shard borders"])
def test_wrong_at_borders(name):
    want, other = numbers(2, 9), numbers(2, 9, seed=1)
    mask = np.zeros((2, 9), bool)
    mask[:, [2, 3, 7]] = True
    got = np.where(mask, other, want)
    assert headline(got, want, borders={name: mask}) == f"wrong only at {name} (all of its elements)"
    everywhere = {name: np.ones((2, 9), bool)}
    assert headline(got, want, borders=everywhere).startswith("no pattern")


# What the rest of the run knows


def test_forward_equal_gradient_not():
    want, other = numbers(5), numbers(5, seed=1)
    tell = {"role": "gradient", "outputs_pass": True}
    assert headline(other, want, **tell) == "forward equal, gradient not: a collective without its backward"
    assert headline(other, want, backward="all_reduce at my_scheme.py:31 [bwd]", **tell) == (
        "forward equal, gradient not: all_reduce at my_scheme.py:31 [bwd]"
    )
    assert headline(other, want, role="output", outputs_pass=True).startswith("no pattern")


def test_the_report_of_the_manual():
    want = numbers(1, 1, 4)
    told = evidence(4 * want, want, role="gradient", outputs_pass=True, backward="all_reduce at my_scheme.py:31 [bwd]")
    assert explain(told) == (
        "off by the constant factor 4 (= tp): a reduction is missing or repeated",
        "forward equal, gradient not: all_reduce at my_scheme.py:31 [bwd]",
    )


def test_accumulation_in_the_narrow_dtype():
    want = numbers(40)
    got = want.copy()
    got[7] += 3e-3
    tell = {"loose_budget": np.full(40, 1e-2), "owners": {"tp": columns_of((40,), 4)}}
    assert explain(evidence(got, want, **tell))[:2] == (
        "looks like bfloat16 accumulation",
        "wrong only where tp rank 0 owns (1 of 10 of its elements)",
    )
    assert headline(got, want, dtype="float16", **tell) == "looks like float16 accumulation"
    got[7] += 1
    assert not any("accumulation" in note for note in explain(evidence(got, want, **tell)))


def test_first_diverging_collective():
    want, other = numbers(5), numbers(5, seed=1)
    assert headline(other, want, first_divergence="#4 all_reduce at logprob.py:41 [bwd]") == (
        "first diverging collective: #4 all_reduce at logprob.py:41 [bwd]"
    )


def test_no_pattern_names_the_worst_and_its_owner():
    want = numbers(2, 3, 8)
    got = want.copy()
    got[0, 2, 1] += 1.0
    got[1, 0, 7] += 1e6
    owners = {"tp": columns_of((2, 3, 8), 4)}
    assert explain(evidence(got, want, owners=owners)) == ("no pattern; worst at (1,0,7), owner tp rank 3",)
    assert explain(evidence(got, want)) == ("no pattern; worst at (1,0,7)",)


values = st.sampled_from([0.0, 1.0, -1.0, 4.0, 1e300, 1e-300, math.inf, -math.inf, math.nan]) | st.floats(width=16)


@st.composite
def anything(draw):
    """Two tensors of any numbers at all, with all that may be known about them."""
    shape = draw(st.sampled_from([(), (0,), (1,), (4,), (2, 4), (3, 0, 2), (1, 1)]))
    size = math.prod(shape)

    def tensor(elements=values):
        return np.array(draw(st.lists(elements, min_size=size, max_size=size)), float).reshape(shape)

    owners = {"tp": tensor(st.integers(0, 3)).astype(int)}
    return Evidence(
        "x",
        draw(st.sampled_from(["output", "gradient"])),
        tensor(),
        tensor(),
        np.abs(tensor(st.sampled_from([0.0, 1e-6, 0.5, math.inf]))),
        {"tp": 4, "cp": 1},
        {"microbatches": draw(st.sampled_from([0, 1, 3, math.inf]))},
        owners=owners,
        layouts=(Placed(0, "tp", "ragged", ragged(shape[0], 4)),) if shape else (),
        borders={"padding": tensor(st.booleans()).astype(bool)},
        addends={("tp", 1): tensor()},
        pieces={"cp": tensor()[None], "tp": np.stack([tensor(), tensor(), tensor(), tensor()])},
        outputs_pass=draw(st.booleans()),
        loose_budget=tensor(st.just(1.0)),
    )


@given(anything())
def test_something_is_always_said_about_a_wrong_tensor_and_nothing_about_a_right_one(told):
    assert bool(explain(told)) == bool(told.bad.any())
