"""The torchrun engine: runs, failures by name, new groups after a failure, and every rank leaving with one status."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from parity_tests import warm_python
from parity_tests.warm_python import TORCH, TORCH_AND_JAX

LIMIT_S = 120

JOB = """
    import os, re, signal, sys, time, types
    import torch, torch.distributed as dist
    from shardproof.declare.case import CaseSpec
    from shardproof.engines.processes import launch
    from shardproof.engines.failure import NotRun, RankFailure

    if not launch.is_rank_zero():
        status = launch.serve()
        print("served", status, "jax" in sys.modules, flush=True)
        sys.exit(status)

    def healthy(mesh, case):
        x = torch.full((3,), float(mesh.rank("tp")))
        dist.all_reduce(x, group=mesh["tp"])
        return x[0].item()

    def large(mesh, case):
        return bytes(9_000_000)

    def raises(mesh, case):
        if mesh.rank("tp") == 1:
            raise KeyError("no such weight")
        dist.all_reduce(torch.ones(3), group=mesh["tp"])

    def other_dtype(mesh, case):
        dist.all_reduce(torch.ones(3, dtype=(torch.float32, torch.int32)[mesh.rank("tp")]), group=mesh["tp"])

    def dies(mesh, case):
        if mesh.rank("tp") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(3), group=mesh["tp"])

    def skips(mesh, case):
        if mesh.rank("tp") == 1:
            dist.all_reduce(torch.ones(3), group=mesh["tp"])

    scope = {}
    of_the_compiler = "/site-packages/torch/_inductor/of_this_test.py"
    exec(compile("def compile_for(seconds, sleep): sleep(seconds)", of_the_compiler, "exec"), scope)

    def compiles(mesh, case, compile_for=types.FunctionType(scope["compile_for"].__code__, {})):
        if mesh.rank("tp") == 1:
            compile_for(3.0, time.sleep)
        return healthy(mesh, case)

    def loops(mesh, case):
        while mesh.rank("tp") == 1:
            pass
        dist.all_reduce(torch.ones(3), group=mesh["tp"])

    def holds(mesh, case):
        if mesh.rank("tp") == 1:
            re.match("(a+)+$", "a" * 60 + "b")
        dist.all_reduce(torch.ones(3), group=mesh["tp"])

    case = CaseSpec("launch", {"tp": 2})
    for name in sys.argv[1:]:
        try:
            ranks = launch.run(globals()[name], case, quiet_s=1.5)
            print(name, len(ranks.ledger.rows), *map(str, map(len, map(repr, ranks.results))), flush=True)
        except (RankFailure, NotRun, ValueError) as error:
            print(name, type(error).__name__, str(error).replace("\\n", ";"), flush=True)
    launch.finish(3)
    sys.exit(3)
"""

SCHEME = """
    import jax.numpy as jnp
    import torch.distributed as dist
    from shardproof import scheme

    def whole(x):
        return jnp.sum(x, -1)

    @scheme(reference=whole, mesh={"tp": (1, 2)}, inputs={"x": "b v/tp"}, outputs="b tp=I", nograd=("x",),
            dtypes=("float32",), reduction=("v",))
    def total(mesh, x):
        y = x.sum(-1)
        BUG
        dist.all_reduce(y, group=mesh["tp"])
        return y
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(JOB))
    return path


