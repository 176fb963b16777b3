"""`setup` runs on each rank once per mesh, and `around` surrounds forward and backward."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.small_scheme import declared, summed
from shardproof import GradientMismatch, verify_case
from shardproof.declare.discover import schemes_of_file

ENGINES = ("lockstep", "gloo")
CALLS, GROUPS = {}, {}


def set_up(mesh):
    place = mesh.size("tp"), mesh.rank("tp")
    CALLS[place] = CALLS.get(place, 0) + 1
    GROUPS[place] = dist.new_group(list(range(mesh.size("tp"))))
    dist.barrier(group=GROUPS[place])


def scaled_by_calls(mesh, x):
    place = mesh.size("tp"), mesh.rank("tp")
    total = summed(x.sum(), GROUPS[place])
    return x * 2 * CALLS[place] + 0 * total


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_setup_runs_once_per_rank_and_mesh_and_its_groups_stay(engine):
    CALLS.clear(), GROUPS.clear()
    scheme = declared(scaled_by_calls, setup=set_up, inputs={"x": "b/tp"})
    for size in (2, 4, 2):
        report = scheme.verify(engine, examples=3, tp=size, inside_subgroup=False)  # a larger world is another mesh
        assert report.ok, report
        assert {row.op for row in report.ledger.rows} == {"all_reduce"}  # the setup's barrier does not count as cost


def test_a_line_whose_group_is_made_by_setup_is_named():
    """A repair runs with the groups of the setup too."""

    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            total = x.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent, None  # used once on each rank, so that the sum of the ranks' cotangents is lacking

    def scaled_by_total(mesh, x):
        return x * Total.apply(x.sum(), GROUPS[mesh.size("tp"), mesh.rank("tp")])

    scheme = declared(scaled_by_total, setup=set_up, inputs={"x": "b/tp"}, reference=lambda x: x * x.sum())
    report = scheme.verify(examples=8, tp=2, b=6, inside_subgroup=False)
    (notes,) = report.notes.values()
    line = inspect.getsourcelines(Total.forward)[1] + 3
    assert any(f"all_reduce at test_setup.py:{line}" in note and "lacks a sum" in note for note in notes), notes


def failing_setup(mesh):
    if mesh.rank("tp") == 1:
        raise KeyError("no such group")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_setup_that_fails_is_reported_with_its_rank_and_line(engine):
    report = declared(lambda mesh, x: x * 2, setup=failing_setup).verify(engine, examples=1, tp=2)
    line = inspect.getsourcelines(failing_setup)[1] + 2
    assert str(report.failure).splitlines()[0] == (
        f"raised: scheme '<lambda>': setup of rank 1 raised KeyError: 'no such group' at test_setup.py:{line}"
    )


class Identity(torch.autograd.Function):
    """x * 2, with a gradient that is right only inside `around`."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.ones_like(x))
        return x * 2

    @staticmethod
    def backward(ctx, cotangent):
        (factor,) = ctx.saved_tensors
        return cotangent * factor * (2 if torch.is_autocast_enabled("cpu") else 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_around_is_entered_for_forward_and_backward(engine):
    def autocast(mesh):
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def around_backward(mesh, x):
        return Identity.apply(x)

    assert declared(around_backward, around=autocast).verify(engine, examples=2, tp=2).ok
    without = declared(around_backward).case(tp=2, engine=engine)
    with pytest.raises(GradientMismatch):
        verify_case(declared(around_backward), without).raise_if_failed()


@pytest.mark.parametrize("engine", ENGINES)
def test_around_must_return_a_context_manager(engine):
    report = declared(lambda mesh, x: x * 2, around=lambda mesh: 3).verify(engine, examples=1, tp=2)
    assert "scheme '<lambda>': around returned int; return a context manager" in str(report.failure)


def generator(mesh):
    yield


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"setup": 3}, "setup is int; pass a function of the mesh: def setup(mesh): ..."),
        ({"setup": lambda: None}, "setup takes (); it is called with the mesh alone"),
        ({"setup": lambda mesh, x: None}, "setup takes (mesh, x); it is called with the mesh alone"),
        ({"setup": generator}, "setup is a generator function, which would never run"),
        ({"around": "autocast"}, "around is str; pass a function of the mesh: def around(mesh): ..."),
        ({"isolate": "megatron"}, "isolate is 'megatron'; give a tuple of module names, such as ('megatron.core',)"),
        (
            {"isolate": ("torch",)},
            "isolate names 'torch', whose thousand modules ranks share; name the one that is changed",
        ),
        ({"around": generator}, "around is a generator function; decorate it with contextlib.contextmanager"),
    ],
)
def test_rejections_at_declaration(change, sentence):
    with pytest.raises(ValueError) as caught:
        declared(lambda mesh, x: x * 2, **change)
    assert str(caught.value) == f"scheme '<lambda>': {sentence}"


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_example_of_the_page(engine):
    file = Path(__file__).parents[3] / "docs" / "examples" / "my_globals.py"
    (scheme,) = schemes_of_file(str(file))
    for size in (2, 1, 4):
        report = scheme.verify(engine, examples=2, tp=size)
        assert report.ok, report
