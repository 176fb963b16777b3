"""Each size and option that a scheme lists is drawn on each mesh, and the report names the pairs that were not."""

import jax
import jax.numpy as jnp
import pytest
import torch.nn.functional as F

from parity_tests.slow import slow_but
from parity_tests.specimens.small_scheme import declared
from shardproof import ids, mask, scheme, values
from shardproof.declare.discover import built_in
from shardproof.draw import coverage
from shardproof.draw.choosers import RecordingChooser, even_chooser
from shardproof.draw.drawing import draw_case
from shardproof.draw.size_choices import compatible, meshes, shapes
from shardproof.experiments.own_shards import AVERAGED
from shardproof.verification import MOST_PLANNED, verify
from torch_impl.collectives import all_reduce, all_to_all

DRAWN = {"world": None, "limit": 8}


def planned_cases(scheme, count=MOST_PLANNED, seed=0, **fixed):
    planned = coverage.plan(scheme, fixed, count, seed, **DRAWN)
    return [
        draw_case(scheme, RecordingChooser(even_chooser(number, seed), choices), fixed)
        for number, choices in enumerate(planned)
    ]


PARTS = 4  # of the built-in schemes; a mistake in the plan shows in many of them


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_built_in_scheme_draws_every_pair(part):
    """Of a listed size or option with a mesh or a dtype, and of two options: none that can be drawn is left out."""
    missing = {}
    for each in built_in()[part::PARTS]:
        if names := coverage.pairs_not_drawn(each, {}, planned_cases(each), **DRAWN):
            missing[each.name] = names
    assert not missing


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_pair_that_can_be_sharded_has_a_shape(part):
    """A shape is found by trying each size on each mesh by itself, without `features`."""
    for each in built_in()[part::PARTS]:
        if each.assume or each.layouts or each.depends_on_mesh:
            continue
        tried = meshes(each, {}, None)
        offered = shapes(each, {}, tried, 8)
        for name, sizes in each.dims.items():
            for size in () if isinstance(sizes, str) else sizes:
                for mesh in tried:
                    alone = shapes(each, {name: size, **mesh}, [mesh], 48, with_pairs=False)
                    if any(compatible(each, shape, mesh) for shape in alone):
                        found = any(shape[name] == size and compatible(each, shape, mesh) for shape in offered)
                        assert found, (each.name, name, size, mesh)


