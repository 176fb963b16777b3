"""A bug lives in memory only, while it is injected; ranks in other processes get it by value."""

import inspect
import sys

import jax.numpy as jnp
import pytest

import torch_impl.collectives.plain
from parity_tests import warm_python
from parity_tests.collectives import test_schemes as schemes
from parity_tests.evidence.injected_bugs.injected_bug import ROOT, InjectedBug, StaleBug, patched_text, source, symbols
from parity_tests.evidence.injected_bugs.patched_modules import PatchedModules
from parity_tests.evidence.injected_bugs.runner import BugRunner, FalseAlarm, oracles, patched_schemes
from parity_tests.evidence.injected_bugs.trials import Trial
from shardproof import scheme, values
from shardproof.declare.discover import TABLE
from shardproof.draw import inputs
from shardproof.engines.lockstep import lockstep

PLAIN = "torch_impl/collectives/plain.py"
HALVED = InjectedBug(
    name="sum halved",
    kind="scale",
    at="collectives:all_reduce_sum",
    old="return total.to(x.dtype)\n",
    new="return (total / 2).to(x.dtype)\n",
    expect="value: off by the constant factor",
)


def test_a_patched_module_replaces_the_healthy_one_inside_the_block():
    healthy = torch_impl.collectives.plain
    with PatchedModules.of(HALVED, ["torch_impl.collectives.plain"]) as injected:
        (module,) = injected.modules
        assert sys.modules["torch_impl.collectives.plain"] is module is not healthy
        with injected.suspended():
            assert sys.modules["torch_impl.collectives.plain"] is healthy
        assert sys.modules["torch_impl.collectives.plain"] is module
    assert sys.modules["torch_impl.collectives.plain"] is healthy


def test_inspect_reads_the_patched_source():
    healthy = inspect.getsource(torch_impl.collectives.plain.all_reduce_sum)
    with PatchedModules.of(HALVED, ["torch_impl.collectives.plain"]) as injected:
        assert (
            inspect.getsource(injected.modules[0].all_reduce_sum) == healthy.replace(HALVED.old, HALVED.new) != healthy
        )
    assert inspect.getsource(torch_impl.collectives.plain.all_reduce_sum) == healthy


def test_the_harness_uses_the_patched_code_inside_the_block():
    layouts, view = inputs.production_layouts, lockstep.MeshView
    with PatchedModules.of(HALVED):
        assert inputs.production_layouts is not layouts
        assert lockstep.MeshView is not view
    assert inputs.production_layouts is layouts
    assert lockstep.MeshView is view


def test_modules_return_after_a_patch_that_cannot_be_imported():
    before = {name: module for name, module in sys.modules.items() if name.startswith("torch_impl")}
    broken = InjectedBug("broken", "scale", HALVED.at, HALVED.old, "return (\n", "value: ")
    with pytest.raises(SyntaxError):
        PatchedModules.of(broken, ["torch_impl.collectives.plain"])
    assert {name: module for name, module in sys.modules.items() if name.startswith("torch_impl")} == before


def test_the_table_keeps_the_healthy_schemes():
    before = dict(TABLE)
    _, patched = patched_schemes(HALVED, [schemes.sum_to_invariant])
    assert before == TABLE
    assert patched[schemes.sum_to_invariant.key] is not schemes.sum_to_invariant


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_a_bug_is_caught_and_gone_afterwards(engine):
    text = (ROOT / PLAIN).read_bytes()
    runner = BugRunner(4, engine, [schemes.sum_to_invariant])
    (catch, *_) = runner.outcome(HALVED).catches
    assert "value" in catch.oracles
    assert all(trial.healthy.ok for trials in runner.schemes for trial in trials.drawn)
    assert (ROOT / PLAIN).read_bytes() == text


