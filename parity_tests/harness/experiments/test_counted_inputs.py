"""The line of an input that every rank adds before the sum."""

import pytest
import torch
import torch.nn.functional as F

from parity_tests.specimens.small_scheme import summed
from parity_tests.specimens.wrong_gradients import line_of
from shardproof import scheme, values
from shardproof.draw.drawing import one_case
from shardproof.experiments.notes import check_notes
from shardproof.verify_one_case import verify_case

COUNTED = "bias is counted 2 times (= tp): each rank adds it before the sum"


def plus(x, weight, bias):
    return x @ weight.T + bias  # plus


def fused(x, weight, bias):
    return F.linear(x, weight, bias)  # fused


def in_place(x, weight, bias):
    terms = x @ weight.T
    terms += bias  # in_place
    return terms


def of_a_copy(x, weight, bias):
    wide = bias.double()
    return (x @ weight.T + wide).to(x.dtype)  # of_a_copy


def of_a_layer(x, weight, bias):
    layer = torch.nn.utils.skip_init(torch.nn.Linear, *reversed(weight.shape))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer(x)  # of_a_layer


def declared(terms):
    def row_parallel(mesh, x, weight, bias):
        return summed(terms(x, weight, bias), mesh["tp"])

    return scheme(
        reference=lambda x, weight, bias: x @ weight.T + bias[None],
        mesh={"tp": (2, 4)},
        inputs={"x": "b i/tp", "weight": "o i/tp", "bias": "o tp=I"},
        outputs="b o tp=I",
        nograd=("x", "weight", "bias"),
        draw={name: values("normal") for name in ("x", "weight", "bias")},
        dtypes=("float32",),
    )(row_parallel)


@pytest.mark.parametrize("terms", [plus, fused, in_place, of_a_copy, of_a_layer])
def test_the_line_that_adds_a_bias_on_every_rank(terms):
    wrong = declared(terms)
    report = check_notes(wrong, verify_case(wrong, one_case(wrong, tp=2, b=3, i=4, o=5)))
    line = line_of(terms, f"# {terms.__name__}")
    assert report.notes["out"] == (f"{COUNTED}, in {line}",)


def test_a_bias_that_two_lines_add_has_no_line():
    """Each half alone leaves the sum wrong."""

    def halves(x, weight, bias):
        half = x @ weight.T + 0.5 * bias
        return half + 0.5 * bias

    wrong = declared(halves)
    report = check_notes(wrong, verify_case(wrong, one_case(wrong, tp=2, b=3, i=4, o=5)))
    assert report.notes["out"] == (COUNTED,)
