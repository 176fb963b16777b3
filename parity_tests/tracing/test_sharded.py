"""shardproof trace of a sharded model and its twin: right models pass; in wrong models the first error is named."""

import json
from pathlib import Path

import numpy as np
import pytest

from jax_ref import layouts
from parity_tests.pages import blocks
from parity_tests.tracing import sharded_models
from shardproof.tracing.placed import farthest, in_full, placed

FILE = sharded_models.__file__
EXAMPLE = str(Path(__file__).resolve().parents[2] / "docs" / "examples" / "my_sharded.py")


@pytest.fixture
def trace(shardproof):
    """status, standard output, standard error of a trace; of the small Llama unless others are named."""

    def call(sharded, *options, twin="llama", inputs="llama_inputs", mesh="tp=2"):
        target = sharded if "::" in sharded else f"{FILE}::{sharded}"
        return shardproof("trace", target, "--twin", twin, "--inputs", inputs, "--mesh", mesh, *options)

    return call


# Right models


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["gloo", "lockstep"])
def test_a_llama_over_tp_is_as_on_one_device(trace, engine):
    status, out, err = trace("llama_over_tp", "--engine", engine)
    assert (status, err) == (0, "")
    assert out.startswith("llama_over_tp  tp=2  float32: 135 tensors as on one device, at most 0.")


@pytest.mark.slow
def test_a_llama_over_fsdp2_and_tp_in_bfloat16(trace):
    status, out, _ = trace("llama_over_dp_and_tp", "--dtype", "bfloat16", mesh="dp=2,tp=2")
    assert status == 0 and " bfloat16: 135 tensors as on one device" in out


def test_plain_tensors_that_hold_shards_and_terms(trace):
    status, out, _ = trace("written_over_tp", twin="written", inputs="written_inputs")
    sums = ("gradient of the input of up", "output of down")
    assert (status, out.splitlines()[1:]) == (0, [f"  compared as a sum: {tensor} over tp" for tensor in sums])


def test_the_example_is_right_at_80_columns(trace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = trace(f"{EXAMPLE}::sharded", "--quiet", twin="single", inputs=f"{EXAMPLE}::inputs")
    (shown,) = (block.text for block in blocks("docs/how-to/trace-a-sharded-model.md") if block.language == "text")
    assert (status, err) == (0, "") and out.partition("at most")[0] == shown.partition("at most")[0]


def test_tensors_that_fit_nowhere_inside_a_right_module_are_not_compared(trace):
    """The activation of experts over ranks has other rows than on one device."""
    status, out, _ = trace("routed_over_tp", "--engine", "lockstep", twin="routed", inputs="routed_inputs")
    inner = ("input of experts.act", "output of experts.act")
    tensors = [*inner, *(f"gradient of the {each}" for each in reversed(inner))]
    assert status == 0
    assert f"  not compared, inside a module, where other tokens may be held: {', '.join(tensors)}" in out.splitlines()


# Wrong models


@pytest.mark.parametrize(
    ("sharded", "first", "note"),
    [
        ("routed_with_a_wrong_scale", "output of experts, ", "off by the constant factor 2"),
        ("routed_without_a_sum", "gradient of experts.weight, ", "gradient missing a sum over tp"),
    ],
)
def test_the_headline_reaches_an_output_or_a_parameter(trace, sharded, first, note):
    status, out, _ = trace(sharded, "--engine", "lockstep", twin="routed", inputs="routed_inputs")
    assert status == 1
    assert f"first to differ: {first}" in out
    assert note in out


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_an_earlier_tensor_that_is_added_twice_is_named(trace, mesh):
    options = {"twin": "residual", "inputs": "written_inputs", "mesh": mesh}
    status, out, _ = trace("residual_added_twice", "--engine", "lockstep", **options)
    assert (status, out.splitlines()[-1]) == (1, "  output of inner is added once too often")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharded", "named"),
    [
        ("wrong_forward", "output of model.layers.1.mlp, ranks 0, 1; look in model.layers.1.mlp."),
        (
            "wrong_backward",
            "gradient of model.layers.0.self_attn.o_proj.weight, rank 0; look in model.layers.0.self_attn.o_proj.",
        ),
        (
            "wrong_weight_gradient",
            "gradient of model.layers.0.input_layernorm.weight, rank 0; look in model.layers.0.input_layernorm.",
        ),
        (
            "other_weights",
            "weight model.layers.1.input_layernorm.weight, ranks 0, 1; look in model.layers.1.input_layernorm.",
        ),
    ],
)
def test_the_first_to_differ_is_named(trace, sharded, named):
    status, out, _ = trace(sharded, "--json", "trace.json")
    assert status == 1
    assert f"{sharded}  tp=2  float32: first to differ: {named}" in out and "DIFFERS" in out
    (traced,) = json.loads(Path("trace.json").read_text())["traces"]
    assert traced["verdict"] == "mismatch" and named.endswith(f"look in {traced['home']}.")


