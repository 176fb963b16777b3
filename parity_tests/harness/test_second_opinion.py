"""A failure is judged once more in fresh processes: confirmed, engines disagree, or nothing that they could see."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from parity_tests import warm_python
from parity_tests.slow import slow_but
from parity_tests.specimens.small_scheme import declared
from parity_tests.specimens.user_files import HEAD, RIGHT, WRONG, written
from shardproof import EnginesDisagree, ValueMismatch, check, second_opinion
from shardproof.declare.case import CaseSpec
from shardproof.declare.discover import schemes_of_file
from shardproof.engines.failure import Raised, Stalled
from shardproof.engines.lockstep.group import LockstepGroup, reject_missing
from shardproof.engines.processes import pool
from shardproof.experiments.notes import RIGHT_WITHOUT_CALL
from shardproof.verify_one_case import verify_case

SHARING = """
import torch.distributed as dist
import a_library_of_state as L
def sharing(mesh, x):
    L.RANK = mesh.rank("tp")
    dist.barrier(group=mesh["tp"])
    return x * 2 + L.RANK - mesh.rank("tp")
declare(sharing, mesh={"tp": (2,)})
"""
ONE_GROUP = """
import torch.distributed as dist
def kept(group, groups=[]):
    groups.append(group)
    return groups[0]
def one_group(mesh, x):
    dist.all_reduce(x.detach().clone(), group=kept(mesh["tp"]))
    return x * 2
declare(one_group, mesh={"tp": (2,)})
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that keeps a number for its process."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library_of_state.py").write_text("RANK = 0\n")
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("a_library_of_state", None)


@pytest.fixture
def first(monkeypatch):
    """As if this process had imported and verified no other scheme."""
    monkeypatch.setattr(second_opinion, "TABLE", {})
    monkeypatch.setattr(second_opinion, "VERIFIED", set())


def test_a_mistake_is_confirmed_and_its_verdict_is_as_before():
    (scheme,) = schemes_of_file(written("confirmed.py", WRONG))
    report = scheme.verify(examples=2, tp=2)
    assert (report.verdict, report.confirmed_on, report.engines_disagree) == ("mismatch", "gloo", None)
    assert "  confirmed on gloo, in fresh processes" in str(report).splitlines()
    assert "MISMATCH" in str(report) and report.to_dict()["confirmed_on"] == "gloo"
    with pytest.raises(ValueMismatch):
        report.raise_if_failed()


def test_shared_objects_are_reported_before_disagreeing_engines(first, monkeypatch):
    (scheme,) = schemes_of_file(written("groups.py", ONE_GROUP))
    report = verify_case(scheme, scheme.case(tp=2, b=2, dtype="float32"))
    monkeypatch.setattr(second_opinion, "_on_fresh_gloo", lambda *_: replace(report, failure=None))
    lines = str(second_opinion.second_opinion(scheme, report)).splitlines()
    assert re.match(r"  shared: rank \d calls all_reduce at groups.py:", lines[1]), lines
    assert lines.index(f"  engines disagree: {second_opinion.SHARES_NOTHING}") > 1


def test_a_limit_of_lockstep_names_its_remedy_once(monkeypatch):
    monkeypatch.delattr(LockstepGroup, "broadcast")  # undone by setting it again
    reject_missing()

    def broadcasting(mesh, x):
        dist.broadcast(x.detach().clone(), 0, group=mesh["tp"])
        return x * 2

    scheme = declared(broadcasting)
    before = verify_case(scheme, scheme.case(tp=2))
    monkeypatch.setattr(second_opinion, "_on_fresh_gloo", lambda *_: replace(before, failure=None))
    text = str(second_opinion.second_opinion(scheme, before))
    assert f"not confirmed on gloo: {second_opinion.LIMIT}" in " ".join(text.split())
    assert text.count("verify with --engine gloo") == 1


