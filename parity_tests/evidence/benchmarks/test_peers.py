"""The comparison with peers reports missing libraries as not run, and shows the figures that it found."""

import pytest
import torch

from parity_tests.evidence.benchmarks import peer_arms
from parity_tests.evidence.benchmarks.arms import BOUND, _worst
from parity_tests.evidence.benchmarks.passes import ALONE
from parity_tests.evidence.benchmarks.peer_arms import HEAD, LOGPROB, ArmInputs, missing
from parity_tests.evidence.benchmarks.peers import WANTED, _compared, _promised
from shardproof import CaseSpec
from shardproof.engines.engines import run

TIMES = {"cpu": [0.002] * 3, "wall": [0.004] * 3}
# They keep state for the whole process, and here ranks are threads of one process.
OF_A_PROCESS = ("DTensor loss_parallel", *peer_arms.NEEDS)
FOUND = {"ratio": 0.5, "collectives": ["all_gather"], "bytes": 12, "memory": 105, "part": 100}


def figures(**arms):
    ranks = [{BOUND: {"cpu": [0.001] * 3, "wall": [0.001] * 3}, "ours": {**FOUND, **TIMES}, **arms}] * 2
    return {figure.name: figure for figure in _compared("logprob", "float32", ranks)}


def test_a_figure_shows_its_measurement():
    figure = figures()["logprob, float32: ours"]
    assert figure.is_met and figure.measured == (
        "error 0.5 budgets; 1 all_gather, 12 bytes per rank; memory 1.05; 2 (2 to 2) ms CPU, 4 (4 to 4) ms wall; "
        "0.5 (0.5 to 0.5) of the copy bound"
    )


def test_an_arm_is_shown_as_a_ratio_to_ours():
    slow = {**FOUND, "cpu": [0.006] * 3, "wall": [0.006] * 3}
    figure = figures(**{"megatron-core": slow})["logprob, float32: megatron-core"]
    assert figure.measured.endswith("3 (3 to 3) times ours; it overwrites float32 logits")
    assert figure.is_met is None


@pytest.mark.parametrize(("of_peer", "is_met"), [([0.003] * 3, True), ([0.002, 0.001, 0.003], False)])
def test_a_promised_ratio_that_is_missed_shows_where_the_time_goes(of_peer, is_met):
    peer, ours = {"cpu": of_peer}, {**TIMES, "operations": "exp2_ 90% in 3 calls"}
    arms = {"ours": ours, "megatron-core": peer, **dict.fromkeys(ALONE, TIMES)}
    figure = _promised(WANTED[0], "bfloat16", [arms] * 2)
    assert (figure.promised, figure.is_met) == ("<= 0.9 times", is_met)
    alone = "; ".join(f"{name} alone 2 (2 to 2) ms" for name in ALONE)
    assert figure.how.endswith(f"{alone}; exp2_ 90% in 3 calls") is not is_met


def test_a_promise_whose_peer_is_not_installed_is_not_judged():
    figure = _promised(WANTED[0], "float32", [{"ours": TIMES, "megatron-core": {"missing": "not run: x"}}])
    assert (figure.measured, figure.is_met) == ("not run: x", None)


def test_a_missing_library_is_not_run(monkeypatch):
    monkeypatch.setitem(peer_arms.NEEDS, "megatron-core", ("no_such_package", "bench"))
    reason = missing("megatron-core")
    assert reason == "not run: pip install -e '.[bench]' in the clone (No module named 'no_such_package')"
    assert figures(**{"megatron-core": {"missing": reason}})["logprob, float32: megatron-core"].measured == reason


def test_arms_that_a_cpu_cannot_time_are_not_run():
    found = figures(**{name: {"missing": "not run: x"} for name in ("ours", "megatron-core")})
    assert {(figure.measured, figure.is_met) for figure in found.values()} == {("not run: x", None)}


@pytest.mark.parametrize("which", [0, 1])
def test_an_arm_that_returns_nan_is_not_timed(which):
    arrays = {f"{name} {i}": torch.ones(3) for name in ("want", "budget") for i in (0, 1)}
    outputs = [torch.tensor([1.0, 2.0, 4.0]), torch.ones(3)]
    assert _worst(outputs, arrays, 0) == 3.0
    outputs[which][1] = torch.nan
    with pytest.raises(RuntimeError) as caught:
        _worst(outputs, arrays, 0)
    assert str(caught.value) == "benchmarks: an arm's result is not a number, so the arm is not timed"


@pytest.mark.parametrize("arms", [LOGPROB, HEAD], ids=["logprob", "head"])
def test_the_arms_mean_the_same(arms):
    """Logits of 0 and a weight of 0: every probability is a power of two, and no arm rounds."""
    is_head = arms is HEAD

    def body(mesh, case):
        hidden = torch.ones(3, 1, 4) if is_head else torch.zeros(0)
        full = torch.zeros(8, 4) if is_head else torch.zeros(1, 3, 8)
        dim, rank = 0 if is_head else -1, mesh.rank("tp")
        shard = full.chunk(2, dim)[rank].clone()
        inputs = ArmInputs(
            full, shard, torch.tensor([[0, 5, 7]]), torch.tensor([[1.0, 2.0, 4.0]]), mesh.device_mesh, hidden
        )
        results = {}
        for name in [name for name in arms if name not in (*peer_arms.COMPILED, *OF_A_PROCESS)]:
            out, *gradients = arms[name](inputs)
            if gradients and gradients[-1].shape == full.shape:
                gradients[-1] = gradients[-1].chunk(2, dim)[rank]
            results[name] = [out.tolist(), *(x.tolist() for x in gradients)]
            shard.zero_()
        return results

    for results in run(body, CaseSpec(scheme="arms", mesh={"tp": 2})).results:
        assert len(results) >= 2
        first = results.pop("ours")
        assert all(result == first[: len(result)] for result in results.values()), results  # some have no gradient
