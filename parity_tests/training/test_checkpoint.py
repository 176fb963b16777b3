"""A damaged checkpoint is never loaded: the error names the file and the remedy, before any collective."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.declare.case import CaseSpec
from shardproof.engines.failure import Raised
from shardproof.engines.lockstep import lockstep
from shardproof.training import checkpoint
from shardproof.training.body import train as body
from shardproof.training.run import SIZES, Run

DAMAGES = 200
SMALL = {"steps": 2, "streams": 2, "length": 48, "sizes": {**SIZES, "layers": ("attention",)}, "every": 1}
FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "done", "sha256")


def case(run, folder):
    return CaseSpec("train", run.full_mesh, dtype=run.dtype, options=run.options(folder=str(folder)), engine="lockstep")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two ranks have left checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("training")
    run = Run.on({"dp": 2}, **SMALL, checkpoint=str(folder / "checkpoints"))
    lockstep.run(body, case(run, folder))
    return run.replace(resume=True)


@pytest.fixture
def last(run):
    """The folder of the newest checkpoint, a copy that a test may damage."""
    folder = Path(run.checkpoint) / "step_000002"
    copy = shutil.copytree(folder, Path(run.checkpoint) / "copy")
    yield folder
    shutil.rmtree(folder)
    copy.rename(folder)


def rejection(run):
    with pytest.raises(ValueError) as caught:
        checkpoint.newest(run)
    return str(caught.value)


@pytest.mark.slow
def test_the_files_of_a_folder(run):
    folder = Path(run.checkpoint) / "step_000002"
    assert sorted(os.listdir(folder)) == sorted(FILES)
    assert checkpoint.newest(run) == 2
    assert json.loads((folder / "done").read_text().splitlines()[0])["step"] == 2


@pytest.mark.slow
@settings(max_examples=DAMAGES, deadline=None)
@given(data=st.data(), name=st.sampled_from(FILES), kind=st.sampled_from(["flip", "truncate", "extend"]))
def test_a_damaged_file_is_named(run, data, name, kind):
    path = Path(run.checkpoint) / "step_000002" / name
    written = path.read_bytes()
    place = data.draw(st.integers(0, len(written) - 1), "place")
    bits = data.draw(st.integers(1, 255), "bits")
    flipped = bytes([written[place] ^ bits])
    damaged = {
        "flip": written[:place] + flipped + written[place + 1 :],
        "truncate": written[:place],
        "extend": written + flipped,
    }
    try:
        path.write_bytes(damaged[kind])
        assert rejection(run).startswith(f"--resume: {path} is truncated or changed")
    finally:
        path.write_bytes(written)


def test_the_sentences(run, last):
    either = f"or remove {last} to go on from step 1"
    (last / "__1_0.distcp").write_bytes(b"other")
    written = re.search(r"(\w{8})\w+  __1_0", (last / "sha256").read_text())[1]
    assert rejection(run) == (
        f"--resume: {last}/__1_0.distcp is truncated or changed: its SHA-256 is d9298a10..., {written}... was written; "
        f"restore the file, {either}"
    )
    (last / "__1_0.distcp").unlink()
    assert rejection(run) == f"--resume: {last}/__1_0.distcp is missing; restore the file, {either}"
    (last / "__1_0.distcp").mkdir()
    assert rejection(run) == (
        f"--resume: {last}/__1_0.distcp cannot be read: Is a directory; restore the file, {either}"
    )
    (last / "__2_0.distcp").touch()
    assert rejection(run) == (f"--resume: {last}/__2_0.distcp is not a file of this checkpoint; remove it, {either}")
    (last / "sha256").unlink()
    assert rejection(run) == f"--resume: {last}/sha256 is missing; restore the file, {either}"
    (last / "done").write_text("{}")
    assert rejection(run) == (
        f"--resume: {last}/done is truncated or changed, or of a version that wrote no checksums; restore the file, "
        f"{either}"
    )
    elsewhere = Path(run.checkpoint) / "alone" / "step_000002"
    shutil.copytree(last, elsewhere)
    assert rejection(run.replace(checkpoint=str(elsewhere.parent))).endswith(
        f"or remove {elsewhere} to begin anew without --resume"
    )


def test_files_of_another_step_are_rejected(run, last):
    first = last.with_name("step_000001")
    shutil.copy(first / "done", last / "done")
    assert rejection(run).startswith(f"--resume: {last}/sha256 is truncated or changed")
    for name in FILES:
        shutil.copy(first / name, last / name)
    assert rejection(run) == f"--resume: {last} is the checkpoint of step 1; give it the name step_000001"


def test_every_rank_rejects_it_before_any_collective(run, last, tmp_path):
    (last / "__0_0.distcp").write_bytes((last / "__0_0.distcp").read_bytes()[:-1])
    written = {path: path.stat().st_mtime_ns for path in Path(run.checkpoint).rglob("*")}
    with pytest.raises(Raised, match=re.escape(f"{last}/__0_0.distcp is truncated or changed")) as caught:
        lockstep.run(body, case(run.replace(steps=3), tmp_path))
    assert caught.value.ledger.rows == []
    assert {path: path.stat().st_mtime_ns for path in Path(run.checkpoint).rglob("*")} == written
    assert list(tmp_path.iterdir()) == []  # no step was computed


def test_a_killed_run_leaves_the_checkpoint_it_was_to_replace(run, last, monkeypatch, tmp_path):
    def killed(state, checkpoint_id):
        Path(checkpoint_id).mkdir()
        (Path(checkpoint_id) / ".metadata").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_state", lambda parameters, optimizer: {})
    monkeypatch.setattr(checkpoint.dcp, "save", killed)
    monkeypatch.setattr(checkpoint.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoint.dist, "barrier", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(run, {}, None, 2)
    monkeypatch.undo()
    assert (last.parent / "step_000002.part").is_dir()
    assert checkpoint.newest(run) == 2


def test_the_checkpoints_of_another_run_are_not_replaced_unasked(run):
    anew = run.replace(resume=False)
    with pytest.raises(ValueError) as caught:
        checkpoint.check_unused(anew)
    assert str(caught.value) == (
        f"--checkpoint {run.checkpoint}: has 2 checkpoints of an earlier run, the last of step 2; go on from it by "
        "--resume, replace them by --overwrite, or give another folder"
    )
    checkpoint.check_unused(anew.replace(overwrite=True))
    checkpoint.check_unused(run.replace(resume=True))
    checkpoint.check_unused(anew.replace(checkpoint=f"{run.checkpoint}_elsewhere"))
