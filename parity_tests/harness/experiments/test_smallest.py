"""The smallest failing case is the smallest: no size of it can be one step smaller."""

import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist

from shardproof import offsets, scheme, token_below, values
from shardproof.declare.conditions import record_of
from shardproof.engines.program import Program
from shardproof.experiments.smallest import MAX_RUNS, shrink
from shardproof.verify_one_case import verify_case
from torch_impl.collectives import all_reduce


def declared(function, inputs, outputs=None, **more):
    defaults = {"mesh": {"tp": (1, 2)}, "draw": {"x": values("normal")}, "dtypes": ("float32",)}
    reference = more.pop("reference", lambda x: 3.0 * x)
    return scheme(reference=reference, inputs={"x": inputs}, outputs=outputs or inputs, **{**defaults, **more})(
        function
    )


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_failure_at_two_heads_is_reported_at_two_heads(seed):
    def wrong_from_two_heads(mesh, x):
        return x * (3 if x.shape[2] < 2 else 2)

    report = declared(wrong_from_two_heads, "b s h d tp=I").verify(seed=seed)
    assert dict(report.case.dims) == {"b": 1, "s": 1, "h": 2, "d": 1} and dict(report.case.mesh) == {"tp": 1}
    assert report.smallest and "smallest case: tp=1 b=1 s=1 h=2 d=1" in str(report)


@pytest.mark.usefixtures("unexplained")
def test_sizes_stay_divisible_and_declared():
    def wrong_on_wide_shards(mesh, x):
        return x * (3 if x.shape[1] < 3 else 2)

    report = declared(wrong_on_wide_shards, "b v/tp", mesh={"tp": (2,)}, dims={"b": (4, 6)}).verify()
    assert dict(report.case.dims) == {"b": 4, "v": 6} and report.smallest


def test_sizes_in_proportion_to_fewer_ranks_stay_declared():
    seen = set()

    def wrong_on_two_ranks(mesh, x):
        seen.add(mesh.total("b"))
        return x * (3.0 if mesh.size("tp") == 1 else 4.5)

    declaration = declared(wrong_on_two_ranks, "b/tp", mesh={"tp": (1, 2, 4)}, dims={"b": (16, 32)})
    failing = verify_case(declaration, declaration.case(tp=4, b=32, dtype="float32"))
    report = shrink(declaration, failing, {})
    assert (report.case.tp, report.case.b, report.smallest) == (2, 16, True)
    assert seen == {16, 32}


def test_a_tensor_that_is_not_finite_is_no_smaller_case():
    def wrong(mesh, x):
        return x * (float("nan") if x.shape[0] < 4 else 2.0)

    declaration = declared(wrong, "b", mesh={"tp": (1,)})
    report = shrink(declaration, verify_case(declaration, declaration.case(b=9, dtype="float32")), {})
    assert dict(report.case.dims) == {"b": 4}


@pytest.mark.parametrize("name", ["call_before", "call_between"])
def test_a_call_that_fails_beside_the_case_is_the_case_itself(name):
    """The fault is none of calling the function twice."""

    def raises_from_six(mesh, x):
        if x.shape[0] > 5:
            raise KeyError("six")
        return x * 3.0

    declaration = declared(raises_from_six, "b tp=I", mesh={"tp": (1,)})
    case, other = (declaration.case(b=size, dtype="float32") for size in (2, 9))
    failing = verify_case(declaration, case.replace(conditions={name: record_of(other)}))
    report = shrink(declaration, failing, {})
    assert (report.verdict, dict(report.case.conditions), report.case.b) == ("raised", {}, 6)
    assert "only when" not in str(report)


def test_ids_stay_the_same_on_fewer_ranks():
    """They are drawn as places in shards; an axis that has no part in a failure can go all the same."""

    def wrong_for_five(mesh, ids, table):
        parts = [torch.empty_like(table) for _ in range(mesh.size("tp"))]
        dist.all_gather(parts, table.contiguous(), group=mesh["tp"])
        return torch.cat(parts)[ids] * (2.0 if bool((ids == 5).any()) else 1.0)

    declaration = scheme(
        reference=lambda ids, table: table[ids], mesh={"tp": (1, 2, 4)}, inputs={"ids": "s", "table": "v/tp d"},
        outputs="s d tp=I", draw={"ids": token_below("v"), "table": values("normal")}, dims={"v": (8,)},
        nograd=("table",), dtypes=("float32",),
    )(wrong_for_five)  # fmt: skip
    case = declaration.case(tp=4, s=1, d=1, v=8, dtype="float32")
    case = case.replace(values={**case.values, "ids": {**case.values["ids"], "picks": [[2, "last"]]}})
    report = shrink(declaration, verify_case(declaration, case), {})
    assert report.case.tp == 1
    assert Program.of(declaration).full_array(declaration.inputs[0], report.case).tolist() == [5]


@pytest.mark.usefixtures("unexplained")
def test_the_least_size_that_can_be_sharded_is_tried():
    def wrong(mesh, x):
        return x * 2

    report = declared(wrong, "s/tp:dual_chunk_swap", mesh={"tp": (4,)}, dims={"s": (24, 40)}).verify()
    assert dict(report.case.dims) == {"s": 24} and report.smallest
    any_size = declared(wrong, "s/tp:dual_chunk_swap", mesh={"tp": (4,)})
    failing = verify_case(any_size, any_size.case(s=24, dtype="float32"))
    assert dict(shrink(any_size, failing, {}).case.dims) == {"s": 8}


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("sizes", [[8, 4], range(4, 8)])
def test_sizes_may_be_declared_by_any_sequence(sizes):
    def wrong(mesh, x):
        return x * 2

    declaration = declared(wrong, "b", "b", mesh={"tp": (1,)}, dims={"b": sizes})
    assert dict(declaration.verify().case.dims) == {"b": 4}