halo = declared(
    lambda mesh, x: x,
    lambda x: x,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "b t/cp c"},
    outputs="b t/cp c",
)


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_of_the_largest_mesh_has_one_row_two_and_more(seed):
    local = {case.t // 4 for case in planned_cases(halo, 20, seed) if case.cp == 4}
    assert {1, 2} < local


def test_an_explicit_number_of_examples_names_undrawn_values():
    listed = declared(
        lambda mesh, x, twice: x * (2 if twice else 1),
        lambda x, twice: x * (2.0 if twice else 1.0),
        mesh={"tp": (1, 2)},
        inputs={"x": "b/tp c"},
        outputs="b/tp c",
        dims={"c": (1, 2, 3)},
        options={"twice": (False, True)},
    )
    few = listed.verify(examples=2)
    assert few.ok and set(few.not_drawn) > {"c=3 on tp=1"} and "  not drawn: " in str(few)
    assert few.to_dict()["not_drawn"] == list(few.not_drawn)
    enough = listed.verify()
    assert enough.ok and not enough.not_drawn and "not drawn" not in str(enough)
    given = listed.verify(c=3, twice=True)
    assert given.ok and not any("c=" in pair or "twice" in pair for pair in given.not_drawn)


def scaled(mesh, x, scale, times):
    """Leaves out the factor where the scale is the caller's."""
    return x * (1.0 if scale is None else scale) * (1 if times == 3 and scale == 2.0 else times)


two_options = declared(
    scaled,
    lambda x, scale, times: x * (1.0 if scale is None else scale) * times,
    mesh={"tp": (1, 2)},
    inputs={"x": "b/tp c"},
    outputs="b/tp c",
    options={"scale": (None, 0.5, 2.0), "times": (1, 2, 3)},
)


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("seed", slow_but([0], range(20)))
def test_a_mistake_for_one_pair_of_options_is_found(seed, tmp_path):
    report = verify(two_options, seed=seed, replay_folder=str(tmp_path))
    assert report.verdict == "mismatch" and (report.case.scale, report.case.times) == (2.0, 3)


@pytest.mark.parametrize("seed", range(20))
def test_each_option_meets_each_other_one(seed):
    cases = planned_cases(two_options, 20, seed)
    assert {(case.scale, case.times) for case in cases} == {(a, b) for a in (None, 0.5, 2.0) for b in (1, 2, 3)}
    assert not coverage.pairs_not_drawn(two_options, {}, cases, **DRAWN)
    assert "scale=2.0 with times=3" in coverage.pairs_not_drawn(two_options, {}, cases[:1], **DRAWN)


@pytest.mark.parametrize("seed", range(20))
def test_each_option_has_a_case_without_a_size_of_one(seed):
    cases = [case for case in planned_cases(two_options, 20, seed) if case.tp == 2 and case.b >= 4 and case.c >= 2]
    assert {case.scale for case in cases} == {None, 0.5, 2.0} and {case.times for case in cases} == {1, 2, 3}


def attention(q, k, v):
    """Causal attention in which each head of k and v serves several of q."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    row = jnp.arange(q.shape[1])
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / jnp.sqrt(q.shape[-1] + 0.0)
    weights = jax.nn.softmax(jnp.where(row[:, None] >= row[None], scores, -jnp.inf), -1)
    return jnp.einsum("bhst,bthd->bshd", weights, v)


@scheme(
    reference=attention,
    mesh={"cp": (1, 2, 4)},
    inputs={"q": "b s/cp h d", "k": "b s/cp g d", "v": "b s/cp g d"},
    outputs="b s/cp h d",
    dims={"h": "4*g", "g": (1, 2)},
    draw={name: values("normal") for name in ("q", "k", "v")},
    roundings=4,
)
def repeated_heads_in_the_wrong_order(mesh, q, k, v):
    """Heads are repeated as a block, which is right for one head or for as many ranks as heads."""
    repeats = max(1, mesh.size("cp") // k.shape[2])
    k, v = (x.repeat(1, 1, repeats, 1) for x in (k, v))
    q, k, v = (all_to_all(x, mesh["cp"], split_dim=2, concat_dim=1).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return all_to_all(out, mesh["cp"], split_dim=1, concat_dim=2)


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_a_mistake_at_one_size_on_one_mesh_is_found(seed, tmp_path):
    report = verify(repeated_heads_in_the_wrong_order, seed=seed, replay_folder=str(tmp_path))
    assert report.verdict == "mismatch" and (report.case.cp, report.case.g) == (4, 2)


def masked_mean(logits, labels):
    losses = jax.nn.log_softmax(logits, -1)
    kept = labels != -100
    token = jnp.take_along_axis(losses, jnp.where(kept, labels, 0)[..., None], -1)[..., 0]
    weights = kept.astype(losses.dtype)
    return -(token * weights).sum() / jnp.maximum(weights.sum(), 1.0)


@scheme(
    reference=masked_mean,
    mesh={"cp": (1, 2, 4)},
    inputs={"logits": "b s/cp v", "labels": "b s/cp"},
    outputs="cp=P",
    draw={"logits": values("normal"), "labels": ids("v", ignore=-100)},
    dtypes=("float32",),
    roundings=2,
)
def mean_over_the_local_count(mesh, logits, labels):
    """Each rank divides by the tokens that it counts itself, which is right for equal counts."""
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1) / mesh.size("cp")


@pytest.mark.parametrize("fixed", [{}, {"cp": 2, "b": 3, "s": 16, "v": 8}], ids=["drawn", "given"])
@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_a_mean_over_the_local_count_is_found(fixed, seed, tmp_path):
    report = verify(mean_over_the_local_count, seed=seed, fixed=fixed, replay_folder=str(tmp_path))
    assert report.verdict == "mismatch"
    line, cause, factors = report.notes["d/d logits"][:3]
    assert line.startswith("right once sum at ")
    assert line.endswith(" is the mean over all ranks of cp, not of each rank's own part")
    assert cause == AVERAGED
    assert factors.startswith("off by a constant factor on each cp rank (")


def kept_mean(x, keep):
    weights = keep.astype(x.dtype)
    return (x * weights).sum() / jnp.maximum(weights.sum(), 1.0)


@scheme(
    reference=kept_mean,
    mesh={"dp": (1, 2), "cp": (1, 2)},
    inputs={"x": "b/dp s/cp", "keep": "b/dp s/cp"},
    outputs="dp=P cp=P",
    draw={"x": values("normal"), "keep": mask("s")},
)
def masked_mean_over_the_count_of_dp(mesh, x, keep):
    """The count is summed over one of two axes, and the other divides by its ranks."""
    count = all_reduce(keep.sum(), mesh["dp"]).clamp(min=1)
    return (x * keep).float().sum() / count / mesh.size("cp")


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_a_masked_mean_over_the_count_of_one_axis_is_found(seed, tmp_path):
    report = verify(masked_mean_over_the_count_of_dp, seed=seed, replay_folder=str(tmp_path))
    assert report.verdict == "mismatch" and report.case.cp == 2


def counts_of_ranks(case, name, counted):
    """How many elements of an input are counted on each rank of cp."""
    from shardproof.draw import inputs

    arg = next(arg for arg in mean_over_the_local_count.inputs if arg.name == name)
    array = inputs.full_array(arg, mean_over_the_local_count.draws[name], case)
    return {int(counted(inputs.piece(arg, array, case, {"cp": rank}, {})).sum()) for rank in range(case.cp)}


def test_the_counts_of_two_ranks_differ_in_half_of_the_cases():
    cases = [
        draw_case(mean_over_the_local_count, even_chooser(number), {"cp": cp, "s": 4 * cp, "b": 2})
        for number in range(60)
        for cp in (2, 4)
    ]
    unequal = [len(counts_of_ranks(case, "labels", lambda x: x == -100)) > 1 for case in cases]
    assert sum(unequal) >= len(cases) / 2
    assert not all(unequal)
