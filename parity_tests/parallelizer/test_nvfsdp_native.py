"""With check_for_nan_in_grad a gradient that is not finite on one rank is an error on every rank."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parity_tests.parallelizer.small_net import BLOCK, NAMES, Net, net_of, plan
from shardproof import CaseSpec
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.parallelizer.adapters.megatron import STRATEGIES
from torch_impl.parallelizer.adapters.nvfsdp import nvfsdp_strategy_parallelize

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def net():
    """A net with positive values that are too small to saturate."""
    sizes = {"up": (4, 3), "down": (3, 4), "head": (2, 3)}
    return net_of({n: torch.full(sizes[n.split(".")[-2]], 0.1, dtype=torch.float64) for n in NAMES})


class Aside(Net):
    """A net with a second output, which depends on one parameter only."""

    def __init__(self):
        with torch.device("meta"):
            super().__init__()
        self.load_state_dict(net().state_dict(), assign=True)
        self.aside = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x), self.aside * 2


def outcome(mesh, rank, bad, strategy="optim_grads_params", at="output", **options):
    """The error of a backward with one bad number in one rank's cotangents; with `rank` None there is no bad number."""
    model = nvfsdp_strategy_parallelize(Aside(), mesh.device_mesh[AXES], [BLOCK], plan(), strategy, **options)
    outputs = model(torch.ones(2, 3, dtype=torch.float64))
    cotangents = [torch.ones_like(y) for y in outputs]
    if rank is not None and mesh.rank("dp_shard") == rank[0] and mesh.rank("tp") == rank[1]:
        cotangents[at == "aside"].view(-1)[0] = BAD.get(bad, bad)
    try:
        torch.autograd.backward(outputs, cotangents)
    except FloatingPointError as error:
        return str(error)
    return ""


AXES = ("dp_shard", "tp")
MESHES = [dict(zip(AXES, sizes, strict=True)) for sizes in itertools.product((1, 2), repeat=2)]
OPTIONS = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(STRATEGIES),
        "bad": st.sampled_from(tuple(BAD)),
        "place": st.sampled_from((0, 1)),
        "at": st.sampled_from(("output", "aside")),
    }
)


def case_outcome(mesh, case):
    """Each rank's error; the rank with the bad number is the first or the last of each axis."""
    rank = tuple(case.options["place"] % mesh.size(axis) for axis in AXES)
    return outcome(mesh, rank, case.options["bad"], case.options["strategy"], case.options["at"])


def check_all_raise(mesh, options, engine="lockstep"):
    case = CaseSpec(scheme="finite", mesh=mesh, options=options, engine=engine)
    sentences = run(case_outcome, case, engine).results
    other = [each for each in sentences if not each.startswith("check_for_nan_in_grad: the gradient of ")]
    assert sentences and other == []


@pytest.mark.slow
@settings(max_examples=few(25))
@given(st.sampled_from(MESHES), OPTIONS, st.booleans())
def test_every_rank_raises_whichever_has_the_bad_number(mesh, options, inside):
    """Ranks that compute finite gradients raise too."""
    check_all_raise({"outer": 2, **mesh} if inside else mesh, options)


def test_every_rank_raises_on_processes():
    check_all_raise(MESHES[-1], {"strategy": STRATEGIES[-1], "bad": "nan", "place": 1, "at": "aside"}, "gloo")


@pytest.mark.parametrize("at", ["output", "aside"])
def test_a_finite_number_too_large_for_float32_is_finite(at):
    def body(mesh, case):
        return outcome(mesh, (0, 0), 1e200, at=at)

    assert run(body, CaseSpec(scheme="finite", mesh={"dp_shard": 2, "tp": 1})).results == ("", "")


def on_ranks(body, **mesh):
    return run(body, CaseSpec(scheme="finite", mesh=mesh or {"dp_shard": 2, "tp": 2}))


def test_the_first_parameter_by_name_is_reported_on_every_rank():
    for at, name in (("output", "blocks.0.down.weight"), ("aside", "aside")):
        message = on_ranks(lambda mesh, case: outcome(mesh, (1, 0), "nan", at=at)).results  # noqa: B023
        assert len(set(message)) == 1
        assert message[0].startswith(f"check_for_nan_in_grad: the gradient of {name!r} is not finite")


@pytest.mark.parametrize("rank", [None, (0, 0)])
def test_without_a_check_or_a_bad_number_nothing_is_raised(rank):
    options = {} if rank is None else {"check_for_nan_in_grad": False}
    assert on_ranks(lambda mesh, case: outcome(mesh, rank, "nan", **options)).results == ("",) * 4


def test_large_finite_numbers_raise_nothing():
    def body(mesh, case):
        model = nvfsdp_strategy_parallelize(Net(), mesh.device_mesh)
        (model(torch.ones(2, 3)).sum() * 1e30).backward()
        return True

    assert on_ranks(body, dp_shard=2).results == (True, True)


def test_the_cost_of_the_check():
    """A backward that reduces sends four bytes over all ranks; a backward that accumulates sends none."""

    def rows(checks, reduces):
        def body(mesh, case):
            model = nvfsdp_strategy_parallelize(net(), mesh.device_mesh, None, plan(), check_for_nan_in_grad=checks)
            model.set_requires_gradient_sync(reduces)
            model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()

        ledger = on_ranks(body).ledger
        return [(row.op, row.bytes_in, row.reduce_op, row.group) for row in ledger.of(0) if "int32" in row.dtypes]

    assert rows(True, True) == [("all_reduce", 4, "MAX", (0, 1, 2, 3))]
    assert rows(False, True) == [] and rows(True, False) == []


def test_a_second_backward_is_checked_too():
    def body(mesh, case):
        model = nvfsdp_strategy_parallelize(net(), mesh.device_mesh, [BLOCK], plan())
        raised = []
        for scale in (1.0, float("nan"), 1.0, float("inf")):
            model.zero_grad()
            try:
                (model(torch.ones(2, 3, dtype=torch.float64)).sum() * scale).backward()
                raised.append(False)
            except FloatingPointError:
                raised.append(True)
        return raised

    assert on_ranks(body).results == ([False, True, False, True],) * 4