def test_sizes_at_which_assume_raises_are_no_smaller_case():
    def wrong(mesh, x):
        return x * 2

    assume = {4: True, 3: True}
    any_size = declared(wrong, "b tp=I", assume=lambda case: assume[case.dims["b"]])
    failing = verify_case(any_size, any_size.case(b=4, tp=1, dtype="float32"))
    assert dict(shrink(any_size, failing, {}).case.dims) == {"b": 3}


@pytest.mark.usefixtures("unexplained")
def test_given_sizes_are_kept():
    def wrong(mesh, x):
        return x * 2

    report = declared(wrong, "b v/tp").verify(v=8, tp=2)
    assert dict(report.case.dims) == {"b": 1, "v": 8} and dict(report.case.mesh) == {"tp": 2}
    assert report.smallest and "\nsmallest case with tp, v as given: tp=2 b=1 v=8" in str(report)


@pytest.mark.usefixtures("unexplained")
def test_where_all_sizes_are_given_no_case_is_called_the_smallest():
    def wrong(mesh, x):
        return x * 2

    report = declared(wrong, "b v/tp").verify(b=2, v=8, tp=2)
    assert not report.smallest and "\nfailing case: tp=2 b=2 v=8" in str(report)


@pytest.mark.usefixtures("unexplained")
def test_a_size_that_is_given_and_least_could_not_be_smaller():
    def wrong(mesh, x):
        return x * 2

    report = declared(wrong, "b v/tp").verify(b=1, tp=1)
    assert report.smallest and "\nsmallest case: tp=1 b=1 v=1" in str(report)


@pytest.mark.usefixtures("unexplained")
def test_another_mistake_at_a_smaller_size_is_not_followed():
    def two_mistakes(mesh, x):
        if x.shape[0] < 4:
            raise ValueError("too few rows")
        return x * 2

    report = declared(two_mistakes, "b tp=I").verify(b=9)
    assert report.verdict == "mismatch"
    assert dict(shrink(declared(two_mistakes, "b tp=I"), report, {}).case.dims) == {"b": 4}


@pytest.mark.usefixtures("unexplained")
def test_sizes_that_the_reference_rejects_are_no_smaller_case():
    def with_room(x):
        if x.shape[0] in (2, 3):
            raise ZeroDivisionError("no room")
        return 3.0 * x

    def wrong_from_four_rows(mesh, x):
        return x * (3 if x.shape[0] < 4 else 2)

    scheme = declared(wrong_from_four_rows, "b tp=I", reference=with_room)
    smallest = shrink(scheme, scheme.verify(b=9), {})
    assert dict(smallest.case.dims) == {"b": 4} and smallest.smallest


def test_fewer_sequences_than_drawn_are_other_sequences():
    """`cu` has an offset more than there are sequences, so lengths of four are no lengths of two."""

    def wrong(mesh, x, cu):
        return 2 * x

    declaration = scheme(
        reference=lambda x, cu: 3.0 * x, mesh={"cp": (1,)}, inputs={"x": "t", "cu": "n"}, outputs="t",
        draw={"x": values("normal"), "cu": offsets("t")}, dims={"t": (8, 6)}, dtypes=("float32",),
    )(wrong)  # fmt: skip
    report = verify_case(declaration, declaration.case(t=8, n=5))
    smallest = shrink(declaration, report, {})
    assert dict(smallest.case.dims) == {"t": 6, "n": 2} and smallest.smallest
    with pytest.raises(ValueError, match="n=1 has no room for the offsets of one sequence; give 2 or more"):
        declaration.case(n=1)


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize(("layout", "smallest"), [("", {"t": 2, "n": 3}), ("/cp:packed", {"t": 4, "n": 3})])
def test_a_border_between_sequences_is_kept_on_fewer_ranks_and_in_fewer_tokens(layout, smallest):
    def sums_of_sequences(x, cu):
        place = jnp.arange(x.shape[0])
        sequence = jnp.searchsorted(cu, place, side="right")
        return x @ ((sequence[:, None] == sequence[None]) & (place[:, None] <= place[None])).astype(x.dtype)

    def sums_over_all(mesh, x, cu):
        every = torch.zeros(mesh.total("t") if layout else x.shape[0], dtype=x.dtype)
        ids = mesh.global_ids("t") if layout else torch.arange(x.shape[0])
        every = every.index_add(0, ids, x)
        return (all_reduce(every, mesh["cp"]) if layout else every).cumsum(0)[ids]

    types = "" if layout else " cp=I"
    declaration = scheme(
        reference=sums_of_sequences, mesh={"cp": (1, 2)}, inputs={"x": f"t{layout}{types}", "cu": "n"}, nograd=("x",),
        outputs=f"t{layout}{types}", draw={"x": values("normal"), "cu": offsets("t", padded=True)}, dtypes=("float32",),
    )(sums_over_all)  # fmt: skip
    for seed in range(3):
        report = declaration.verify(seed=seed)
        assert dict(report.case.dims) == smallest and dict(report.case.mesh) == {"cp": 1} and report.smallest


def test_where_the_runs_do_not_suffice_the_case_is_not_called_the_smallest(monkeypatch):
    def wrong(mesh, x):
        return x * 2

    declaration = declared(wrong, "b s h d tp=I", mesh={"tp": (1,)})
    report = verify_case(declaration, declaration.case(b=5, s=5, h=5, d=5))
    monkeypatch.setattr("shardproof.experiments.smallest.MAX_RUNS", 2)
    few = shrink(declaration, report, {})
    assert not few.smallest and "\nfailing case: " in str(few) and "smallest case" not in str(few)
    assert MAX_RUNS > 2
