"""Full runs: the curve of one device on every mesh, a mistake that is seen, and a run that goes on elsewhere."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch.distributed as dist

from shardproof.cli.app import main
from shardproof.engines.failure import RankFailure
from shardproof.training import checkpoint, follow, page, record, session, show
from shardproof.training.follow import ReferenceSteps
from shardproof.training.parts import Parts
from shardproof.training.run import SIZES, Run
from torch_impl.expert_parallel import balance
from torch_impl.mamba import MambaContextParallel
from torch_impl.models import layers, staged
from torch_impl.parallelizer import expert_sharding

SMALL = {"steps": 2, "streams": 2, "length": 48, "sizes": {**SIZES, "layers": ("mamba", "attention")}}
KNOWN = ReferenceSteps()  # one compiled reference for all runs of the same numbers


def small(mesh, **settings):
    return Run.on(mesh, **{**SMALL, **settings})


MESHES = [
    ({}, {}),
    ({"dp": 2, "cp": 2}, {"mamba": "state", "attention": "ulysses"}),
    ({"dp_replicate": 2, "tp": 2}, {}),
    ({"cp": 3}, {"mamba": "state", "attention": "all_gather"}),
]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(("mesh", "how"), MESHES)
def test_no_mesh_changes_a_number(mesh, how):
    steps = session.followed(small(mesh, **how), KNOWN, "lockstep")
    assert [step.index for step in steps] == [0, 1]
    assert [step.wrong for step in steps] == [[], []]


@pytest.mark.slow
def test_a_tied_head_in_float32():
    run = small({"dp": 2, "tp": 2}, is_tied=True, dtype="float32")
    steps = session.followed(run, KNOWN, "lockstep")
    assert [step.wrong for step in steps] == [[], []] and "weight/lm_head.weight" not in steps[0].rows


CLIP = 0.25  # below the norm of every step, so that each is scaled, and not all alike


@pytest.mark.slow
def test_clipping_is_by_the_norm_of_one_device():
    steps = session.followed(small({"dp": 2, "tp": 2}, clip=CLIP), KNOWN, "lockstep")
    assert [step.wrong for step in steps] == [[], []]


@pytest.mark.slow
def test_a_step_that_is_not_clipped_is_seen(monkeypatch):
    """AdamW's first step knows no scale; its second adds gradients that were scaled by unlike factors."""
    monkeypatch.setattr(Parts, "clip", lambda self, max_norm: None)
    steps = session.followed(small({"dp": 2}, clip=CLIP), KNOWN, "lockstep")
    assert any(name.startswith("weight/") for name in steps[1].wrong)


MUON = {"optimizer": "muon", "clip": CLIP}


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "how"), [({"dp": 2, "tp": 2}, {}), ({"pp": 2, "cp": 2}, {"is_tied": True})])
def test_muon_matches_one_device(mesh, how):
    steps = session.followed(small(mesh, **MUON, **how), KNOWN, "lockstep")
    assert [step.wrong for step in steps] == [[], []]


WITH_EXPERTS = [
    ({"ep": 1}, {}),
    ({"ep": 2}, {"optimizer": "muon"}),
    ({"ep": 2, "tp": 2}, {"optimizer": "muon"}),
    ({"cp": 2, "ep": 2}, {"clip": CLIP}),
    ({"pp": 2, "ep": 2}, {"streams": 4}),
]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(("mesh", "how"), WITH_EXPERTS, ids=str)
def test_experts_match_one_device(mesh, how):
    steps = session.followed(small(mesh, has_experts=True, **how), KNOWN, "lockstep")
    assert [step.wrong for step in steps] == [[], []]
    assert "weight/layers.1.mlp.experts.gate_up_proj" in steps[0].rows