def test_a_case_without_a_single_right_value_catches_nothing_and_is_no_false_alarm():
    @scheme(
        reference=lambda x: jnp.floor(x), mesh={"tp": (1,)}, inputs={"x": "b"}, outputs="b", draw={"x": values("ones")},
        dtypes=("bfloat16",), nograd=("x",),
    )  # fmt: skip
    def floored(mesh, x):
        return (x.double() - factor * 2.0**-10).floor().to(x.dtype)

    found = {}
    for factor in (1, 2**11):  # 1 is a rounding from a number below 1; -1 is far from it
        trial = Trial(floored, floored.case(b=3, tp=1, dtype="bfloat16"))
        with PatchedModules.of(HALVED, ["torch_impl.collectives.plain"]) as injected:
            try:
                found[factor] = BugRunner(4, schemes=[floored])._catch(trial, {floored.key: floored}, injected, 1)
            except FalseAlarm as alarm:
                found[factor] = "floored" in str(alarm)
    assert found == {1: [], 2**11: True}


def test_a_rank_elsewhere_runs_the_patch_and_no_jax():
    program = """if True:
        import sys
        from parity_tests.evidence.injected_bugs.patched_modules import PatchedModules, _unpickled
        import cloudpickle
        def job(x):
            from torch_impl.collectives import plain
            return plain.all_reduce_sum.__code__.co_consts, "jax" in sys.modules
        text = open("torch_impl/collectives/plain.py").read().replace("total.to(x.dtype)", "total.to(x.dtype) * 77")
        job = _unpickled("torch_impl/collectives/plain.py", text, cloudpickle.dumps(job))
        constants, jax = job(None)
        import torch_impl.collectives.plain as healthy
        sys.exit(77 not in constants or jax or 77 in healthy.all_reduce_sum.__code__.co_consts)
    """
    done = warm_python.run("-c", program, folder=ROOT, imported=warm_python.TORCH)
    assert done.returncode == 0, done.stderr


def bug(at, old="group", name="changed"):
    return InjectedBug(name, "scale", at, old, "", "value: ")


def message(bug):
    with pytest.raises(StaleBug) as error:
        patched_text(bug)
    return str(error.value)


def test_a_stale_bug_names_the_symbol_that_has_its_text_now():
    text = "return total.to(x.dtype)"
    place = "'@@ collectives:all_reduce_sum' (torch_impl/collectives/plain.py)"
    ending = f"its old text is not in collectives:{{}}, but in {place}"
    for elsewhere in ("gathered", "no_such_name"):
        assert message(bug(f"collectives:{elsewhere}", text)).endswith(ending.format(elsewhere))


def test_a_stale_bug_whose_text_is_gone_names_its_symbol_or_the_nearest():
    begin = "injected bug 'changed' is stale: "
    assert message(bug("collectives:all_reduce_sum", "no such text")).startswith(
        f"{begin}its old text does not occur in"
    )
    assert "there is no collectives:all_reduce_sun; the nearest name is 'all_reduce_sum'" in message(
        bug("collectives:all_reduce_sun", "no such text")
    )
    assert message(bug("nowhere:all_reduce_sum")).endswith("torch_impl/nowhere has no symbols; old text 'group'")


def test_an_ambiguous_bug_is_stale():
    twice = "times in collectives:all_reduce_sum (torch_impl/collectives/plain.py), not once"
    assert twice in message(bug("collectives:all_reduce_sum"))


def test_a_bug_is_selected_by_component_or_by_more_of_the_path():
    for at in ("collectives:all_reduce_sum", "collectives/plain:all_reduce_sum"):
        assert patched_text(bug(at, HALVED.old)).file == "torch_impl/collectives/plain.py"
    (symbol,) = [symbol for symbol in symbols("collectives/plain") if symbol.name == "all_reduce_sum"]
    assert source(symbol).startswith("def all_reduce_sum(") and HALVED.old in source(symbol)
    assert bug("collectives/plain:all_reduce_sum").component == "collectives"


def test_a_symbol_begins_with_its_decorators_and_lies_in_its_class():
    backward = bug("collectives:_AllReduce.backward", "@staticmethod")
    assert patched_text(backward).first_line == patched_text(backward).last_line


def test_a_kind_has_a_name():
    with pytest.raises(ValueError) as error:
        InjectedBug("odd", "oddity", HALVED.at, "", "", "")
    assert str(error.value).startswith("injected bug 'odd': kind 'oddity' is not one of reduction, group, ")


def test_a_healthy_case_is_reported_by_no_oracle():
    (trials,) = BugRunner(1, schemes=[schemes.exchange]).schemes
    assert oracles(trials.drawn[0].healthy) == ()
