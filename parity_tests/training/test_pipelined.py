"""Runs in pipeline stages: the curve of one device, whatever the schedule, and a run that goes on without stages."""

import shutil

import numpy as np
import pytest

from shardproof.tracing.comparison import first
from shardproof.training import record, session, show
from shardproof.training.follow import ReferenceSteps
from shardproof.training.run import SIZES, Run
from shardproof.training.traced import trace, trace_reference
from torch_impl.pipelining import tied_weights

# Four layers for the four stages of zbv on two ranks; embedding and head share a weight that two stages hold.
SMALL = {
    "steps": 2,
    "streams": 4,
    "length": 48,
    "is_tied": True,
    "sizes": {**SIZES, "layers": ("mamba", "attention") * 2},
}
KNOWN = ReferenceSteps()


def small(mesh, **settings):
    return Run.on(mesh, **{**SMALL, **settings})


MESHES = [
    ({"pp": 2}, {}),
    ({"pp": 1}, {"schedule": "zbv"}),
    ({"pp": 2}, {"schedule": "zbv"}),
    ({"pp": 2}, {"schedule": "interleaved1f1b"}),
    ({"pp": 4}, {}),
    ({"pp": 2, "dp": 2}, {"schedule": "zbv"}),
    ({"pp": 2, "dp_replicate": 2}, {}),
    ({"pp": 2, "cp": 2}, {"schedule": "zbv", "mamba": "state", "attention": "ulysses"}),
    ({"pp": 2, "tp": 2}, {"schedule": "zbv"}),
]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(("mesh", "how"), MESHES)
def test_no_schedule_changes_a_number(mesh, how):
    steps = session.followed(small(mesh, **how), KNOWN, "lockstep")
    assert [step.wrong for step in steps] == [[], []]
    assert {name for name in steps[0].rows if "lm_head" in name} == set()


@pytest.mark.slow
def test_processes_give_the_same():
    steps = session.followed(small({"pp": 2, "dp": 2}, schedule="zbv"), KNOWN, "gloo")
    assert [step.wrong for step in steps] == [[], []]


def test_a_tied_gradient_that_stays_on_its_stage_is_named(monkeypatch):
    monkeypatch.setattr(tied_weights, "_sum", lambda tie, copies: None)
    run = small({"pp": 2})
    steps = session.followed(run, KNOWN, "lockstep")
    assert set(steps[0].wrong) == {"norm", "gradient/embed_tokens.weight", "weight/embed_tokens.weight"}
    assert "the loss is equal; wrong: gradient/embed_tokens.weight" in show.closing(run, steps)


PLACES = {"one rank": ({}, "1f1b"), "1f1b": ({"pp": 2}, "1f1b"), "zbv": ({"pp": 2, "dp": 2}, "zbv")}


@pytest.mark.slow
@pytest.mark.parametrize("left", PLACES)
def test_a_run_goes_on_with_other_stages_and_to_the_bit_with_the_same(tmp_path, monkeypatch, left):
    original, written = record.write, {}
    monkeypatch.setattr(
        record, "write", lambda folder, step: (written.update({step.index: step}), original(folder, step))
    )
    mesh, schedule = PLACES[left]
    session.followed(small(mesh, schedule=schedule, checkpoint=str(tmp_path), every=1), KNOWN, "lockstep")
    straight = written[1]
    for name, (other, by) in PLACES.items():
        shutil.rmtree(tmp_path / "step_000002")
        steps = session.followed(
            small(other, schedule=by, checkpoint=str(tmp_path), every=1, resume=True), KNOWN, "lockstep"
        )
        assert [step.wrong for step in steps] == [[]], name
        if name == left:
            assert set(written[1].weights) == set(straight.weights)
            assert all(np.array_equal(written[1].weights[name], x) for name, x in straight.weights.items())


@pytest.mark.slow
def test_every_tensor_of_every_stage_is_traced():
    run = small({"pp": 2, "cp": 2}, schedule="zbv", streams=2)
    compared = trace(run, trace_reference(run), "lockstep")
    assert first(compared) is None
    names = [line.name for line in compared]
    assert names[0] == "output of embed_tokens"
    assert "gradient of layers.2.mixer.A_log" in names and "gradient of the output of norm, call 1" in names