def two_ranks(folder: Path, *command: str, imported: Sequence[str] = TORCH) -> list[tuple[int, str]]:
    """Exit status and output of each rank of a job that nobody manages: rank 0 holds the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    done = warm_python.together([(command, rank) for rank in ranks], folder, imported, LIMIT_S)
    return [(rank.returncode, rank.stdout) for rank in done]


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*start, *command], capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(30)
def test_ranks_of_a_test_may_print_more_than_a_pipe_buffers(tmp_path: Path) -> None:
    wordy = "import os; print('x' * 200_000 * (1 + int(os.environ['RANK'])))"
    assert [(status, len(output)) for status, output in two_ranks(tmp_path, "-c", wordy)] == [
        (0, 200_001),
        (0, 400_001),
    ]


@pytest.mark.slow
def test_healthy_runs_and_one_status(script: Path) -> None:
    (lead, printed), (follow, served) = two_ranks(script.parent, str(script), "healthy", "healthy", "large")
    assert (lead, follow) == (3, 3)
    assert printed.split("\n")[:3] == ["healthy 2 3 3", "healthy 2 3 3", "large 0 36000003 36000003"]
    assert served == "served 3 False\n"


@pytest.mark.slow
def test_after_a_failure_the_ranks_meet_again(script: Path) -> None:
    (lead, printed), (follow, _) = two_ranks(
        script.parent, str(script), "raises", "healthy", "other_dtype", "skips", "healthy"
    )
    assert (lead, follow) == (3, 3)
    raised, again, mismatch, stalled, last = printed.splitlines()
    assert raised.startswith("raises Raised raised: rank 1 raised KeyError: 'no such weight' at job.py:")
    assert "rank 0 waits in all_reduce float32[3] SUM (group tp, #0) at job.py:" in raised
    assert again == last == "healthy 2 3 3"
    assert "other_dtype CollectiveMismatch collective mismatch: dtype differs" in mismatch
    assert "skips Stalled stalled" in stalled
    assert "rank 1 waits in all_reduce float32[3] SUM (group tp, #0)" in stalled


@pytest.mark.slow
def test_a_compilation_is_waited_for(script: Path) -> None:
    (lead, printed), (follow, _) = two_ranks(script.parent, str(script), "compiles", "skips")
    assert (lead, follow) == (3, 3)
    compiled, stalled = printed.splitlines()
    assert compiled == "compiles 2 3 3" and stalled.startswith("skips Stalled stalled")


@pytest.mark.slow
def test_a_rank_in_an_endless_loop_ends_the_job(script: Path) -> None:
    (lead, printed), (follow, _) = two_ranks(script.parent, str(script), "loops", "loops", "healthy")
    assert (lead, follow) == (3, 3)
    first, second, third = printed.splitlines()
    assert first.startswith("loops Stalled stalled: nothing has moved")
    assert re.search(r"rank 1 computes at job\.py:\d+, nothing issued yet", first)
    assert second == first
    assert third.startswith("healthy NotRun torchrun: a rank still hangs")


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreter_from_its_first_line_on_ends(script: Path) -> None:
    # The job before disarms the alarm of this one.
    (lead, printed), (follow, _) = two_ranks(script.parent, str(script), "healthy", "holds")
    assert (lead, follow) == (3, 1)  # 1 is the fault handler's
    stalled = (
        r"holds Stalled stalled: nothing has moved for [\d.]+ s: rank 1 computes at job\.py:\d+, nothing issued yet;"
    )
    assert re.match(stalled, printed.splitlines()[1])


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(("bug", "status"), [("y = y + mesh.rank('tp')", 1), ("y.no_such_method()", 3)])
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str, status: int) -> None:
    path = tmp_path / "total.py"
    path.write_text(textwrap.dedent(SCHEME).replace("BUG", bug))
    verify = ("-m", "shardproof", "verify", str(path), "--engine", "torchrun", "--examples", "2")
    monkeypatch.chdir(tmp_path)  # a replay file is written
    (lead, printed), (follow, _) = two_ranks(tmp_path, *verify, imported=TORCH_AND_JAX)
    assert (lead, follow) == (status, status)
    assert "total    tp=2   torchrun" in printed


@pytest.mark.slow
def test_torchrun_starts_it(tmp_path: Path) -> None:
    path = tmp_path / "total.py"
    path.write_text(textwrap.dedent(SCHEME).replace("BUG", ""))
    done = torchrun("-m", "shardproof", "verify", str(path), "--engine", "torchrun", "--examples", "2")
    assert done.returncode == 0
    assert "1 scheme, 0 mismatches, 0 not run" in done.stdout


@pytest.mark.slow
def test_a_rank_killed_in_a_later_run_is_named(script: Path) -> None:
    done = torchrun(str(script), "healthy", "dies", "healthy")
    assert done.returncode == 1 and done.stdout == "healthy 2 3 3\n"
    assert re.search(
        r"^shardproof: died: rank 1 ended without a word; it was last seen so: computes, nothing issued yet\n"
        r"  rank 0 (lost its peers|waits) in all_reduce float32\[3\] SUM \(group tp, #0\) at job.py:\d+$",
        done.stderr,
        re.MULTILINE,
    )


def test_outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.engines.processes import launch, member

    monkeypatch.delenv("RANK", raising=False)
    member.environment.cache_clear()
    with pytest.raises(ValueError) as caught:
        launch.is_rank_zero()
    assert str(caught.value) == (
        "engines.launch: RANK is not set, so this is no torchrun job; start it with "
        "torchrun --nproc-per-node N -m shardproof in place of shardproof"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_file_that_changes_the_environment_changes_no_job(tmp_path: Path, name: str) -> None:
    path = tmp_path / "total.py"
    changes = f"import os\nos.environ[{name!r}] = '1'\n"
    path.write_text(changes + textwrap.dedent(SCHEME).replace("BUG", "y = y + mesh.rank('tp')"))
    verify = ("-m", "shardproof", "verify", str(path), "--engine", "torchrun", "--examples", "2")
    (lead, printed), (follow, _) = two_ranks(tmp_path, *verify, imported=TORCH_AND_JAX)
    assert (lead, follow) == (1, 1)
    assert "total    tp=2   torchrun" in printed


LEAVING = """
    @scheme(reference=whole, mesh={"tp": (2,)}, inputs={"x": "b v/tp"}, outputs="b tp=I", nograd=("x",))
    def leaving(mesh, x):
        if mesh.rank("tp") in RANKS:
            LEAVES
        return x.sum(-1)