def test_fresh_processes_that_stall_confirm_nothing(monkeypatch):
    (scheme,) = schemes_of_file(written("stalling.py", WRONG))
    before = verify_case(scheme, scheme.case(tp=2, b=2, dtype="float32"))
    stalled = replace(before, failure=Stalled("nothing has moved for 30 s", rank=0))
    monkeypatch.setattr(second_opinion, "_on_fresh_gloo", lambda *_: stalled)
    report = second_opinion.second_opinion(scheme, before)
    assert (report.verdict, report.confirmed_on, report.engines_disagree) == ("mismatch", None, None)
    assert "  not confirmed on gloo: its processes stalled, as on a busy machine" in str(report)


def test_a_gloo_failure_that_does_not_repeat_is_not_confirmed(first, monkeypatch):
    (scheme,) = schemes_of_file(written("leaving.py", WRONG))
    before = verify_case(scheme, scheme.case(tp=2, b=2, dtype="float32").replace(engine="gloo"))
    monkeypatch.setattr(second_opinion, "_on_fresh_gloo", lambda *_: replace(before, tensors=()))
    report = second_opinion.second_opinion(scheme, before)
    assert (report.verdict, report.confirmed_on) == ("mismatch", None)
    assert f"not confirmed: {second_opinion.PASSES_FRESH}" in " ".join(str(report).split())


def test_a_rank_that_raises_is_confirmed():
    def raising(mesh, x):
        raise KeyError("no such weight")

    report = declared(raising).verify(examples=1, tp=2)
    assert (report.verdict, report.confirmed_on) == ("raised", "gloo")


@pytest.mark.slow
def test_where_gloo_passes_the_engines_disagree(library, first, shardproof):
    status, out, _ = shardproof(
        "verify", written("sharing.py", SHARING, RIGHT), "--junit", "out.xml", "--json", "o.json"
    )
    assert status == 1
    assert f"  engines disagree: {second_opinion.PASSES_ON_GLOO}" in out.splitlines()
    assert "differs on lockstep" in out and "MISMATCH" not in out
    assert out.splitlines()[-1] == "2 schemes, 0 mismatches, 1 on which engines disagree, 0 not run."
    (sharing, _) = json.loads(Path("o.json").read_text())["reports"]
    assert (sharing["verdict"], sharing["engines_disagree"]) == ("engines disagree", second_opinion.PASSES_ON_GLOO)
    assert 'failure message="engines disagree"' in Path("out.xml").read_text()
    (scheme, _) = schemes_of_file("sharing.py")
    with pytest.raises(EnginesDisagree):
        scheme.verify(examples=2).raise_if_failed()


def test_a_case_that_fails_otherwise_on_gloo_is_not_confirmed(monkeypatch):
    (scheme,) = schemes_of_file(written("otherwise.py", WRONG))
    before = verify_case(scheme, scheme.case(tp=2, b=2, dtype="float32"))
    raised = replace(before, failure=Raised("raised KeyError", rank=0))
    monkeypatch.setattr(second_opinion, "_on_fresh_gloo", lambda *_: raised)
    report = second_opinion.second_opinion(scheme, before)
    assert (report.verdict, report.confirmed_on, report.engines_disagree) == ("mismatch", None, None)
    assert "  not confirmed on gloo: it fails there in another way, raised" in str(report)


