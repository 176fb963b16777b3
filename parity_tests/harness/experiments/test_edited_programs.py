"""Wrong functions without a pattern in their numbers, and the small edit that makes each right."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.noted_scheme import notes_on_case
from parity_tests.specimens.small_scheme import summed
from parity_tests.specimens.wrong_gradients import line_of
from shardproof import ids, mask, values
from shardproof.experiments.edited_programs import RIGHT_ONCE
from torch_impl.collectives import all_gather, all_reduce


def local_maximum(mesh, x):
    shift = x.detach().amax(-1)
    return all_reduce((x - shift[:, None]).exp().sum(-1), mesh["tp"]).log() + shift


def local_shift_with_a_gradient(mesh, x):
    """The gradients of the shift add up to 0 over the ranks, but are not 0 on each rank."""
    shifted = x - x.amax(-1, keepdim=True)
    first = torch.where(mesh.global_ids("v") == 0, shifted, 0.0)
    total, score = all_reduce(torch.stack([shifted.exp().sum(-1), first.sum(-1)]), mesh["tp"])
    return score - total.log()


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (local_maximum, lambda x: jax.nn.logsumexp(x, -1)),
        (local_shift_with_a_gradient, lambda x: jax.nn.log_softmax(x)[:, 0]),
    ],
)
def test_a_maximum_of_each_ranks_own_part(function, reference):
    inputs, case = {"x": "b v/tp"}, {"tp": 2, "b": 3, "v": 8}
    notes = notes_on_case(function, reference, inputs, "b tp=I", case)
    edit = f"{RIGHT_ONCE}amax at {line_of(function, 'amax')} is the maximum over all ranks of tp, not of each"
    assert notes["out"][0].startswith(edit) and notes["d/d x"][0].startswith(edit)


def test_an_input_whose_terms_are_not_summed():
    """No sum after the tanh would give the reference's result."""

    def sum_of_one(mesh, x, y):
        return torch.tanh(all_reduce(x, mesh["dp"]) + y)

    inputs, case = {"x": "n dp=P", "y": "n dp=P"}, {"dp": 2, "n": 4}
    notes = notes_on_case(
        sum_of_one, lambda x, y: jnp.tanh(x + y), inputs, "n dp=I", case, mesh={"dp": (1, 2, 3)}
    )  # fmt: skip
    assert {notes[label][0] for label in ("out", "d/d x", "d/d y")} == {f"{RIGHT_ONCE}y is summed over dp"}


def test_an_input_that_is_summed_and_divided_lacks_no_sum():
    """A second sum would undo the division."""

    def mean_of_terms(mesh, x):
        return torch.tanh(all_reduce(x, mesh["dp"]) / mesh.size("dp"))

    notes = notes_on_case(
        mean_of_terms, lambda x: jnp.tanh(x), {"x": "n dp=P"}, "n dp=I", {"dp": 2, "n": 4}, mesh={"dp": (1, 2, 3)}
    )  # fmt: skip
    assert all("is summed over" not in note for each in notes.values() for note in each)


def last_ranks_sum(mesh, x):
    total = torch.zeros_like(x[0])
    for part in all_gather(x.sum(0)[None], mesh["tp"], out="I"):
        total = part
    return total


def squares_about_a_local_mean(mesh, x):
    return all_reduce(((x - x.mean()) ** 2).mean(), mesh["tp"]) / mesh.size("tp")


def mean_of_local_variances(mesh, x):
    return all_reduce(x.var(correction=0), mesh["tp"]) / mesh.size("tp")


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    ("function", "reference", "outputs", "word", "words"),
    [
        (
            last_ranks_sum,
            lambda x: 1.0 * x.sum(0),
            "v tp=I",
            "all_gather",
            "all_gather at {} adds up the ranks' tensors, of",
        ),
        (
            squares_about_a_local_mean,
            lambda x: jnp.var(x),
            "tp=I",
            "x.mean",
            "mean at {} is the mean over all ranks of tp",
        ),
        (
            mean_of_local_variances,
            lambda x: jnp.var(x),
            "tp=I",
            "x.var",
            "var at {} is the variance over all ranks of tp",
        ),
    ],
)
def test_a_statistic_of_each_ranks_own_part(function, reference, outputs, word, words):
    case = {"tp": 2, "b": 4, "v": 3}
    notes = notes_on_case(function, reference, {"x": "b/tp v"}, outputs, case, nograd=("x",))
    assert notes["out"][0].startswith(RIGHT_ONCE + words.format(line_of(function, word)))


def clipped_by_a_sum_of_norms(mesh, x):
    norm = x.norm()
    dist.all_reduce(norm, group=mesh["tp"])
    return x * (1.0 / norm).clamp(max=1.0)