@pytest.mark.slow
def test_an_expert_averaged_as_its_router_is_seen(monkeypatch):
    """Over ep an expert has the rows of all ranks already: its gradient is not to be divided by less than all."""
    original = expert_sharding._local_stack
    monkeypatch.setattr(expert_sharding, "_local_stack", lambda stack, ep: original(stack, 1))
    steps = session.followed(small({"ep": 2}, has_experts=True), KNOWN, "lockstep")
    experts = {f"gradient/layers.1.mlp.experts.{stack}" for stack in ("gate_up_proj", "down_proj")}
    assert {name for name in steps[0].wrong if name.startswith("gradient/")} == experts


ROUTER = "gradient/layers.1.mlp.router.weight"


@pytest.mark.slow
def test_a_router_that_learns_nothing_from_its_losses_is_seen(monkeypatch):
    """The loss has them all the same."""
    without = staticmethod(lambda ctx, cotangent: (cotangent, 0.0 * cotangent.sum()))
    monkeypatch.setattr(balance._WithLoss, "backward", without)
    steps = session.followed(small({"cp": 2, "ep": 2}, has_experts=True, clip=CLIP), KNOWN, "lockstep")
    assert ROUTER in steps[0].wrong and "loss" not in steps[0].wrong


@pytest.mark.slow
def test_a_routers_losses_are_of_the_whole_step(monkeypatch):
    """As a mean over this rank's sequences, they count once for each rank."""
    original = layers.Moe.begin_step
    monkeypatch.setattr(layers.Moe, "begin_step", lambda self, shards, ranks: original(self, shards // ranks, ranks))
    steps = session.followed(small({"ep": 2}, has_experts=True, optimizer="muon"), KNOWN, "lockstep")
    assert {"loss", ROUTER} <= set(steps[0].wrong)


@pytest.mark.slow
def test_muon_goes_on_from_a_checkpoint_on_another_mesh(tmp_path):
    session.followed(small({"dp": 2}, **MUON, checkpoint=str(tmp_path)), KNOWN, "lockstep")
    steps = session.followed(small({"tp": 2}, **MUON, **LEFT, checkpoint=str(tmp_path)), KNOWN, "lockstep")
    assert [step.index for step in steps] == [2] and steps[0].ok


@pytest.mark.slow
def test_processes_give_the_same():
    steps = session.followed(small({"dp": 2}), KNOWN, "gloo")
    assert [step.wrong for step in steps] == [[], []]


def test_a_count_of_this_rank_alone_is_seen_in_the_first_step(monkeypatch):
    monkeypatch.setattr(staged, "valid_count", lambda targets, *_: sum((each >= 0).sum() for each in targets))
    run = small({"dp": 2})
    steps = session.followed(run, KNOWN, "lockstep")
    assert "loss" in steps[0].wrong and not steps[0].ok
    assert "step 1 is the first to differ; the loss already differs; wrong: " in show.closing(run, steps)


def test_a_gradient_that_is_not_summed_is_named(monkeypatch):
    original = MambaContextParallel.get_D
    monkeypatch.setattr(MambaContextParallel, "get_D", lambda self: (original(self) + original(self).detach()) / 2)
    run = small({})
    steps = session.followed(run, KNOWN, "lockstep")
    assert set(steps[0].wrong) == {"norm", "gradient/layers.0.mixer.D", "weight/layers.0.mixer.D"}
    assert "the loss is equal; wrong: gradient/layers.0.mixer.D" in show.closing(run, steps)


LEFT = {"steps": 3, "every": 1, "resume": True}


@pytest.fixture
def written(monkeypatch):
    """Every record that the ranks write, by step."""
    original, steps = record.write, {}

    def write(folder, step):
        steps[step.index] = step
        original(folder, step)

    monkeypatch.setattr(record, "write", write)
    return steps


def beyond_budget(steps, resumed, uninterrupted):
    """The names of values that differ from the uninterrupted run by more than the budget of the step."""
    names = []
    for step in steps:
        one, other = resumed[step.index], uninterrupted[step.index]
        pairs = {"loss": (one.loss, other.loss), "norm": (one.norm, other.norm)}
        pairs |= {record.GRADIENT + name: (x, other.gradients[name]) for name, x in one.gradients.items()}
        pairs |= {record.WEIGHT + name: (x, other.weights[name]) for name, x in one.weights.items()}
        assert pairs.keys() == step.rows.keys()
        names += [name for name, (a, b) in pairs.items() if np.linalg.norm(a - b) > bound(step, name, b)]
    return names


def bound(step, name, expected):
    return step.rows[name].budget * np.linalg.norm(expected)


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_and_on_another_mesh(tmp_path, written):
    run = small({"dp": 2, "cp": 2}, steps=3, checkpoint=str(tmp_path), every=1)
    session.followed(run, KNOWN, "lockstep")
    straight = dict(written)
    for left, meshes in ((2, [{"dp": 2, "cp": 2}, {"tp": 2}]), (1, [{"dp": 2, "cp": 2}, {"pp": 2}])):
        for mesh in meshes:
            for step in range(left + 1, 4):
                shutil.rmtree(tmp_path / f"step_{step:06d}")
            steps = session.followed(small(mesh, **LEFT, checkpoint=str(tmp_path)), KNOWN, "lockstep")
            assert [step.index for step in steps] == list(range(left, 3)) and all(step.ok for step in steps)
            assert beyond_budget(steps, written, straight) == []
            if mesh == {"dp": 2, "cp": 2}:
                again = [np.array_equal(written[2].weights[name], x) for name, x in straight[2].weights.items()]
                assert all(again) and len(again) == len(written[2].weights)


OTHERS = {"learning_rate": 1e-3, "weight_decay": 0.0, "dtype": "float32", "is_tied": True, "streams": 4, "length": 72}


def test_state_is_saved_every_so_many_steps_and_after_the_last(tmp_path):
    run = small({}, steps=3, checkpoint=str(tmp_path), every=2)
    session.followed(run, KNOWN, "lockstep")
    assert checkpoint.newest(run.replace(steps=9, every=4)) == 3 and checkpoint.newest(run.replace(steps=2)) == 2
    assert sorted(path.parent.name for path in tmp_path.glob("*/done")) == ["step_000002", "step_000003"]
    for name, value in OTHERS.items():
        with pytest.raises(ValueError, match=f"is of a run with {name}={getattr(run, name)}, not {value}"):
            checkpoint.newest(run.replace(**{name: value}))


def test_a_run_that_begins_anew_replaces_all_when_told_to(tmp_path):
    run = small({}, steps=2, checkpoint=str(tmp_path), every=1)
    session.followed(run, KNOWN, "lockstep")
    steps = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*/done"))]
    with pytest.raises(ValueError, match=r"has 2 checkpoints of an earlier run, the last of step 2; go on from it by"):
        session.followed(run, KNOWN, "lockstep")
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*/done"))] == steps
    session.followed(run.replace(steps=1, overwrite=True), KNOWN, "lockstep")
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.LOCK, "step_000001"]
    with pytest.raises(ValueError, match="each mesh is a run of its own; give one --mesh"):
        session.train([run, run], session.TrainOptions("lockstep"))


@pytest.mark.slow
def test_a_truncated_checkpoint_is_skipped(tmp_path):
    run = small({}, checkpoint=str(tmp_path), every=1)
    session.followed(run, KNOWN, "lockstep")
    (tmp_path / "step_000002" / "done").unlink()
    (tmp_path / "step_old").mkdir()
    (tmp_path / "step_old" / "done").write_text("{}")
    assert not list(tmp_path.glob("*/*.part"))
    steps = session.followed(run.replace(resume=True), KNOWN, "lockstep")
    assert [step.index for step in steps] == [1] and steps[0].ok
    with pytest.raises(ValueError, match=r"--resume: all 2 steps are done; pass --steps above 2"):
        session.followed(run.replace(resume=True), KNOWN, "lockstep")
    with pytest.raises(ValueError, match=r"--resume: .* is of a run with seed=0, not 1"):
        session.followed(run.replace(resume=True, seed=1), KNOWN, "lockstep")
    with pytest.raises(ValueError, match=r"--resume: .* has no complete checkpoint of 2 steps or fewer"):
        session.followed(run.replace(resume=True, checkpoint=str(tmp_path / "none")), KNOWN, "lockstep")


def test_one_run_at_a_time_has_a_folder(tmp_path):
    run = small({}, steps=1, checkpoint=str(tmp_path / "run"), every=1)
    with checkpoint.locked(run), pytest.raises(ValueError) as caught:
        session.followed(run, KNOWN, "lockstep")
    assert str(caught.value) == (
        f"--checkpoint {run.checkpoint}: another run writes there; wait until it has ended, or give another folder"
    )
    assert [step.ok for step in session.followed(run, KNOWN, "lockstep")] == [True]
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        session.followed(run.replace(resume=True, checkpoint=str(tmp_path / "none")), KNOWN, "lockstep")
    assert not (tmp_path / "none").exists()


def test_a_run_that_ends_early_is_not_equal(monkeypatch):
    original = record.write
    monkeypatch.setattr(record, "write", lambda folder, step: None if step.index else original(folder, step))
    with pytest.raises(RankFailure) as caught:
        session.followed(small({}), KNOWN, "lockstep")
    assert str(caught.value) == "failed: the ranks ended after 1 of 2 steps; run it again"


@pytest.mark.slow
def test_the_command(monkeypatch, capsys):
    """Its table, its figure, its JSON, and the statuses that it leaves with."""
    monkeypatch.setattr("shardproof.training.run.SIZES", SMALL["sizes"])
    monkeypatch.setattr(session, "ReferenceSteps", lambda: KNOWN)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["shardproof", "train", "--engine", "lockstep", "--steps", "1", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        output = capsys.readouterr()
        return left.value.code or 0, output.out, output.err

    status, out, _ = call("--mesh", "dp=2", "--figure", "curve.png", "--json", "run.json")
    assert status == 0 and "1 step as on one device" in out
    with open("run.json") as file, open("curve.png", "rb") as picture:
        (entry,) = json.load(file)
        assert entry["mesh"] == {"dp_shard": 2} and entry["verdict"] == "equal" and picture.read(4) == b"\x89PNG"
    monkeypatch.setattr(page, "MESHES", (({"cp": 2}, {"mamba": "state"}),))
    monkeypatch.setattr(page, "EXPERT_MESHES", ({"ep": 2},))
    monkeypatch.setattr(page, "DTYPES", ("float64",))
    assert call("--page", "page.md")[0] == 0
    with open("page.md") as file:
        rows = [line.split(" | ") for line in file if line.startswith(("| cp=2", "| ep=2"))]
    (of_cp, *cp), *of_ep = [[row[0], row[4], row[6], row[7], row[-1]] for row in rows]
    assert of_cp == "| cp=2" and cp == ["dense", "adamw", "float64", "equal |\n"]
    assert of_ep == [["| ep=2", "experts", each, "float64", "equal |\n"] for each in ("adamw", "muon")]
    assert call("--experts", "--mesh", "ep=2", "-q")[0] == 0 and call("--mesh", "ep=2")[0] == 2
    assert call("--mesh", "pp=2", "--schedule", "1f1c")[0] == 2
    status, _, err = call("--every", "2")
    assert status == 2 and "--every 2 needs --checkpoint DIR" in err
    monkeypatch.setattr(staged, "valid_count", lambda targets, *_: targets[0].new_tensor(7))
    assert call("--mesh", "dp=2", "-q")[0] == 1
    monkeypatch.setattr(staged, "valid_count", lambda targets, *_: 1 // (dist.get_rank() - 1))
    status, out, _ = call("--mesh", "dp=2", "-q")
    assert status == 3 and "rank 1 raised ZeroDivisionError" in out


def test_a_reference_that_fails_is_reported(monkeypatch):
    def steps(run):
        raise ValueError("there is no reference")
        yield

    monkeypatch.setattr(follow.reference, "steps", steps)
    with pytest.raises(ValueError, match="there is no reference"):
        session.followed(small({}), ReferenceSteps(), "lockstep")
