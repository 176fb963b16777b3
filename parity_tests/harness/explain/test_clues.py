"""From evidence to notes: their order, facts about the rest of the run, and robustness to any input."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ref.layouts import ragged
from parity_tests.specimens.evidence_by_hand import columns_of, evidence, headline, numbers
from shardproof.engines.ledger import CallSite, Finding
from shardproof.explain.clues import explain
from shardproof.explain.evidence import Evidence, ShardedDim


def test_a_right_tensor_has_no_clue():
    want = numbers(2, 3)
    assert explain(evidence(want * (1 + 2.0**-22), want)) == ()
    assert explain(evidence(np.zeros((0, 3)), np.zeros((0, 3)))) == ()
    special = np.array([np.nan, np.inf, -np.inf, 0.0])
    assert explain(evidence(special, special)) == ()


def test_an_overflow_of_the_dtype_is_right():
    want = np.array([1e39, -1e39, 1.0])
    assert explain(evidence([np.inf, -np.inf, 1.0], want, max_finite=3.4e38)) == ()
    assert headline([-np.inf, -np.inf, 1.0], want, max_finite=3.4e38).startswith("not finite first at (0)")


def test_shapes_agree():
    with pytest.raises(ValueError) as caught:
        Evidence("x", "output", np.zeros(2), np.zeros(3), np.zeros(3))
    assert str(caught.value) == "evidence of 'x': got, want and budget are (2,), (3,) and (3,); they share one shape"


def test_forward_equal_gradient_not():
    want, other = numbers(5), numbers(5, seed=1)
    tell = {"role": "gradient", "outputs_pass": True}
    assert headline(other, want, **tell) == "forward equal, gradient not"
    assert headline(other, want, role="output", outputs_pass=True).startswith("no pattern")


def test_the_report_of_the_manual():
    want = numbers(1, 1, 4)
    observed = evidence(4 * want, want, role="gradient", outputs_pass=True)
    assert explain(observed) == (
        "off by the constant factor 4 (= tp): a reduction is missing or repeated, or a mean divides by a local count",
        "forward equal, gradient not",
    )


def test_a_collective_over_the_full_mesh():
    want, other = numbers(5), numbers(5, seed=1)
    fields = {"axes": {"dp": 2, "tp": 4}, "full_mesh_collective": CallSite("all_reduce", "my_scheme.py:9")}
    clue = "all_reduce at my_scheme.py:9 is over all 8 ranks, which is more than one axis: pass group=mesh[axis]"
    assert clue in explain(evidence(other, want, **fields))


def test_accumulation_in_the_narrow_dtype():
    want = numbers(40)
    got = want.copy()
    got[7] += 3e-3
    tell = {"coarse_budgets": np.full(40, 1e-2), "owners": {"tp": columns_of((40,), 4)}}
    assert explain(evidence(got, want, **tell))[:2] == (
        "a small error: bfloat16 accumulation could do as much",
        "wrong only where tp rank 0 owns (1 of 10 elements there)",
    )
    assert headline(got, want, coarse_dtype="float16", **tell) == "a small error: float16 accumulation could do as much"
    got[7] += 1
    assert not any("accumulation" in note for note in explain(evidence(got, want, **tell)))


def test_first_diverging_collective():
    want, other = numbers(5), numbers(5, seed=1)
    assert headline(other, want, first_divergence=Finding("#4 all_reduce at logprob.py:41 [bwd]")) == (
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
        owners=owners,
        layouts=(ShardedDim(0, "tp", "ragged", ragged(shape[0], 4)),) if shape else (),
        borders={"padding": tensor(st.booleans()).astype(bool)},
        by_rank={"cp": tensor()[None], "tp": np.stack([tensor(), tensor(), tensor(), tensor()])},
        at=draw(st.sampled_from([{}, {"tp": 1}, {"cp": 0}])),
        outputs_pass=draw(st.booleans()),
        coarse_budgets=tensor(st.just(1.0)),
    )


@given(anything())
def test_a_wrong_tensor_always_has_a_clue_and_a_right_one_none(observed):
    assert bool(explain(observed)) == bool(observed.is_wrong.any())