def shifted_by_a_sum_of_logs(mesh, x):
    total = x.logsumexp(0)
    dist.all_reduce(total, group=mesh["tp"])
    return (x - total).exp()


@pytest.mark.parametrize(
    ("function", "reference", "words"),
    [
        (
            clipped_by_a_sum_of_norms,
            lambda x: x * jnp.minimum(1.0, 1.0 / jnp.sqrt((x * x).sum())),
            "the root of the sum of squares",
        ),
        (
            shifted_by_a_sum_of_logs,
            lambda x: jax.nn.softmax(x, 0),
            "the log of the sum of exponentials",
        ),
    ],
)
def test_statistics_that_are_added_up(function, reference, words):
    notes = notes_on_case(function, reference, {"x": "n/tp"}, "n/tp", {"tp": 2, "n": 8}, nograd=("x",))
    assert notes["out"][0] == f"{RIGHT_ONCE}all_reduce at {line_of(function, 'all_reduce')} takes {words}, not SUM"


def log_of_local_sums(mesh, x):
    return all_reduce(x.logsumexp(-1), mesh["tp"]) / mesh.size("tp")


def softmax_of_each_part(mesh, x):
    return x.softmax(-1) * 3


def divided_by_a_local_norm(mesh, x):
    return x / x.norm()


def numbered_within_each_part(mesh, x):
    return x * x.cumsum(1)


def standardised_within_each_part(mesh, x):
    return (x - x.mean()) / (x.std(correction=0) + 0.5)


@pytest.mark.fast_values(2)
@pytest.mark.parametrize(
    ("function", "reference", "outputs", "words"),
    [
        (log_of_local_sums, lambda x: jax.nn.logsumexp(x, -1), "b tp=I", "logsumexp at {} is the logsumexp over all"),
        (
            softmax_of_each_part,
            lambda x: 3.0 * jax.nn.softmax(x, -1),
            "b v/tp",
            "softmax at {} is the softmax over all",
        ),
        (divided_by_a_local_norm, lambda x: x / jnp.sqrt((x**2).sum()), "b v/tp", "norm at {} is the norm over all"),
        (
            numbered_within_each_part,
            lambda x: x * jnp.cumsum(x, 1),
            "b v/tp",
            "cumsum at {} is the running sum over all",
        ),
        (
            standardised_within_each_part,
            lambda x: (x - x.mean()) / (x.std() + 0.5),
            "b v/tp",
            "mean at {0} and std at {0} are over all",
        ),
    ],
)
def test_a_result_of_each_ranks_own_part(function, reference, outputs, words):
    notes = notes_on_case(function, reference, {"x": "b v/tp"}, outputs, {"tp": 2, "b": 3, "v": 8})
    line = line_of(function, "return")
    assert notes["out"][0].startswith(f"{RIGHT_ONCE}{words.format(line)} ranks of tp, not "), notes["out"]


def outer_step(mesh, w, g):
    delta = g.mean(0)
    dist.all_reduce(delta, group=mesh["tp"])
    return w - 0.1 * delta


def test_an_outer_step_by_the_sum_of_the_workers():
    inputs, case = {"w": "n tp=I", "g": "k/tp n"}, {"tp": 2, "n": 3, "k": 4}
    notes = notes_on_case(outer_step, lambda w, g: w - 0.1 * g.mean(0), inputs, "n tp=I", case, nograd=("w", "g"))
    assert notes["out"][0].startswith(
        f"{RIGHT_ONCE}all_reduce at {line_of(outer_step, 'all_reduce')} takes AVG, not SUM"
    )


def first_ranks_sum(mesh, x):
    count = x.sum(0)
    everyone = [torch.empty_like(count) for _ in range(mesh.size("tp"))]
    dist.all_gather(everyone, count, group=mesh["tp"])
    return everyone[0]


def test_a_gathered_part_in_place_of_the_sum():
    notes = notes_on_case(
        first_ranks_sum, lambda x: x.sum(0), {"x": "k/tp n"}, "n tp=I", {"tp": 2, "k": 4, "n": 3}, nograd=("x",)
    )
    line = line_of(first_ranks_sum, "all_gather")
    assert notes["out"][0].startswith(f"{RIGHT_ONCE}all_gather at {line} adds up the ranks' tensors")


def written_without_adding(mesh, i, x):
    out = torch.zeros(x.shape[0], 4, dtype=x.dtype)
    out[torch.arange(x.shape[0])[:, None], i] = x
    return out


def added_by_id(i, x):
    return jnp.zeros((x.shape[0], 4)).at[jnp.arange(x.shape[0])[:, None], i].add(x)