"""
OF_C, KILLED = "__import__('ctypes').CDLL(None)._exit(0)", "__import__('os').kill(__import__('os').getpid(), 9)"


def written(folder: Path, ranks: tuple[int, ...], leaves: str) -> Path:
    """A file with a wrong scheme, and one that ends the processes of these ranks."""
    leaving = LEAVING.replace("RANKS", str(ranks)).replace("LEAVES", leaves)
    (folder / "total.py").write_text(textwrap.dedent(SCHEME + leaving).replace("BUG", "y = y + mesh.rank('tp')"))
    return folder / "total.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ((1,), "died: rank 1 left with exit code 0 before it reported"),
        ((0, 1), "died: rank 0 left with exit code 0 before it reported"),
    ],
)
def test_a_rank_that_native_code_ends_with_status_0_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], sentence: str
) -> None:
    """Torchrun takes it for a success."""
    path = written(tmp_path, ranks, OF_C)
    monkeypatch.chdir(tmp_path)  # a replay file is written
    cases = ("--mesh", "tp=2", "--examples", "2")
    done = torchrun("-m", "shardproof", "verify", str(path), "--engine", "torchrun", *cases)
    assert done.returncode == 1
    assert sentence in done.stdout + done.stderr
    assert "total    tp=2   torchrun" in done.stdout and "MISMATCH" in done.stdout
    assert "2 schemes, 1 mismatch, 1 with a failed rank, 0 not run." in done.stdout


def test_a_rank_zero_that_is_killed_loses_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a replay file is written
    verify = ("-m", "shardproof", "verify", str(written(tmp_path, (0,), KILLED)), "--engine", "torchrun")
    cases = ("--mesh", "tp=2", "--examples", "2", "--json", "out.json")
    (lead, printed), _ = two_ranks(tmp_path, *verify, *cases, imported=TORCH_AND_JAX)
    assert lead == 3
    assert "total    tp=2   torchrun" in printed and "MISMATCH" in printed
    report = json.loads(Path("out.json").read_text())["reports"][-1]
    assert (report["verdict"], report["failure"]) == ("died", "died: rank 0 was killed by SIGKILL before it reported")
    assert Path(report["replay"]).is_file()


ASKED = "import os, time; [os.kill(process, 10) for process in (os.getppid(), os.getpid())]; time.sleep(60)"  # SIGUSR1


def test_a_signal_of_a_batch_system_loses_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, (0,), ASKED)
    verify = ("-m", "shardproof", "verify", str(path), "--engine", "torchrun", "--mesh", "tp=2", "--examples", "2")
    (lead, printed), _ = two_ranks(tmp_path, *verify, "--json", "out.json", imported=TORCH_AND_JAX)
    record = json.loads(Path("out.json").read_text())
    assert lead == 3 and "total    tp=2   torchrun" in printed and "MISMATCH" in printed
    [sentence] = record["not_judged"].values()
    assert sentence.startswith("scheme 'leaving': rank 0: ended by SIGUSR1; rank 0 computes at total.py:")


CRASHING = """
    @scheme(reference=whole, mesh={"tp": (2,)}, inputs={"x": "b v/tp"}, outputs="b tp=I", nograd=("x",))
    def crashing(mesh, x):
        if mesh.rank("tp") == 1:
            __import__("ctypes").string_at(0)
        return x.sum(-1)
"""


@pytest.mark.slow
def test_a_rank_that_dies_costs_its_own_verdict_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "total.py"
    path.write_text(textwrap.dedent(SCHEME + CRASHING).replace("BUG", "y = y + mesh.rank('tp')"))
    monkeypatch.chdir(tmp_path)
    files = ("--json", "out.json", "--examples", "2")
    done = torchrun("-m", "shardproof", "verify", str(path), "--engine", "torchrun", *files)
    record = json.loads(Path("out.json").read_text())
    assert (done.returncode, record["status"]) == (1, 3)
    assert [report["verdict"] for report in record["reports"]] == ["mismatch", "died"]
    assert record["reports"][1]["failure"].startswith("died: rank 1 was killed by SIGSEGV at total.py:")
    assert "2 schemes, 1 mismatch, 1 with a failed rank, 0 not run." in done.stdout


def test_a_wrong_argument_on_rank_zero_ends_the_others(tmp_path: Path) -> None:
    verify = ("-m", "shardproof", "verify", "absent.py", "--engine", "torchrun")
    (lead, printed), (follow, _) = two_ranks(tmp_path, *verify, imported=TORCH_AND_JAX)
    assert (lead, follow) == (2, 2)
    assert printed == ""