def test_a_rank_that_raises_is_a_failed_rank(trace):
    status, out, err = trace("raises")
    assert (status, err) == (3, "")
    assert "raises  tp=2  float32: raised: rank 0 raised ZeroDivisionError: of the user at sharded_models.py:" in out


# Functions that cannot be traced


@pytest.mark.parametrize(
    ("sharded", "keywords", "status", "sentence"),
    [
        ("no_module", {}, 3, "no_module: returned int on rank 0; return a torch.nn.Module"),
        ("llama_over_tp", {"twin": "no_inputs"}, 2, "::no_inputs: returned int; return a torch.nn.Module"),
        (
            "llama_over_tp",
            {"inputs": "no_inputs"},
            2,
            "::no_inputs: returned int; return a tuple of arguments, or a dict of keywords",
        ),
        (
            "written_over_tp",
            {"twin": "written", "inputs": "empty_inputs"},
            2,
            "::empty_inputs: returned tensors without an element, and nothing could differ; return a token or more",
        ),
        (
            "written_over_tp",
            {"twin": "without_output", "inputs": "written_inputs"},
            2,
            "::without_output: its output has no element, and nothing could differ",
        ),
        ("llama_over_tp", {"twin": "lama"}, 2, "::lama: no function of this name; did you mean llama? (it has "),
        ("llama_over_tp", {"inputs": "written_inputs"}, 2, "::llama: raised "),
        ("llama_over_tp", {"mesh": ""}, 2, "--mesh is needed: a sharded model is built on a mesh, as in --mesh tp=2"),
        ("llama_over_tp", {"mesh": "tp=1000"}, 2, "--mesh has 1000 ranks; the limit is 64"),
    ],
)
def test_an_untraceable_model_is_one_sentence(trace, sharded, keywords, status, sentence):
    got, out, err = trace(sharded, **keywords)
    assert got == status and sentence in (err if status == 2 else out)
    assert len(err.splitlines()) == (status == 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((f"{EXAMPLE}::sharded", "--mesh", "tp=2"), f"needs --twin as well, as in --twin {EXAMPLE}::single"),
        ((f"{EXAMPLE}::sharded", "--twin", "single"), "needs --inputs as well"),
        ((EXAMPLE, "--twin", "single"), "--twin is of a sharded model; name the function that builds it"),
        ((f"{EXAMPLE}::sharded", "--tied"), "--tied is of the training step; leave it out for a model of your own"),
        (
            (f"{EXAMPLE}::sharded", "--twin", "single", "--inputs", "inputs", "--mesh", "tp=2", "--dtype", "float8"),
            "--dtype 'float8' is not one of float64, float32, bfloat16, float16",
        ),
    ],
)
def test_options_that_do_not_go_together(shardproof, arguments, sentence):
    status, out, err = shardproof("trace", *arguments)
    assert (status, out) == (2, "") and sentence in err


# Where pieces belong

PLACES = [{"dp": dp, "tp": tp} for dp in range(2) for tp in range(2)]
AXES = {"dp": 2, "tp": 2}
FULL = np.random.default_rng(0).standard_normal((4, 8))


@pytest.mark.parametrize("layout", [layouts.contiguous, layouts.dual_chunk_swap, layouts.striped])
def test_a_shard_is_found_in_its_layout(layout):
    columns = layout(8, 2)
    pieces = {rank: FULL[:, columns[place["tp"]]] for rank, place in enumerate(PLACES)}
    found = placed(FULL, pieces, PLACES, AXES, may_sum=True)
    assert found.summed == () and all(np.array_equal(in_full(FULL, found, rank), FULL) for rank in pieces)


def test_terms_are_summed_over_their_axis_alone():
    parts = np.random.default_rng(1).standard_normal((2, 4, 8))
    rows = {0: slice(0, 2), 1: slice(2, 4)}
    pieces = {rank: parts[place["tp"]][rows[place["dp"]]] for rank, place in enumerate(PLACES)}
    full = parts.sum(0)
    found = placed(full, pieces, PLACES, AXES, may_sum=True)
    assert found.summed == ("tp",) and np.array_equal(farthest(full, found), full)
    assert not np.array_equal(farthest(full, placed(full, pieces, PLACES, AXES, may_sum=False)), full)


def test_the_farthest_replica_is_compared():
    pieces = {rank: FULL + (rank == 2) for rank in range(4)}
    assert np.array_equal(farthest(FULL, placed(FULL, pieces, PLACES, AXES, may_sum=False)), FULL + 1)


def test_a_piece_that_fits_nowhere_is_left_as_it_is():
    pieces = {rank: FULL[:3] for rank in range(4)}
    found = placed(FULL, pieces, PLACES, AXES, may_sum=True)
    assert in_full(FULL, found, 0).shape == (3, 8)
