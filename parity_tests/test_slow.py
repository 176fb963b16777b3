"""The marks of slow values, and the number of examples that the fast tests draw."""

import pytest
from hypothesis import settings

from parity_tests.slow import every, slow_but, slow_unless
from shardproof.draw import profiles
from shardproof.draw.profiles import few


def kept(values):
    return [value for value in values if not hasattr(value, "marks")]


def marked(values):
    return [value.values for value in values if hasattr(value, "marks") and value.marks[0].name == "slow"]


def test_values_that_are_not_kept_are_slow():
    pairs = [("a", 1), ("b", 2), ("c", 3)]
    assert kept(slow_but([("a", 1)], pairs)) == pairs[:1] and marked(slow_but([("a", 1)], pairs)) == pairs[1:]
    assert kept(slow_unless(lambda n: n > 2, [1, 2, 3])) == [3] and marked(slow_unless(lambda n: n > 2, [1])) == [(1,)]
    assert kept(every(2, "abcde")) == ["a", "c", "e"] and marked(every(2, "abc")) == [("b",)]


def test_a_kept_value_is_one_of_the_values():
    with pytest.raises(ValueError, match="'d' is kept and is not among the values"):
        slow_but(["d"], ["a", "b"])


def test_the_fast_tests_draw_a_third():
    with profiles.in_force("fast"):
        assert [few(n) for n in (30, 8, 1)] == [10, 3, 1]
    with profiles.in_force("ci"):
        assert few(30) == 30


@pytest.mark.parametrize("name", profiles.EXAMPLES)
def test_a_profile_draws_the_same_examples_again_where_a_gate_runs_it(name):
    profile = settings.get_profile(name)
    assert profile.max_examples == profiles.EXAMPLES[name]
    assert profile.derandomize == (name in profiles.REPEATED)
