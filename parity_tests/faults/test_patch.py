"""A fault lives in memory only, while it is planted; ranks in other processes get it by value."""

import inspect
import subprocess
import sys

import pytest

import torch_impl.collectives.plain
from parity_tests.collectives import test_schemes as schemes
from parity_tests.faults.fault import Fault
from parity_tests.faults.patch import ROOT, Plot, StaleFault, patched_text
from parity_tests.faults.runner import Range, oracles, planted
from parity_tests.harness import inputs
from parity_tests.harness.engines import lockstep
from parity_tests.harness.table import TABLE

HALVED = Fault(
    name="sum halved",
    kind="scale",
    file="torch_impl/collectives/plain.py",
    old="return total.to(x.dtype)\n",
    new="return (total / 2).to(x.dtype)\n",
    expect="value: off by the constant factor",
)


def test_a_planted_module_stands_in_for_the_healthy_one_and_leaves():
    healthy = torch_impl.collectives.plain
    with Plot.of(HALVED, ["torch_impl.collectives.plain"]) as plot:
        (patched,) = plot.modules
        assert sys.modules["torch_impl.collectives.plain"] is patched is not healthy
        with plot.lifted():
            assert sys.modules["torch_impl.collectives.plain"] is healthy
        assert sys.modules["torch_impl.collectives.plain"] is patched
    assert sys.modules["torch_impl.collectives.plain"] is healthy


def test_who_reads_the_source_reads_the_patched_text():
    healthy = inspect.getsource(torch_impl.collectives.plain.summed)
    with Plot.of(HALVED, ["torch_impl.collectives.plain"]) as plot:
        assert inspect.getsource(plot.modules[0].summed) == healthy.replace(HALVED.old, HALVED.new) != healthy
    assert inspect.getsource(torch_impl.collectives.plain.summed) == healthy


def test_the_harness_uses_the_planted_code_while_it_is_there():
    layouts, view = inputs.production_layouts, lockstep.MeshView
    with Plot.of(HALVED):
        assert inputs.production_layouts is not layouts
        assert lockstep.MeshView is not view
    assert inputs.production_layouts is layouts
    assert lockstep.MeshView is view


def test_modules_return_after_a_patch_that_cannot_be_imported():
    before = {name: module for name, module in sys.modules.items() if name.startswith("torch_impl")}
    broken = Fault("broken", "scale", HALVED.file, HALVED.old, "return (\n", "value: ")
    with pytest.raises(SyntaxError):
        Plot.of(broken, ["torch_impl.collectives.plain"])
    assert {name: module for name, module in sys.modules.items() if name.startswith("torch_impl")} == before


def test_the_table_keeps_the_healthy_schemes():
    before = dict(TABLE)
    _, patched = planted(HALVED, [schemes.sum_to_invariant])
    assert before == TABLE
    assert patched[schemes.sum_to_invariant.key] is not schemes.sum_to_invariant


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_a_fault_is_caught_and_gone_afterwards(engine):
    text = (ROOT / HALVED.file).read_bytes()
    ranges = Range(4, engine, [schemes.sum_to_invariant])
    (catch, *_) = ranges.outcome(HALVED).catches
    assert "value" in catch.oracles
    assert all(trial.healthy.ok for course in ranges.courses for trial in course.drawn)
    assert (ROOT / HALVED.file).read_bytes() == text


def test_a_rank_elsewhere_runs_the_patch_and_no_jax():
    program = """if True:
        import sys
        from parity_tests.faults.patch import Plot, _arrived
        import cloudpickle
        def job(x):
            from torch_impl.collectives import plain
            return plain.summed.__code__.co_consts, "jax" in sys.modules
        text = open("torch_impl/collectives/plain.py").read().replace("total.to(x.dtype)", "total.to(x.dtype) * 77")
        arrived = _arrived("torch_impl/collectives/plain.py", text, cloudpickle.dumps(job))
        constants, jax = arrived(None)
        import torch_impl.collectives.plain as healthy
        sys.exit(77 not in constants or jax or 77 in healthy.summed.__code__.co_consts)
    """
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_a_stale_fault_is_refused():
    stale = Fault("gone", "scale", HALVED.file, "no such text", "", "value: ")
    with pytest.raises(StaleFault) as error:
        patched_text(stale)
    want = "fault 'gone' is stale: its old text occurs 0 times in torch_impl/collectives/plain.py, not once"
    assert str(error.value) == want


def test_an_ambiguous_fault_is_stale():
    with pytest.raises(StaleFault, match=r"fault 'twice' is stale: its old text occurs \d+ times"):
        patched_text(Fault("twice", "scale", HALVED.file, "group", "", "value: "))


def test_a_kind_has_a_name():
    with pytest.raises(ValueError) as error:
        Fault("odd", "oddity", HALVED.file, "", "", "")
    assert str(error.value).startswith("fault 'odd': kind 'oddity' is not one of reduction, group, ")


def test_a_healthy_case_speaks_for_no_oracle():
    (course,) = Range(1, schemes=[schemes.exchange]).courses
    assert oracles(course.drawn[0].healthy) == ()
