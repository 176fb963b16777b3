"""Draws of cases with every chooser and in another process; and of lengths of shards and sequences."""

import hashlib
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity_tests.specimens.drawn_schemes import array, cases, sequences, tokens
from parity_tests.specimens.small_scheme import declared
from shardproof import every_case, offsets
from shardproof.draw import inputs
from shardproof.draw.choosers import even_chooser, seeded_chooser
from shardproof.draw.drawing import draw_case


def test_seeded_chooser():
    """Equal seeds make equal choices, other seeds make others, and every option is chosen."""
    picks = [seeded_chooser(seed)(range(1000)) for seed in (3, 3, 4)]
    assert picks[0] == picks[1] != picks[2]
    choose = seeded_chooser(0)
    assert {choose("abcde") for _ in range(100)} == set("abcde")
    assert draw_case(tokens, seeded_chooser(5), {}, seed=5) == draw_case(tokens, seeded_chooser(5), {}, seed=5)


def fingerprint(schemes):
    """A hash of twenty cases of each scheme and of every array in them."""
    digest = hashlib.sha256()
    for scheme in schemes:
        for case in cases(scheme, 20):
            digest.update(case.json.encode())
            for arg in scheme.inputs:
                digest.update(array(scheme, case, arg.name).tobytes())
            for arg in scheme.outputs:
                digest.update(inputs.cotangent(arg, case).tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_another_process_draws_the_same():
    program = "from parity_tests.harness.draw.test_drawing import *; print(fingerprint([tokens, sequences]))"
    environment = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == fingerprint([tokens, sequences])


def test_names_and_seeds_give_other_numbers():
    case = tokens.case(tp=2, b=2, s=3, v=8)
    numbers = {inputs.generator(c, name).random() for c in (case, case.replace(seed=1)) for name in ("x", "y")}
    assert len(numbers) == 4


@given(every_case(tokens))
def test_hypothesis_cases_can_be_built(case):
    assert array(tokens, case, "logits").shape == (case.b, case.s, case.v)
    assert 0 <= array(tokens, case, "target").min() <= array(tokens, case, "target").max() < case.v
    assert case.temperature in (1.0, 2.0) and case.chunk in (None, 3)
    assert case.from_json(case.json) == case


@given(every_case(tokens, dtype="float16", tp=2, v=10, chunk=3))
def test_sizes_that_are_passed_are_not_drawn(case):
    assert (case.dtype, case.tp, case.v, case.chunk) == ("float16", 2, 10, 3)


def test_ragged_lengths_have_empty_shards_and_the_ceil_rule():
    selected = [case for case in cases(tokens, 300) if case.tp == 4]
    lengths_of = [case.layouts["v/tp"]["lengths"] for case in selected]
    assert all(sum(lengths) == case.v and len(lengths) == 4 for lengths, case in zip(lengths_of, selected, strict=True))
    empty = [0 in lengths for lengths in lengths_of]
    assert any(empty) and not all(empty)
    ceil = [-(-case.v // 4) for case in selected]
    by_rule = [lengths == [max(0, min(c, case.v - c * r)) for r in range(4)]
               for lengths, c, case in zip(lengths_of, ceil, selected, strict=True)]  # fmt: skip
    assert any(by_rule) and not all(by_rule)


def test_packed_lengths():
    """Sequences of no token and of one token occur, and padding inside the stream; every length can be sharded."""
    counts = Counter()
    for case in cases(sequences, 300):
        real, padded = np.array(case.lengths["t"]["real"]), np.array(case.lengths["t"]["padded"])
        assert padded.sum() == case.t and (padded % (2 * case.cp) == 0).all()
        assert ((real >= 0) & (real <= padded)).all() and len(real) == case.m - 1
        counts["empty"] += bool((real == 0).any())
        counts["one token"] += bool((real == 1).any())
        counts["padding inside"] += bool((real < padded)[:-1].any())
        counts["uneven"] += len(set(real[real > 0])) > 1
        counts["no padding"] += bool((real == padded).all())
    assert min(counts[what] for what in ("empty", "one token", "padding inside", "uneven", "no padding")) >= 15, counts


def test_no_sequence_is_empty_if_so_declared():
    """A dim too short for that many sequences is rejected."""

    def identity(mesh, x, cu):
        return x

    more = {"inputs": {"x": "t/tp:packed", "cu": "m"}, "outputs": "t/tp:packed", "mesh": {"tp": (1, 2)}}
    declaration = declared(identity, lambda x, cu: x, draw={"cu": offsets("t", empty=False)}, **more)
    drawn = cases(declaration, 100)
    assert len({case.m for case in drawn}) > 2
    for case in drawn:
        assert min(case.lengths["t"]["real"]) >= 1
        assert len(case.lengths["t"]["real"]) == case.m - 1
    with pytest.raises(ValueError, match="t=4 is too short for 3 nonempty sequences; give 12"):
        draw_case(declaration, seeded_chooser(0), {"tp": 2, "t": 4, "m": 4})


def test_offsets_and_lengths_share_one_draw():
    for case in cases(sequences, 30):
        real, padded = case.lengths["t"]["real"], case.lengths["t"]["padded"]
        assert array(sequences, case, "cu").tolist() == [0, *np.cumsum(real)]
        assert array(sequences, case, "cu_padded").tolist() == [0, *np.cumsum(padded)]
        assert array(sequences, case, "n").tolist() == real


@given(st.data())
def test_drawing_needs_nothing_but_a_chooser(data):
    """The simplest choice everywhere is a case, too: it is where shrinking ends."""
    simplest = draw_case(tokens, lambda options: options[0], {})
    assert simplest.world == 1 and simplest.dims == {"b": 1, "s": 1, "v": 1}
    any_choice = draw_case(tokens, lambda options: data.draw(st.sampled_from(options)), {})
    assert array(tokens, any_choice, "logits").size


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_even_examples_go_through_each_menu(seed):
    """Four examples take each of four options once, whatever the seed; other seeds take them in another order."""
    menu = ("a", "b", "c", "d")
    orders = []
    for turn in range(1, 6):
        picks = [even_chooser(number, seed)(menu) for number in range(4 * turn, 4 * turn + 4)]
        assert sorted(picks) == list(menu)
        orders += picks
    again = [even_chooser(number, seed)(menu) for number in range(4, 24)]
    other = [even_chooser(number, seed ^ 1)(menu) for number in range(4, 24)]
    assert orders == again != other and even_chooser(0, seed)(menu) == "a"


def test_a_boolean_option_rejects_a_text():
    flagged = declared(lambda mesh, x, twice: x * 2, lambda x, twice: x * 2.0, options={"twice": (True, False)})
    with pytest.raises(ValueError) as caught:
        flagged.verify(twice="maybe")
    assert str(caught.value) == "scheme '<lambda>': twice='maybe'; its choices are True and False"


def test_the_only_shape_of_a_profile_has_an_output():
    """The simplest shape has none here: s=1 leaves no next token."""
    shifted = declared(
        lambda mesh, x: 2.0 * x[:, 1:], lambda x: 2.0 * x[:, 1:], {"x": "b s tp=R"}, "b u tp=R", dims={"u": "s-1"}
    )
    drawn = [draw_case(shifted, seeded_chooser(seed), {}, seed=seed, limit=1) for seed in range(8)]
    assert {case.u > 0 for case in drawn} == {True}
    assert {case.u > 0 for case in cases(shifted, 20)} == {True, False}
