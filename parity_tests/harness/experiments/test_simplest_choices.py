"""The simplest case of the menus keeps only choices that the failure needs."""

import pytest
from hypothesis import strategies as st

from shardproof import scheme, values
from shardproof.declare.discover import lookup
from shardproof.draw.choosers import RecordingChooser, even_chooser, simplest
from shardproof.draw.drawing import draw_case
from shardproof.experiments.simplest_choices import SimplestCase
from shardproof.experiments.undecided import verify_or_undecided


def doubled_where(is_wrong, y="default"):
    """Twice the input, three times where it is wrong."""

    @scheme(
        reference=lambda x, y: 2.0 * x,
        mesh={"dp": (1, 2), "tp": (1, 2, 4)},
        inputs={"x": "b s/tp:ragged dp=I", "y": "b s/tp:ragged dp=I"},
        outputs="b s/tp:ragged dp=I",
        dims={"b": (1, 2, 5), "s": (4, 8, 12)},
        draw={"x": values("normal", "iota"), "y": values("normal") if y == "default" else y},
        rank_options={"exponent": (1, 2, 3)},
        dtypes=("float32", "bfloat16"),
    )
    def doubled(mesh, x, y, exponent):
        return x * (3 if is_wrong(mesh, x, y, exponent) else 2)

    return doubled


def failing(declaration):
    """The search from the first evenly drawn case that fails."""
    for number in range(200):
        chooser = RecordingChooser(even_chooser(number))

        def draw(choose):
            return draw_case(declaration, choose, {}, inside_subgroup=None, with_conditions=True)

        report = verify_or_undecided(declaration, draw(chooser))
        if not report.ok:
            return SimplestCase(draw, lambda case: verify_or_undecided(declaration, case), report, chooser.choices)
    raise AssertionError("no case fails")


@pytest.mark.slow
def test_choices_repeat_a_case():
    declaration = doubled_where(lambda *_: False, st.integers(-50, 50))
    for number in range(20):
        chooser = RecordingChooser(even_chooser(number))
        case = draw_case(declaration, chooser, {}, with_conditions=True)
        again = RecordingChooser(simplest, chooser.choices)
        assert draw_case(declaration, again, {}, with_conditions=True) == case and again.choices == chooser.choices


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    ("is_wrong", "mesh", "option"),
    [
        (lambda mesh, x, y, exponent: True, {"dp": 1, "tp": 1}, 1),
        (lambda mesh, x, y, exponent: mesh.size("tp") > 1, {"dp": 1, "tp": 2}, 1),
        (lambda mesh, x, y, exponent: mesh.size("dp") > 1 and exponent > 1, {"dp": 2, "tp": 1}, 2),
    ],
)
def test_choices_that_the_failure_needs_stay(is_wrong, mesh, option):
    search = failing(doubled_where(is_wrong))
    case = search.search().case
    assert (dict(case.mesh), case.options["exponent"], case.dtype) == (mesh, option, "float32")
    assert (case.conditions, case.seed, case.values["x"]) == ({}, 0, {"kind": "normal"})
    of_this_mesh = draw_case(lookup(case.scheme), simplest, mesh)
    assert (case.dims, case.layouts) == (of_this_mesh.dims, of_this_mesh.layouts)


@pytest.mark.slow
def test_ragged_lengths_stay_where_they_are_needed():
    search = failing(doubled_where(lambda mesh, x, y, exponent: x.shape[1] == 1))
    lengths = search.search().case.layouts["s/tp"]["lengths"]
    assert 1 in lengths and len(lengths) > 1


@pytest.mark.slow
def test_the_example_of_a_strategy_shrinks():
    search = failing(doubled_where(lambda mesh, x, y, exponent: bool((y.abs() > 7).any()), st.integers(-50, 50)))
    assert search.search().case.values["y"]["numbers"] == [8]


def test_a_wrong_output_stays_wrong():
    """A case in which only the gradient is wrong is another failure."""
    search = failing(doubled_where(lambda mesh, x, y, exponent: mesh.size("tp") > 1))
    report = search.search()
    assert any(not tensor.ok and tensor.role == "output" for tensor in report.tensors)


@pytest.mark.slow
def test_an_example_stays_with_its_strategys_input():
    """If a choice disappears, the choices after it belong to other inputs."""

    @scheme(
        reference=lambda x, y: x + y,
        mesh={"tp": (1, 2)},
        inputs={"x": "v/tp:ragged", "y": "v/tp:ragged"},
        outputs="v/tp:ragged",
        dims={"v": (5,)},
        draw={"x": st.floats(-100, -90, width=32), "y": st.floats(1, 2, width=32)},
        dtypes=("float32",),
    )
    def wrong_of_a_longer_shard(mesh, x, y):
        return x + y + (1.0 if len(x) > 3 or bool((y < 1).any() or (x > -90).any()) else 0.0)

    case = failing(wrong_of_a_longer_shard).search().case
    assert max(case.layouts["v/tp"]["lengths"]) > 3
    assert all(-100 <= number <= -90 for number in case.values["x"]["numbers"])
    assert all(1 <= number <= 2 for number in case.values["y"]["numbers"])


@pytest.mark.slow
def test_a_function_with_random_results_ends_the_search():
    calls = []
    declaration = doubled_where(lambda *_: calls.append(1) or len(calls) % 3 == 0, st.integers(-50, 50))
    search = failing(declaration)
    assert not search.search().ok and search.runs < 200
