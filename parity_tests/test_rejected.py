"""A table of rejections fails for another message, on a single rank, or after a collective, and shows the outcome."""

import pytest
import torch

from parity_tests.rejections import check_rejection, rejected
from torch_impl.collectives import all_reduce


def rejects(mesh):
    raise ValueError("k=0; pass 1 or more")


def rejects_on_rank_0(mesh):
    if mesh.rank("tp") == 0:
        rejects(mesh)
    return 3


def sends_first(mesh):
    all_reduce(torch.ones(1), mesh["tp"], out="R")
    rejects(mesh)


test_a_row_passes = rejected({"tp": 2}, [("k", rejects, "k=0; pass 1 or more")])


@pytest.mark.parametrize(
    ("call", "message", "kind", "expected", "actual"),
    [
        (rejects, "k=0", ValueError, "['ValueError: k=0', 'ValueError: k=0']", "'ValueError: k=0; pass 1 or more'"),
        (
            rejects,
            ("k=0; pass 1 or more", "k=1"),
            ValueError,
            "'ValueError: k=1']",
            "'ValueError: k=0; pass 1 or more']",
        ),
        (rejects_on_rank_0, "k=0; pass 1 or more", ValueError, "'ValueError: k=0; pass 1 or more']", "'returned 3']"),
        (sends_first, "k=0; pass 1 or more", ValueError, "no collective", "all_reduce"),
    ],
    ids=["message", "one rank", "returns", "sends"],
)
def test_a_row_that_fails_says_why(call, message, kind, expected, actual):
    with pytest.raises(AssertionError) as caught:
        check_rejection({"tp": 2}, "the row", call, message, kind)
    text = str(caught.value)
    assert text.startswith("the row\n")
    assert expected in text.partition("expected")[2].partition("actual")[0]
    assert actual in text.partition("actual")[2]


def test_another_kind_of_error_is_not_taken():
    with pytest.raises(Exception, match="k=0; pass 1 or more"):
        check_rejection({"tp": 2}, "the row", rejects, "k=0; pass 1 or more", TypeError)
