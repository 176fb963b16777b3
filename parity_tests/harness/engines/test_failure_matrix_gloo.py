"""The failure matrix on gloo: every row answered in time, by name, and the next example healthy at once."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parity_tests.evidence.failures import kinds
from parity_tests.specimens import odd_rank
from shardproof.declare.case import CaseSpec
from shardproof.engines.failure import GROUP_HINT, RankFailure
from shardproof.engines.lockstep import lockstep
from shardproof.engines.processes import pool

VERDICT_S = {"raised": 0.5}  # own mistakes; all else:
OTHER_VERDICT_S = 2.0
HEALTHY_S = 0.6
LOADED = 2.0  # how much slower a machine may be that runs other work beside these tests


def case(world: int) -> CaseSpec:
    return CaseSpec("failure_matrix", {"tp": world})


def leaves(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def other_size_in_backward(mesh: Any, case: Any) -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            dist.all_reduce(grad if mesh.rank("tp") else grad.view(-1)[:2], group=mesh["tp"])
            return grad

    Sum.apply(torch.ones(3, requires_grad=True)).sum().backward()


# body, causes allowed, words that the verdict must have besides each rank's name
ROWS = [
    (kinds.raises, {"raised"}, ["KeyError: 'no such weight' at", "waits in all_reduce float32[3] SUM (group tp, #0)"]),
    (kinds.is_killed, {"died"}, ["rank 1 was killed by SIGKILL", "all_reduce float32[3] SUM (group tp, #0)"]),
    (leaves, {"died"}, ["rank 1 left with exit code 7", "all_reduce float32[3] SUM (group tp, #0)"]),
    (
        kinds.other_shape,
        {"collective mismatch"},
        ["shape differs", "float32[2] SUM (group tp, #0)", "float32[3] SUM (group tp, #0)"],
    ),
    (odd_rank.other_dims, {"collective mismatch"}, ["shape differs", "float32[2, 3]", "float32[3, 2]"]),
    (kinds.other_dtype, {"collective mismatch"}, ["dtype differs", "float32[3]", "int32[3]"]),
    (kinds.other_item_size, {"collective mismatch"}, ["dtype differs", "float32[3]", "int64[3]"]),
    (kinds.other_reduce_op, {"collective mismatch"}, ["reduce op differs", "SUM", "MAX"]),
    (
        kinds.other_operation,
        {"collective mismatch"},
        ["op differs", "all_reduce float32[3] SUM", "broadcast float32[3] root=0"],
    ),
    (
        odd_rank.other_call,
        {"collective mismatch"},
        ["op differs", "all_reduce float32[3] SUM", "all_gather float32[3]"],
    ),
    (kinds.other_root, {"collective mismatch"}, ["root differs", "root=0", "root=1"]),
    (odd_rank.other_rows, {"collective mismatch", "died"}, ["all_gather float32[4]", "all_gather float32[3]"]),
    (kinds.wrong_counts, {"collective mismatch"}, ["sends 1 row to rank 1, which expects 2", "all_to_all"]),
    (
        odd_rank.short_receive,
        {"collective mismatch"},
        ["shape differs", "recv float32[2] peer=0", "send float32[4] peer=1"],
    ),
    (kinds.all_send_first, {"stalled"}, ["rank 0 waits in send float32[4] peer=1"]),
    (
        kinds.collective_missing,
        {"stalled"},
        [
            "waits in all_reduce float32[5] SUM (group tp, #1)",
            "rank 1 returned without this all_reduce; its last was all_reduce",
        ],
    ),
    (
        kinds.loops,
        {"stalled"},
        [f"rank 1 computes at {Path(kinds.__file__).name}:", "; its last was all_reduce float32[3] SUM (group tp, #0)"],
    ),
    (kinds.other_group, {"collective mismatch"}, ["group differs", "(group tp, #0)", "(group 0,1"]),
    (other_size_in_backward, {"collective mismatch"}, ["shape differs", "[bwd]"]),
]


@pytest.fixture(scope="module", params=(2, 4))
def world(request: pytest.FixtureRequest) -> int:
    pool.run(odd_rank.healthy, case(request.param))
    return request.param


@pytest.mark.fast_values(6)
@pytest.mark.parametrize(("body", "causes", "words"), ROWS, ids=[row[0].__name__ for row in ROWS])
def test_row(world: int, body: Any, causes: set[str], words: list[str]) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        pool.run(body, case(world), quiet_s=1.5)
    seconds = time.monotonic() - start
    failure, text = caught.value, str(caught.value)
    assert failure.cause in causes
    assert [word for word in (*words, f"{Path(body.__code__.co_filename).name}:") if word not in text] == []
    assert [rank for rank in range(world) if not re.search(rf"ranks? ([\d, ]+, )?{rank}\b", text)] == []
    assert len(failure.others) == world - 1
    assert seconds < VERDICT_S.get(failure.cause, OTHER_VERDICT_S) * LOADED
    start = time.monotonic()
    assert pool.run(odd_rank.healthy, case(world)).results == (float(world),) * world
    assert time.monotonic() - start < HEALTHY_S * LOADED


def test_a_functional_collective_that_is_never_waited_for_is_marked() -> None:
    rows = pool.run(kinds.never_waits, case(2)).ledger.rows
    assert [(row.rank, row.op) for row in rows if row.unwaited] == [(0, "all_reduce"), (1, "all_reduce")]


def in_a_stage(mesh: Any, case: Any) -> None:
    try:
        kinds.raises(mesh, case)
    except KeyError as error:  # as PipelineStage does
        raise RuntimeError("[Stage 1] failed to run forward:") from error


def test_a_stages_own_exception_is_reported() -> None:
    with pytest.raises(RankFailure, match=r"^raised: rank 1 raised KeyError: 'no such weight' at ") as caught:
        pool.run(in_a_stage, case(2))
    assert "failed to run forward" not in str(caught.value) and "failed to run" in "".join(caught.value.__notes__)


def interrupts(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        raise KeyboardInterrupt


def test_an_exception_without_words_ends_in_no_colon() -> None:
    with pytest.raises(RankFailure, match=r"^raised: rank 1 raised KeyboardInterrupt at "):
        pool.run(interrupts, case(2))


@pytest.mark.parametrize("engine", (lockstep.run, pool.run), ids=("lockstep", "gloo"))
def test_a_missing_group_attribute_names_its_owner(engine: Any) -> None:
    def asks_the_group(mesh: Any, case: Any) -> None:
        dist.all_reduce(torch.ones(3), group=mesh["tp"].get_group())

    def asks_the_mesh(mesh: Any, case: Any) -> None:
        dist.all_reduce(torch.ones(3), group=mesh.get_group("tp"))

    with pytest.raises(RankFailure, match=rf"no attribute 'get_group'; {re.escape(GROUP_HINT)}"):
        engine(asks_the_group, case(2))
    with pytest.raises(RankFailure, match=r"mesh: has no 'get_group'; mesh\.device_mesh is torch's DeviceMesh"):
        engine(asks_the_mesh, case(2))


def test_the_first_exception_is_reported_before_its_consequences(world: int) -> None:
    with pytest.raises(RankFailure) as caught:
        pool.run(kinds.raises, case(world))
    assert caught.value.rank == 1
    assert str(caught.value).startswith("raised: rank 1 raised KeyError")
    assert 'raise KeyError("no such weight")' in "".join(caught.value.__notes__)


@pytest.fixture
def slow_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that takes 3 s to import in any process but this one."""
    code = f"import os, time\ntime.sleep(0 if os.getpid() == {os.getpid()} else 3)\nVALUE = 7\n"
    (tmp_path / "slow_to_import.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("slow_to_import")
    del sys.modules["slow_to_import"]


@pytest.mark.slow
def test_slow_import_is_no_stall(world: int, slow_module: Any) -> None:
    def imports(mesh: Any, case: Any) -> float:
        return odd_rank.healthy(mesh, case) + slow_module.VALUE

    start = time.monotonic()
    assert pool.run(imports, case(world), quiet_s=1.5).results == (world + 7.0,) * world
    assert time.monotonic() - start > 3