CACHING = """
import torch
FIRST = {}
def caching(mesh, x):
    size = FIRST.setdefault("rows", x.shape[0])
    return x * (2 if size == x.shape[0] else 3)
def masking(mesh, x):
    above = FIRST.setdefault(x.shape, x.detach() > 0)
    return torch.where(above, x * 2, x.detach() * 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("function", "other"), [("caching", "sizes"), ("masking", "values")])
def test_state_that_the_function_keeps_between_calls_is_named_and_replayed(function, other, first):
    masked = "reference=lambda x: jnp.where(x > 0, 2.0 * x, jax.lax.stop_gradient(2.0 * x))"
    more = {"caching": "", "masking": f", {masked}"}[function]
    file = written(f"{function}.py", CACHING, f"import jax\ndeclare({function}, dtypes=('float32',){more})\n")
    (scheme,) = schemes_of_file(file)
    report = scheme.verify(tp=2, seed=3)
    assert (report.verdict, report.engines_disagree, report.confirmed_on) == ("mismatch", None, "gloo"), str(report)
    assert f"  only when the function was called with other {other} before" in str(report).splitlines()
    assert f"  {second_opinion.STATE_BETWEEN_CALLS}" in str(report).splitlines() and report.case.engine == "lockstep"
    alone = warm_python.run(report.replay)
    assert alone.returncode == 1, alone.stdout + alone.stderr


COUNTING = """
import torch.distributed as dist
COUNTS = {}
def counting(mesh, x):
    if x.shape not in COUNTS:
        COUNTS[x.shape] = x.detach().clamp(0, 1).sum()
        dist.all_reduce(COUNTS[x.shape], group=mesh["tp"])
    return x * COUNTS[x.shape]
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow_but([0], range(4)))
def test_state_that_is_equal_for_many_values_is_named_too(seed, first):
    """A count of ones among zeros: the other call of the smallest case may have as many."""
    more = "reference=lambda x: x * jnp.clip(jax.lax.stop_gradient(x), 0, 1).sum(), dtypes=('float32',)"
    file = written("counting.py", COUNTING, f"import jax\ndeclare(counting, {more}, draw={{'x': values('normal')}})\n")
    (scheme,) = schemes_of_file(file)
    report = scheme.verify(seed=seed)
    assert (report.verdict, report.engines_disagree) == ("mismatch", None), str(report)
    assert f"  {second_opinion.STATE_BETWEEN_CALLS}" in str(report).splitlines()
    assert {note for notes in report.notes.values() for note in notes} == {RIGHT_WITHOUT_CALL}, str(report)


def test_a_case_that_fails_before_it_is_shrunk_keeps_no_state(first, monkeypatch):
    """Gloo passes the shrunk case and fails the original one, even as a first call."""
    (scheme,) = schemes_of_file(written("shrunk.py", WRONG))
    record = {"call_before": {"dims": {"b": 2}, "layouts": {}, "lengths": {}, "values": {"x": {"kind": "normal"}}}}
    small = verify_case(scheme, scheme.case(tp=2, b=2, dtype="float32"))
    before = scheme.case(tp=2, b=4, dtype="float32").replace(conditions={"call_before": {**record, "seed": 1}})
    passing = replace(small, tensors=())
    failing = verify_case(scheme, scheme.case(tp=2, b=4, dtype="float32"))
    monkeypatch.setattr(
        second_opinion, "_on_fresh_gloo", lambda _, case: passing if case.dims == small.case.dims else failing
    )
    report = second_opinion.second_opinion(scheme, small, before)
    assert (report.verdict, report.state_between_calls, report.confirmed_on) == ("mismatch", None, "gloo")
    assert report.case == failing.case and report.meshes == ("tp=2",)


@pytest.mark.slow
def test_a_scheme_may_exclude_that_it_is_called_before(first):
    file = written(
        "excluding.py", CACHING, "declare(caching, dtypes=('float32',), excluded_conditions=('call_before',))\n"
    )
    (scheme,) = schemes_of_file(file)
    report = scheme.verify(tp=2, seed=3)
    assert report.verdict == "engines disagree"
    assert report.engines_disagree == f"{second_opinion.STATE_BETWEEN_CALLS}; the scheme excludes this condition"


@pytest.mark.slow
def test_a_state_that_another_file_left_is_no_verdict_on_this_one(tmp_path):
    (tmp_path / "patching.py").write_text("import torch\ntorch.Tensor.half_of = lambda x: x / 3\n" + HEAD + RIGHT)
    shim = "\nimport torch\nif not hasattr(torch.Tensor, 'half_of'): torch.Tensor.half_of = lambda x: x / 2\n"
    halving = "\ndef halving(mesh, x):\n    return x.half_of() * 4\ndeclare(halving)\n"
    (tmp_path / "halving.py").write_text(HEAD + shim + halving)
    try:
        for name in ("patching", "halving"):
            (scheme,) = schemes_of_file(str(tmp_path / f"{name}.py"))
        report = scheme.verify(examples=2, tp=2)
    finally:
        del torch.Tensor.half_of
    assert (report.verdict, report.engines_disagree) == ("engines disagree", second_opinion.PROCESS_CHANGED)


