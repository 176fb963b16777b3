"""A loss is one number, which fits any claim: the share of a mask, and what its gradient tells."""

import jax.numpy as jnp
import pytest
import torch

from parity_tests.specimens.noted_scheme import notes_on_case
from shardproof import ids, mask, values
from torch_impl.collectives import all_reduce


def notes_of(*declared, **more):
    return notes_on_case(*declared, **{"mesh": {"dp": (1, 2, 4)}, **more})


def mean_of_counted(x, labels):
    counts = (labels != -100).astype(x.dtype)
    return (x * counts).sum() / jnp.maximum(counts.sum(), 1)


def mean_of_all(mesh, x, labels):
    total = all_reduce((x * (labels != -100)).sum(), mesh["dp"])
    return total / (labels.numel() * mesh.size("dp"))


def test_a_mean_that_counts_ignored_labels():
    notes = notes_of(
        mean_of_all, mean_of_counted, {"x": "t/dp", "labels": "t/dp"}, "dp=I", {"dp": 2, "t": 8, "seed": 7},
        draw={"x": values("normal"), "labels": ids("v", ignore=-100)}, dims={"v": (8,)},
    )  # fmt: skip
    for label in ("out", "d/d x"):
        assert "(= the share of labels that counts): a mean divides by all elements" in notes[label][0], notes


def test_a_mean_over_kept_elements_in_place_of_all():
    notes = notes_of(
        lambda mesh, x, keep: (x * keep).sum() / keep.sum().clamp(min=1),
        lambda x, keep: (x * keep.astype(x.dtype)).mean(),
        {"x": "t", "keep": "t"}, "", {"dp": 1, "t": 9, "seed": 3},
        draw={"x": values("normal"), "keep": mask("t")}, mesh={"dp": (1,)},
    )  # fmt: skip
    assert "(= 1/the share of keep that counts): a mean divides by the elements that count" in notes["out"][0], notes


@pytest.mark.usefixtures("without_line_edits")
def test_a_sum_whose_count_divides_the_loss_alone():
    def divided_too_late(mesh, x, labels):
        count = all_reduce((labels != -100).sum(), mesh["dp"]).clamp(min=1)
        total = all_reduce((x * (labels != -100)).sum(), mesh["dp"])
        return total - (total - total / count).detach()

    notes = notes_of(
        divided_too_late, mean_of_counted, {"x": "t/dp", "labels": "t/dp"}, "dp=I", {"dp": 2, "t": 8, "seed": 7},
        draw={"x": values("normal"), "labels": ids("v", ignore=-100)}, dims={"v": (8,)},
    )  # fmt: skip
    assert "(= the number of labels that count): a sum is in place of a mean" in notes["d/d x"][0], notes


@pytest.mark.usefixtures("without_line_edits")
def test_a_loss_without_a_pattern_shows_the_place_of_its_gradient():
    """A term too many at some places."""

    def total(mesh, x, labels):
        return all_reduce((x.cosh() + torch.where(labels < 0, x**3, 0.0).sinh()).sum(), mesh["dp"])

    notes = notes_of(
        total, lambda x, labels: jnp.cosh(x).sum(), {"x": "t/dp", "labels": "t/dp"}, "dp=I", {"dp": 2, "t": 12},
        draw={"x": values("normal"), "labels": ids("v", ignore=-100)}, dims={"v": (4,)}, reduction=("t",),
    )  # fmt: skip
    assert notes["out"][0] == f"see d/d x: {notes['d/d x'][0]}", notes


@pytest.mark.usefixtures("without_line_edits")
def test_a_fitted_number_of_one_case_is_not_said():
    notes = notes_of(
        lambda mesh, x: 3.4 * x.cosh() if x.numel() == 2 else x.cosh() ** 2,
        lambda x: jnp.cosh(x), {"x": "t/dp"}, "t/dp", {"dp": 1, "t": 2}, draw={"x": values("normal")},
    )  # fmt: skip
    assert not any("in this case; not at" in note for of_tensor in notes.values() for note in of_tensor), notes


def test_a_claim_on_each_rank_is_said_once():
    """In the smallest case one rank counts nothing: half of the sum is there, and a larger case refutes that number."""

    def mean_of_means(mesh, x, labels):
        counted = labels != -100
        mean = (x.cosh() * counted).sum() / counted.sum().clamp(min=1)
        return all_reduce(mean, mesh["dp"]) / mesh.size("dp")

    counted_on_one_rank = {"kind": "ids", "dim": "v", "picks": [[0, "first"]], "ignored": "shard", "shard": 1}
    notes = notes_of(
        mean_of_means, lambda x, labels: mean_of_counted(jnp.cosh(x), labels), {"x": "t/dp", "labels": "t/dp"},
        "dp=I", {"dp": 2, "t": 4}, kinds={"labels": counted_on_one_rank}, dims={"v": (8,)},
        draw={"x": values("normal"), "labels": ids("v", ignore=-100)},
    )  # fmt: skip
    of_each_rank, of_this_case = notes["d/d x"][-2:]
    assert of_each_rank.startswith("off by a constant factor on each dp rank"), notes
    assert of_this_case == "off by the constant factor 0.5 (= 1/dp) in this case", notes