def test_the_last_of_several_values_for_one_place():
    inputs, case = {"i": "b k", "x": "b k tp=I"}, {"tp": 1, "b": 4, "k": 3}
    notes = notes_on_case(
        written_without_adding, added_by_id, inputs, "b f tp=I", case,
        dims={"f": (4,), "k": (3, 5)}, draw={"i": ids("f"), "x": values("normal")}, nograd=("x",),
    )  # fmt: skip
    line = line_of(written_without_adding, "] = x")
    assert notes["out"][0].startswith(f"{RIGHT_ONCE}the assignment at {line} adds")


def two_masked_means(mesh, x, y, keep, kept):
    def share(value, own, group):
        return (value * own).sum() / summed(own.sum(), group).clamp(min=1)

    return share(x, keep, None) + share(y, kept, mesh["dp"])


def means_reference(x, y, keep, kept):
    pairs = ((x, keep.astype(x.dtype)), (y, kept.astype(y.dtype)))
    return sum((value * own).sum() / jnp.maximum(own.sum(), 1) for value, own in pairs)


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 2}])
def test_a_count_over_all_ranks(sizes):
    """With dp=1, all ranks are the ranks of tp: only another mesh shows that the count must be over dp."""
    notes = notes_on_case(
        two_masked_means, means_reference, {"x": "b/dp c tp=I", "y": "b/dp s tp=I", "keep": "b/dp c", "kept": "b/dp s"},
        "dp=P tp=I", {**sizes, "b": 4, "c": 3, "s": 3}, mesh={"dp": (1, 2), "tp": (1, 2)},
        draw={"x": values("normal"), "y": values("normal"), "keep": mask("c"), "kept": mask("s")},
    )  # fmt: skip
    assert any("is over dp, not over all 4 ranks" in note for note in notes["out"])
    assert "(= 1/tp)" in notes["d/d x"][0]


def mean_of_squared_means(mesh, x, keep):
    count = keep.sum().clamp(min=1)
    square = ((x * keep).sum() / count) ** 2
    dist.all_reduce(square, group=mesh["tp"])
    return x - square / mesh.size("tp")


def less_the_square_of_the_masked_mean(x, keep):
    keep = keep.astype(x.dtype)
    return x - ((x * keep).sum() / jnp.maximum(keep.sum(), 1)) ** 2


def test_a_sum_and_a_count_of_each_ranks_own_part():
    notes = notes_on_case(
        mean_of_squared_means, less_the_square_of_the_masked_mean,
        {"x": "b/tp s", "keep": "b/tp s"}, "b/tp s", {"tp": 2, "b": 4, "s": 5},
        {"keep": {"kind": "mask", "keep": "half"}}, draw={"x": values("normal"), "keep": mask("s")}, nograd=("x",),
    )  # fmt: skip
    lines = [line_of(mean_of_squared_means, word) for word in ("keep.sum", "(x * keep)")]
    assert notes["out"][0].startswith(f"{RIGHT_ONCE}sum at {lines[0]} and sum at {lines[1]} are over all ranks of tp")


def over_a_mean_of_norms(mesh, x, w):
    norm = ((x**2).sum() + (w**2).sum()).sqrt() / mesh.size("tp")
    dist.all_reduce(norm, group=mesh["tp"])
    return x / norm


def test_one_of_two_sums_in_a_line():
    """The sum over `w`, which is equal on all ranks, must stay as it is."""
    notes = notes_on_case(
        over_a_mean_of_norms, lambda x, w: x / jnp.sqrt((x**2).sum() + (w**2).sum()), {"x": "b/tp", "w": "c tp=I"},
        "b/tp", {"tp": 2, "b": 4, "c": 3}, nograd=("x", "w"),
    )  # fmt: skip
    line = line_of(over_a_mean_of_norms, "norm = ")
    assert notes["out"][0].startswith(f"{RIGHT_ONCE}`(x**2).sum()` at {line} is the sum over all ranks of tp, not ")


def about_a_mean_of_squares(mesh, x, keep):
    count = keep.sum()
    square = ((x * keep).sum() / count.clamp(min=1)) ** 2
    dist.all_reduce(square, group=mesh["tp"])
    dist.all_reduce(count, group=mesh["tp"])
    return (x - square / mesh.size("tp")) / (count + 1)


def test_a_sum_and_a_bounded_count_of_each_ranks_own_part():
    """The count itself is summed later on, so that only its bound can be over all ranks."""

    def reference(x, keep):
        return less_the_square_of_the_masked_mean(x, keep) / (keep.sum().astype(x.dtype) + 1.0)

    notes = notes_on_case(
        about_a_mean_of_squares, reference, {"x": "b/tp s", "keep": "b/tp s"}, "b/tp s", {"tp": 2, "b": 4, "s": 5},
        {"keep": {"kind": "mask", "keep": "half"}}, draw={"x": values("normal"), "keep": mask("s")}, nograd=("x",),
    )  # fmt: skip
    line = line_of(about_a_mean_of_squares, "square = ((x")
    assert notes["out"][0].startswith(f"{RIGHT_ONCE}sum at {line} and clamp at {line} are over all ranks of tp")


