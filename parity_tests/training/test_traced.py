"""A trace of the training step: nothing where nothing is wrong, and the module where something is."""

import json
import sys
from fnmatch import fnmatch

import pytest

from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.located import __main__ as located
from shardproof.cli.app import main
from shardproof.tracing.comparison import first
from shardproof.training import ranks, trace_session
from shardproof.training.run import SIZES, Run
from shardproof.training.traced import trace, trace_reference
from torch_impl.models import staged

SMALL = {**located.SMALL, "sizes": {**SIZES, "layers": ("attention", "mamba")}}


@pytest.fixture(scope="module")
def reference_trace():
    return trace_reference(Run(mesh={}, **SMALL))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(("mesh", "how"), located.HOW)
def test_every_tensor_is_equal_on_every_mesh(reference_trace, mesh, how):
    compared = trace(Run.on(mesh, **SMALL, **how), reference_trace, "lockstep")
    assert first(compared) is None
    names = [line.name for line in compared]
    assert names[0] == "output of embed_tokens"
    assert {line.phase for line in compared} == {"forward", "backward", "weight"}
    assert "gradient of layers.1.mixer.A_log" in names and "gradient of the output of lm_head, call 1" in names


@pytest.mark.slow
def test_processes_record_the_same(reference_trace):
    assert first(trace(Run.on({"cp": 2}, **SMALL), reference_trace, "gloo")) is None


@pytest.mark.slow
def test_calls_are_numbered_by_the_streams_of_the_whole_step():
    run = Run.on({"dp": 2}, **{**SMALL, "streams": 4, "length": 24, "sizes": {**SIZES, "layers": ("mamba",)}})
    compared = trace(run, trace_reference(run), "lockstep")
    assert first(compared) is None
    assert {f"output of norm, call {call}" for call in range(1, 4)} <= {line.name for line in compared}


LOCATED = ("attention over padding", "states that run on through documents", "a loss over this rank's count of tokens")


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("name", LOCATED)
def test_a_bug_is_located_in_its_module(reference_trace, monkeypatch, name):
    (bug,) = [bug for bug in CATALOGUE if bug.name == name]
    monkeypatch.setattr(located, "SMALL", SMALL)
    outcome = located.located(bug, reference_trace)
    assert outcome.is_right, outcome


@pytest.mark.slow
def test_the_ranks_that_differ_are_named(reference_trace, monkeypatch):
    original = ranks.rank_batch
    monkeypatch.setattr(
        ranks, "rank_batch", lambda mesh, run, batch: original(mesh, run, batch[:: mesh.rank("cp") * -2 + 1])
    )
    compared = trace(Run.on({"dp": 2, "cp": 2}, **SMALL), reference_trace, "lockstep")
    assert first(compared).ranks in ((1,), (3,)) and first(compared).home == "embed_tokens"


WITHOUT_A_MODULE = {
    "tokens that count because they are kept",  # the training run keeps all tokens
    # It averages over tokens, and not over sequences
    "a mean of sequences over this rank's sequences",
    "sequences that cp cuts counted for each part",
    "a sequence's mean over the tokens of this rank",
    "a mean of tokens over the tokens of dp ranks",
    "sequences without a token counted",
    "padded width for a sequence's tokens",
    "documents of a row counted as one sequence",
    "what does not count multiplied by zero",
    "the factor of an average left out",
    # It predicts one token ahead, from one kind of vectors
    "losses of the further depths summed",
    "a depth's loss over the counts of depth 0",
    "a contrastive loss without the gradients of negatives",
    # The traced layers have no router
    "a router's losses divided by the ranks of cp",
    "a router's losses summed over micro-batches",
    "a z-loss over this rank's tokens of a sequence",
    "all sequences of a rank balanced as one",
    "a router's losses reported and not learned from",
}


def test_every_module_is_of_a_bug_that_counts():
    assert not [bug.name for bug in CATALOGUE if bug.module is not None and bug.equivalent]
    without = {bug.name for bug in CATALOGUE if bug.component == "models" and not bug.equivalent and bug.module is None}
    assert without == WITHOUT_A_MODULE


@pytest.mark.slow
def test_the_command(reference_trace, monkeypatch, capsys):
    small = {name: SMALL[name] for name in ("streams", "length", "sizes")}
    monkeypatch.setattr(trace_session.traced, "trace_reference", lambda run: reference_trace)
    monkeypatch.setattr(trace_session.traced, "trace", lambda run, *arguments: trace(run.replace(**small), *arguments))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["shardproof", "trace", "--engine", "lockstep", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        output = capsys.readouterr()
        return left.value.code or 0, output.out, output.err

    status, out, _ = call("--mesh", "cp=2", "--json", "trace.json")
    assert status == 0 and "tensors as on one device, at most" in out
    with open("trace.json") as file:
        document = json.load(file)
    (traced,) = document["traces"]
    assert document["status"] == 0 and traced["verdict"] == "equal" and traced["first"] is None
    assert all(not line["ranks"] for line in traced["lines"])
    monkeypatch.setattr(staged, "valid_count", lambda targets, *_: targets[0].new_tensor(7))
    status, out, _ = call("--mesh", "cp=2")
    assert status == 1 and fnmatch(out, "*first to differ: loss, ranks 0, 1; look in the model itself.*")
    assert call("--mesh", "pp=2", "--schedule", "zbv")[0] == 2
    assert call("--engine", "torchrun")[0] == 2