@pytest.mark.slow
def test_gloo_is_judged_again_in_fresh_processes_if_they_served_another_scheme():
    def leaving(mesh, x):
        torch.Tensor.left_over = 1.0
        return x * 2

    def finding(mesh, x):
        return x * 2 + getattr(torch.Tensor, "left_over", 0.0)

    assert declared(leaving).verify("gloo", examples=1, tp=2).ok
    report = declared(finding).verify("gloo", examples=1, tp=2)
    assert (report.verdict, report.engines_disagree) == ("engines disagree", second_opinion.PROCESS_CHANGED)


def strided(mesh, x):
    dist.all_reduce(torch.ones(4, 2).T, group=mesh["tp"])
    return x * 2


def read_before_its_wait(mesh, x):
    y = torch.zeros(1)
    work = dist.all_reduce(y, group=mesh["tp"], async_op=True)
    z = y + 0
    work.wait()
    return x * 2 + z


def never_waited(mesh, x):
    dist.all_reduce(torch.zeros(1), group=mesh["tp"], async_op=True)
    return x * 2


def changed_before_its_wait(mesh, x):
    y = torch.zeros(2)
    work = dist.all_gather([torch.zeros(2) for _ in range(mesh.size("tp"))], y, group=mesh["tp"], async_op=True)
    y += 1
    work.wait()
    return x * 2


def left_out(mesh, x):
    if mesh.rank("tp") == 0:
        dist.all_reduce(torch.zeros(1), group=mesh["tp"])
    return x * 2


@pytest.mark.parametrize(
    ("function", "verdict", "reason"),
    [
        (read_before_its_wait, "mismatch", "it does not see an output that is read before its wait"),
        (changed_before_its_wait, "modified", "it does not see a buffer that is changed before its wait"),
        (left_out, "deadlock", "there a deadlock cannot be told from a slow rank"),
    ],
)
def test_a_verdict_that_gloo_cannot_see_stays_with_a_remark(function, verdict, reason, monkeypatch):
    monkeypatch.setattr(pool, "run", None)
    report = declared(function).verify(examples=1, tp=2)
    assert (report.verdict, report.confirmed_on, report.engines_disagree) == (verdict, None, None)
    assert any(line.startswith(f"  not confirmed on gloo: {reason}") for line in str(report).splitlines())


def functional_never_waited(mesh, x):
    funcol.all_reduce(torch.zeros(1), "sum", mesh["tp"])
    return x * 2


def never_waited_and_wrong(mesh, x):
    return never_waited(mesh, x) * 1.5


def test_work_that_is_never_waited_for_is_a_line_beside_equal_values():
    report = declared(functional_never_waited, mesh={"tp": (1, 2)}).verify(examples=6)
    assert (report.verdict, report.examples, report.meshes) == ("protocol", 6, ("tp=1", "tp=2"))
    assert all(tensor.ok for tensor in report.tensors)
    [line] = report.protocol
    assert line.startswith("rank 0 returned and never waited for all_reduce") and line.endswith("is never read")
    assert report.confirmed_on == "gloo"


def test_a_pass_on_gloo_never_overrules_work_that_is_not_waited_for(monkeypatch):
    def doubled(mesh, x):
        return x * 2

    equal = declared(doubled).verify(examples=1, tp=2)
    monkeypatch.setattr(second_opinion, "_on_fresh_gloo", lambda scheme, case: equal)
    report = declared(never_waited).verify(examples=1, tp=2)
    assert (report.verdict, report.engines_disagree) == ("protocol", None)
    assert report.not_repeated.startswith("there its work was complete")


def test_work_that_is_never_waited_for_hides_no_wrong_number():
    report = verify_case(
        declared(never_waited_and_wrong), CaseSpec("doubled", {"tp": 2}, {"b": 4}, values={"x": {"kind": "normal"}})
    )
    assert report.verdict == "mismatch"
    assert "off by the constant factor 1.5" in str(report)


def test_a_call_that_only_gloo_accepts_stays_a_finding():
    report = declared(strided).verify(examples=1, tp=2)
    assert (report.verdict, report.confirmed_on, report.engines_disagree) == ("protocol", None, None)
    assert report.not_repeated == second_opinion.CARRIED_OUT