def divided_twice(mesh, x):
    mean = all_reduce(x.mean(0), mesh["tp"]) / mesh.size("tp")
    return x + (mean**2).sum() / mesh.size("tp")


@pytest.mark.usefixtures("without_line_edits")
def test_equal_results_of_all_ranks_are_no_parts():
    """Their sum over the ranks would be right only because it undoes the second division."""
    notes = notes_on_case(
        divided_twice, lambda x: x + (x.mean(0) ** 2).sum(), {"x": "b/tp v"}, "b/tp v", {"tp": 2, "b": 4, "v": 3},
        nograd=("x",),
    )  # fmt: skip
    assert not any("over all ranks" in note for note in notes["out"]), notes["out"]


def balance_divided_twice(mesh, x):
    fraction = all_reduce((x > 0).to(x.dtype).mean(0), mesh["tp"]) / mesh.size("tp")
    mean = all_reduce(x.mean(0), mesh["tp"]) / mesh.size("tp")
    return x + (fraction * mean).sum() / mesh.size("tp")


@pytest.mark.usefixtures("without_line_edits")
def test_a_missing_factor_is_no_part_of_other_ranks():
    """The result of `fraction * mean` is the same on all ranks, the comparison before it is not."""
    notes = notes_on_case(
        balance_divided_twice, lambda x: x + ((x > 0).astype(x.dtype).mean(0) * x.mean(0)).sum(), {"x": "b/tp v"},
        "b/tp v", {"tp": 2, "b": 4, "v": 3}, nograd=("x",),
    )  # fmt: skip
    assert not any("over all ranks" in note for note in notes["out"]), notes["out"]


def third_too_large(mesh, x):
    return 4.0 / 3.0 * all_reduce(x.sum(), mesh["tp"])


def test_no_collective_is_named_where_none_mends_the_function():
    """The note names the factor alone; the gradient is right by the same edit."""
    notes = notes_on_case(third_too_large, lambda x: jnp.sum(x), {"x": "b/tp"}, "tp=I", {"tp": 2, "b": 8})
    line, summed_x = line_of(third_too_large, "4.0"), "all_reduce(x.sum(), mesh['tp'])"
    assert notes["out"] == [f"{RIGHT_ONCE}{line} has `{summed_x}`, not `4.0 / 3.0 * {summed_x}`"]
    assert notes["d/d x"] == notes["out"]


def merged_by_the_larger_part(mesh, q, k, v):
    scores = q @ k.T
    norms = all_gather(scores.logsumexp(-1)[None], mesh["tp"], out="I")
    parts = all_gather((scores.softmax(-1) @ v)[None], mesh["tp"], out="I")
    merged, total = parts[0], norms[0]
    for part, norm in zip(parts[1:], norms[1:], strict=True):
        new = torch.maximum(total, norm)
        merged = merged * (total - new).exp()[:, None] + part * (norm - new).exp()[:, None]
        total = new
    return merged


def mean_of_each_ranks_count(mesh, x, keep):
    total = (x.exp() * keep).sum()
    count = keep.sum()
    return total / count.clamp(min=1) / mesh.size("tp")


def test_ranks_that_divide_by_their_number_lack_the_mean_of_their_counts():
    """Each rank's term of the sum is right; only the count is wrong."""
    notes = notes_on_case(
        mean_of_each_ranks_count,
        lambda x, keep: jnp.where(keep, jnp.exp(x), 0.0).sum() / jnp.maximum(keep.astype(x.dtype).sum(), 1.0),
        {"x": "s/tp", "keep": "s/tp"},
        "tp=P",
        {"tp": 2, "s": 8},
        kinds={"keep": {"kind": "mask", "keep": "half"}},
        draw={"x": values("normal"), "keep": mask("s")},
    )
    line = line_of(mean_of_each_ranks_count, "clamp")
    said = f"{RIGHT_ONCE}clamp at {line} is the mean over all ranks of tp, not of each rank's own part"
    assert said in notes["out"] and said in notes["d/d x"]


def test_an_edit_of_one_line_comes_before_collectives_after_two_operations():
    inputs = {"q": "t d", "k": "s/tp d", "v": "s/tp d"}
    notes = notes_on_case(
        merged_by_the_larger_part,
        lambda q, k, v: jax.nn.softmax(q @ k.T, -1) @ v,
        inputs,
        "t d tp=I",
        {"tp": 2, "t": 2, "d": 3, "s": 4},
        nograd=tuple(inputs),
    )
    line = line_of(merged_by_the_larger_part, "maximum")
    assert notes["out"][0].startswith(f"{RIGHT_ONCE}{line} has `torch.logaddexp(total, norm)`")
