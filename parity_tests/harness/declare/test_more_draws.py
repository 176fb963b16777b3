"""Custom draws and rarer built-in ones: their promises, their replay, their errors."""

import json
import runpy

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from jaxtyping import Bool, Int
from torch import Tensor

from parity_tests.specimens.small_scheme import declared
from shardproof import block_table, drawn, exactly, permutation, scheme, values
from shardproof.declare.case import CaseSpec
from shardproof.draw import inputs


def drawn_arrays(how, spec="b s", count=30, function=None, **more):
    """Arrays of one input x that is drawn so, for seeds from 0 on."""
    declaration = scheme(
        reference=lambda x: x, mesh={"tp": (1,)}, inputs={"x": spec}, outputs=spec, draw={"x": how}, **more
    )(function or (lambda mesh, x: x))
    for seed in range(count):
        case = declaration.case(seed=seed)
        yield inputs.full_array(declaration.inputs[0], declaration.draws["x"], CaseSpec.from_json(case.json))


def integer(mesh, x: Int[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    return x


def true_or_false(mesh, x: Bool[Tensor, "b s"]) -> Bool[Tensor, "b s"]:
    return x


FLOATING = {"spec": "b s tp=I", "dtypes": ("float32",)}


# Kinds of values


def test_kinds_that_are_drawn_by_name():
    def all_of(kind):
        return list(drawn_arrays(values(kind), **FLOATING))

    assert all((x > 0).all() for x in all_of("positive"))
    assert all(((x >= 0) & (x <= 1)).all() for x in all_of("uniform")) and np.ptp(np.concatenate([
        x.ravel() for x in all_of("uniform")])) > 0.9  # fmt: skip
    assert all((np.diff(x, axis=-1) >= 0).all() for x in all_of("sorted"))
    for x in all_of("probabilities"):
        float32_rounding = x.shape[-1] * 2.0**-24
        assert (x > 0).all() and (abs(x.sum(-1) - 1) <= float32_rounding).all()


def test_kinds_by_name_are_drawn_nowhere_else():
    assert not {"positive", "uniform", "sorted", "probabilities"} & set(values().kinds)


# Integers and booleans


def test_exactly_so_many_are_true():
    shapes = {"dims": {"b": (2, 3), "s": (4, 5)}}
    for mask in drawn_arrays(exactly(2), function=true_or_false, **shapes):
        assert mask.dtype == bool and (mask.sum(-1) == 2).all()
    counts = set()
    for mask in drawn_arrays(exactly("k"), function=true_or_false, dims={"s": (4, 5), "k": (0, 1, 3)}):
        counts |= set(mask.sum(-1).tolist())
    assert counts == {0, 1, 3}


def test_more_than_there_are_cannot_be_true():
    with pytest.raises(ValueError) as caught:
        list(drawn_arrays(exactly(7), function=true_or_false, dims={"s": (3,)}))
    assert str(caught.value).startswith("exactly(7): 7 of 3 cannot be true; exclude such sizes")


def test_a_permutation_of_each_row():
    rows = [x for x in drawn_arrays(permutation(), function=integer, dims={"b": (2,), "s": (6,)})]
    assert all((np.sort(x, -1) == np.arange(6)).all() for x in rows)
    assert len({tuple(x[0]) for x in rows}) > 10


def test_no_page_is_used_twice():
    tables = list(drawn_arrays(block_table("p"), function=integer, dims={"b": (2,), "s": (3,), "p": "b*s + 2"}))
    assert all(len(set(x.ravel())) == 6 and x.min() >= 0 and x.max() < 8 for x in tables)
    with pytest.raises(ValueError) as caught:
        list(drawn_arrays(block_table("p"), function=integer, dims={"b": (2,), "s": (3,), "p": (4,)}))
    assert "block_table('p'): 4 pages for 6 places, and no page is used twice; tie p" in str(caught.value)


# A function and a strategy


def lower_triangle(generator, shape):
    return np.tril(generator.standard_normal(shape))


def test_a_function_of_generator_and_shape():
    assert all((np.triu(x, 1) == 0).all() and x.any() for x in drawn_arrays(lower_triangle, **FLOATING))


def test_a_function_of_the_case():
    def below_s(generator, shape, case):
        return generator.integers(0, case.s, shape)

    assert all(x.max() < x.shape[1] for x in drawn_arrays(below_s, function=integer))
    declaration = declared(
        lambda mesh, x: x * 2, draw={"x": drawn(lambda g, shape: g.integers(0, 3, shape), integer=True)}
    )
    assert declaration.inputs[0].is_integer


@pytest.mark.slow
def test_a_strategy_of_numbers():
    temperature = st.floats(0.5, 2.0)
    found = [x for x in drawn_arrays(temperature, **FLOATING)]
    assert all(((x >= 0.5) & (x <= 2.0)).all() for x in found) and len({x.ravel()[0] for x in found}) > 5
    assert {1, 5} >= {int(i) for x in drawn_arrays(st.sampled_from([1, 5]), function=integer) for i in x.ravel()}


@pytest.mark.slow
def test_a_strategys_numbers_are_recorded_and_shrink():
    def wrong_above_seven(mesh, x):
        return x * torch.where(x > 7, 3.0, 2.0)

    report = declared(wrong_above_seven, draw={"x": st.integers(0, 100).map(float)}).verify(examples=40)
    assert report.case.values["x"] == {"kind": "numbers", "numbers": [8.0]} and report.verdict == "mismatch"
    assert json.loads(report.case.json)["values"]["x"]["numbers"] == [8.0]


@pytest.mark.usefixtures("unexplained")
def test_a_replay_repeats_the_numbers_of_a_function(tmp_path, monkeypatch):
    """From its file, in the words of another run: the failing error is the same to the last digit."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\nfrom shardproof import scheme\n\n"
        "def steep(generator, shape):\n    return generator.standard_normal(shape) * 7.0\n\n"
        "@scheme(reference=lambda x: x * 2.0, mesh={'tp': (2,)}, inputs={'x': 'b/tp'}, outputs='b/tp', "
        "draw={'x': steep})\n"
        "def tripled(mesh, x):\n    return x * 3\n"
    )
    monkeypatch.chdir(tmp_path)
    tripled = runpy.run_path(str(file))["tripled"]
    report = tripled.verify(seed=3)
    again = tripled.verify(seed=3)
    assert report.replay and report.tensors[0].error == again.tensors[0].error and report.case == again.case


def at_will(generator, shape):
    return np.random.default_rng().standard_normal(shape)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda generator, shape: np.zeros(3), "returned an array of (3,); it was asked for (4,)"),
        (lambda generator, shape: np.zeros(shape, int), "returned int64; return floats, or write drawn("),
        (at_will, "returns other numbers at each call; draw them from the generator it gets"),
        (lambda: 3, "takes (); a draw takes (generator, shape), or (generator, shape, ca"),
        (st.text(min_size=1, max_size=1), ", a str; give a strategy of numbers; for arrays pass a function"),
        (3, "is int; use token_below, ids, "),
    ],
)
def test_wrong_draws(how, words):
    def doubled(mesh, x):
        return x * 2

    with pytest.raises(ValueError) as caught:
        declared(doubled, draw={"x": how}).verify(tp=2, b=4)
    assert str(caught.value).startswith("scheme 'doubled': draw['x'] ") and words in str(caught.value)


@pytest.mark.parametrize("count", [-1, True, 1.5])
def test_a_wrong_count(count):
    with pytest.raises(ValueError, match="give an integer >= 0 or the name of a dim"):
        exactly(count)


@pytest.mark.slow
def test_processes_draw_the_references_numbers():
    """Ranks get the record of a strategy, not the strategy, and the function itself."""

    def sums(mesh, x, y):
        return x + y

    report = declared(sums, lambda x, y: x + y, {"x": "b/tp", "y": "b/tp"},
                      draw={"x": st.floats(0.0, 1.0), "y": lambda generator, shape: generator.random(shape)},
                      mesh={"tp": (2,)}).verify(engine="gloo", examples=2)  # fmt: skip
    assert report.ok, str(report)


@pytest.mark.usefixtures("unexplained")
def test_a_router_that_takes_exactly_k():
    """Top-k routing by a mask that is drawn: a sum over the experts of each rank; a wrong one scales by k."""
    inputs_of = {"x": "t e/ep", "chosen": "t e/ep"}
    more = {"mesh": {"ep": (1, 2)}, "outputs": "t ep=P", "dims": {"k": (1, 2), "e": (4, 8)},
            "draw": {"x": values("normal"), "chosen": exactly("k")}}  # fmt: skip

    def routed(mesh, x, chosen):
        return (x * chosen).sum(-1)

    def two_always(mesh, x, chosen):
        return (x * chosen).sum(-1) * 2 / chosen.sum(-1).clamp(1)

    def reference(x, chosen):
        return (x * chosen.astype(x.dtype)).sum(-1)

    right = declared(routed, reference, inputs_of, **more).verify(examples=8)
    assert right.ok, str(right)
    assert declared(two_always, reference, inputs_of, **more).verify(examples=8).verdict == "mismatch"


def test_a_strategy_without_examples_is_named():
    declaration = scheme(
        reference=lambda x: x, mesh={"tp": (1,)}, inputs={"x": "b tp=I"}, outputs="b tp=I",
        draw={"x": st.integers(0, 5).filter(lambda n: n > 5)},
    )(lambda mesh, x: x)  # fmt: skip
    with pytest.raises(ValueError, match=r"draw\['x'\]: Hypothesis found no example of its strategy, \w+; loosen its"):
        declaration.verify(examples=2)