def receives_into_a_view(mesh, x):
    peer, group = 1 - mesh.rank("tp"), mesh["tp"]
    buffer = torch.zeros(3, 2).t()
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.ones(2, 3), group=group, group_peer=peer),
            dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer),
        ]
    ):
        work.wait()
    return x * 2


def leaves(mesh, x):
    if mesh.rank("tp") == 1:
        os._exit(3)
    return x * 2


@pytest.mark.parametrize(
    ("function", "verdict", "remedy"),
    [
        (receives_into_a_view, "protocol", "its buffer has strides (1, 2), which gloo rejects"),
        (leaves, "raised", "SystemExit: os._exit(3)"),
    ],
)
def test_another_verdict_on_gloo_confirms(function, verdict, remedy):
    report = declared(function).verify(examples=1, tp=2)
    assert (report.verdict, report.confirmed_on) == (verdict, "gloo")
    assert remedy in " ".join(str(report).split())


def test_one_case_alone_is_judged_once(monkeypatch):
    monkeypatch.setattr(pool, "run", None)
    (scheme,) = schemes_of_file(written("alone.py", WRONG))
    with pytest.raises(ValueMismatch):
        check(scheme.case(tp=2))
    narrow = declared(lambda mesh, x: x * 3, engines=("lockstep",)).verify(examples=1, tp=2)
    assert (narrow.verdict, narrow.confirmed_on) == ("mismatch", None)
    assert "  not confirmed on gloo: the scheme is declared for lockstep only" in str(narrow).splitlines()


@pytest.mark.slow
def test_state_that_gloo_keeps_between_calls_is_named_too(first):
    (scheme,) = schemes_of_file(written("on_gloo.py", CACHING, "declare(caching, dtypes=('float32',))\n"))
    report = scheme.verify("gloo", tp=2, seed=3, examples=12)
    assert (report.verdict, report.case.engine) == ("mismatch", "gloo") and "call_before" in report.case.conditions
    assert f"  {second_opinion.STATE_BETWEEN_CALLS}" in str(report).splitlines()


GROWING = """
import torch
KEPT = {}
def growing(mesh, x):
    n = mesh.size("tp")
    if len(KEPT.get(n, ())) < x.shape[1]:
        KEPT[n] = torch.arange(x.shape[1]) + 100 * x.shape[1]
    return x * KEPT[n][: x.shape[1]]
scheme(
    reference=lambda x: x * (jnp.arange(x.shape[1]) + 100 * x.shape[1]).astype(x.dtype),
    mesh={"tp": (1, 2)}, inputs={"x": "b/tp v"}, outputs="b/tp v", dims={"v": (4, 3, 2)}, dtypes=("float32",),
)(growing)
"""


@pytest.mark.slow
def test_a_buffer_that_only_grows_shows_after_a_longer_call(first):
    (scheme,) = schemes_of_file(written("growing.py", GROWING))
    report = scheme.verify(tp=2)
    assert (report.verdict, report.state_between_calls) == ("mismatch", second_opinion.STATE_BETWEEN_CALLS)


def test_a_case_that_passes_in_fresh_lockstep_follows_an_example(first, monkeypatch):
    (scheme,) = schemes_of_file(written("left.py", WRONG))
    before = verify_case(scheme, scheme.case(tp=2, b=2, dtype="float32"))
    monkeypatch.setattr(second_opinion, "_on_fresh_gloo", lambda *_: replace(before, tensors=()))
    monkeypatch.setattr(second_opinion, "_passes_in_fresh_process", lambda *_: True)
    report = second_opinion.second_opinion(scheme, before)
    assert (report.verdict, report.not_repeated) == ("mismatch", second_opinion.PASSES_FRESH)


def test_a_file_that_prints_passes_in_a_fresh_process():
    (scheme,) = schemes_of_file(written("printing.py", RIGHT, "print('it is ready')\n"))
    report = verify_case(scheme, scheme.case(tp=2, b=2, dtype="float32"))
    assert second_opinion._passes_in_fresh_process(scheme, report)
