"""Parity of pipelining.split: models of transformers in stages are the models, forward and under every schedule."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parity_tests.pipelining.unsplit_models import LAYERS, accumulated, chosen, stepped, tokens
from shardproof.declare.case import CaseSpec
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.split import split_model_into_stages

build_model = pytest.importorskip("parity_tests.parallelizer.families", reason="needs transformers").model_of

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3")
ROW = 5  # layers of models that are split anywhere
CPU = torch.device("cpu")
IMPORTING_S = 60  # a process that imports transformers gives no sign of life


def case_of(p, **options):
    return CaseSpec("split", {"pp": p}, options=options)


def cut_by_file(mesh, path, counts, model, **options):
    """Stages of one rank that has them all, as many layers in each as given."""
    path.write_text(",".join([f"{stage}F0" for stage in range(len(counts))]) + ",")
    path.write_text(path.read_text() + ",".join(f"{stage}B0" for stage in reversed(range(len(counts)))))
    edges = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    names = [
        [f"model.layers.{layer}" for layer in range(start, stop)] + ["model.rotary_emb"]
        for start, stop in pairwise(edges)
    ]
    names[0] = ["model.embed_tokens", *names[0]]
    names[-1] += ["model.norm", "lm_head"]
    return split_model_into_stages(
        model, mesh.device_mesh, "pp", None, CPU, names, pipeline_parallel_schedule_csv=str(path), **options
    )


@st.composite
def counts(draw):
    edges = draw(st.sets(st.integers(1, ROW - 1), max_size=3))
    return [stop - start for start, stop in zip([0, *sorted(edges)], [*sorted(edges), ROW], strict=True)]


@settings(max_examples=few(10))
@given(st.sampled_from(FAMILIES), st.booleans(), counts(), st.sampled_from([torch.float32, torch.float64]))
def test_stages_in_a_row_are_the_model(tmp_path_factory, family, tied, cut, dtype):
    path = tmp_path_factory.mktemp("split") / "s.csv"

    def body(mesh, case):
        of = chosen(family, tied, ROW)
        (ids, _), model = tokens(of, 1), build_model(of, dtype)
        expected = model(ids, use_cache=False).logits
        state = model.state_dict()
        stages, modules = cut_by_file(mesh, path, cut, build_model(of, dtype))
        x = ids
        for module in modules:
            x = module(x)
        names = [name for module in modules for name, _ in module.named_parameters()]
        loaded = {name: value for module in modules for name, value in module.state_dict().items()}
        model.load_state_dict(loaded)
        assert x.equal(expected)
        assert len(names) == len(set(names))
        assert set(names) == {name for name, _ in model.named_parameters(remove_duplicate=False)} - (
            {"lm_head.weight"} if tied and len(cut) == 1 else set()
        )
        assert all(loaded[name].equal(value) for name, value in state.items())
        assert [stage.stage_index for stage in stages] == list(range(len(cut)))
        assert len(stages[0].tied_copies) == (tied and len(cut) > 1)

    run(body, case_of(1))


def check_steps(p, family, tied, name, n, dtype, steps=1, cut=(), engine="lockstep"):
    layers = 2 * p + 1 if cut else 2 * p
    options = {"family": family, "tied": tied, "layers": layers, "name": name, "n": n, "steps": steps}
    ranks = run(stepped, case_of(p, **options, cut=dict(cut)).replace(dtype=dtype), engine, quiet_s=IMPORTING_S)
    order = range(n - 1, -1, -1) if name == "LoopedBFS" else range(n)
    losses, gradients = accumulated(chosen(family, tied, layers), n, dtype, order, steps)
    of_ranks = {}
    for _, of_rank in ranks.results:
        of_ranks |= of_rank
    if tied and p == 1 and RULES[name].is_single:
        gradients.pop("lm_head.weight")
        of_ranks["model.embed_tokens.weight"] = gradients["model.embed_tokens.weight"]  # one parameter, added otherwise
    assert of_ranks == gradients
    assert [of_rank for of_rank, _ in ranks.results if of_rank] == [losses]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(RULES))
def test_every_schedule_is_accumulation_bit_by_bit(name, p):
    n = 2 * p if name == "DualPipeV" else p
    family, dtype = ("llama", "float32") if p % 2 else ("qwen3", "float64")
    check_steps(p, family, tied=p in (2, 3), name=name, n=n, dtype=dtype, steps=2 if p < 3 else 1)


@pytest.mark.slow
@settings(max_examples=few(6))
@given(
    st.sampled_from(sorted(RULES)),
    st.integers(2, 4),
    st.sampled_from(["llama", "qwen3"]),
    st.booleans(),
    st.sampled_from(["float32", "float64"]),
)
def test_random_splits_and_ties(name, p, family, tied, dtype):
    check_steps(p, family, tied, name, 2 * p, dtype, cut={"embed_cost": 0.5, "head_cost": 1.5})


@pytest.mark.slow
def test_in_processes():
    check_steps(2, "qwen3", True, "ZBVZeroBubble", 4, "float32", steps=2, engine="gloo")
    check_steps(2, "llama", True, "1F1B", 4, "float32", steps=2, engine="gloo")


def test_calling_a_split_model_is_rejected(tmp_path):
    def body(mesh, case):
        model = build_model(chosen("llama", False), torch.float32)
        cut_by_file(mesh, tmp_path / "s.csv", [3, 5], model)
        with pytest.raises(RuntimeError, match="this LlamaForCausalLM was split into 2 stages"):
            model(tokens(chosen("llama", False), 1)[0])

    run(body, case_of(1))


def test_hooks_and_buffers_of_one_stage_are_not_the_other_stages(tmp_path):
    """Two stages of a rank: hooks, as FSDP hangs on a part, and buffers of one are not the other's."""

    def body(mesh, case):
        of, called = chosen("llama", False), []
        _, (first, second) = cut_by_file(mesh, tmp_path / "s.csv", [3, 5], build_model(of, torch.float32))
        for each, name in ((first, "first"), (second, "second"), (second.model, "inner")):
            each.register_forward_pre_hook(lambda module, args, name=name: called.append(name))
            each.register_buffer(f"of_{name}", torch.zeros(1))
        x = first(tokens(of, 1)[0])
        assert called == ["first"]
        second(x)
        assert called == ["first", "second", "inner"]
        buffers = [[name for name, _ in part.named_buffers() if "of_" in name] for part in (first, second)]
        assert buffers == [["of_first"], ["of_second", "model.of_inner"]]

    run(body, case_of(1))


def test_a_model_without_a_head_is_split(tmp_path):
    def body(mesh, case):
        of = chosen("llama", False)
        ids, model = tokens(of, 1)[0], build_model(of, torch.float32).model
        expected = model(ids, use_cache=False).last_hidden_state
        _, (first, second) = split_model_into_stages(model, mesh.device_mesh, "pp", "LoopedBFS", CPU)
        assert second(first(ids)).equal(expected)
        assert isinstance(first.layers, nn.ModuleDict)
        assert list(second.layers) == ["4", "5", "6", "7"]
        assert second.removed_modules == ("embed_tokens", "layers.0", "layers.1", "layers.2", "layers.3")

    run(body, case_of(1))


def test_logits_to_keep():
    def body(mesh, case):
        of = chosen("llama", False)
        ids, model = tokens(of, 1)[0], build_model(of, torch.float32)
        expected = model(ids, use_cache=False, logits_to_keep=2).logits
        _, (first, second) = split_model_into_stages(model, mesh.device_mesh, "pp", "LoopedBFS", CPU)
        assert second(first(ids), logits_to_keep=2).equal(expected)

    run(body, case_of(1))


def rejection(mesh, case):
    given_as = {"pp_schedule": "LoopedBFS", "axis": "pp"} | dict(case.options)
    of = chosen("llama", given_as.pop("tied", False))
    model = build_model(of, torch.float32) if not given_as.pop("no_model", False) else "model"
    axis, name = given_as.pop("axis"), given_as.pop("pp_schedule")
    with pytest.raises((ValueError, TypeError)) as error:
        split_model_into_stages(model, mesh.device_mesh, axis, name, CPU, **given_as)
    assert model == "model" or model(tokens(of, 1)[0]) is not None  # nothing was taken from it
    return f"{error.type.__name__}: {error.value}"


WHOLE = ["model.embed_tokens", "model.norm", "lm_head"]
L = [f"model.layers.{layer}" for layer in range(LAYERS)]


@pytest.mark.fast_values(4)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"no_model": True}, "TypeError: .*model is a str; pass a torch.nn.Module"),
        ({"axis": "tp"}, r"ValueError: .*pp_axis_name='tp' is not an axis of pp_mesh \('pp',\)"),
        ({"pp_schedule": None}, "ValueError: .*pp_schedule=None and pipeline_parallel_schedule_csv=None"),
        ({"pp_schedule": "LopedBFS"}, "ValueError: .*pp_schedule='LopedBFS' is not a schedule; nearest: 'LoopedBFS'"),
        ({"layers_per_stage": 3}, "ValueError: .*layers_per_stage=3 gives 3 stages for num_layers=8"),
        ({"module_names_per_stage": []}, "ValueError: .*module_names_per_stage is empty"),
        (
            {"module_names_per_stage": "model"},
            "TypeError: .*='model' is a str; pass a list of lists of names",
        ),
        (
            {"module_names_per_stage": [["model.embed_tokens", *L[:3]], L[3:6], [*L[6:], "model.norm", "lm_head"]]},
            "ValueError: .*module_names_per_stage has 3 stages, not a multiple of pp_size=2",
        ),
        (
            {"module_names_per_stage": [["model.embed_tokens", *L[:3]], [*L[4:], "model.norm", "lm_head"]]},
            r"ValueError: .*has the layers \[0, 1, 2, 4, 5, 6, 7\]; they must be 0 to 7",
        ),
        (
            {"module_names_per_stage": [["model.embed_tokens", *L[4:]], [*L[:4], "model.norm", "lm_head"]]},
            "ValueError: .*they must be 0 to 7, each once and in order",
        ),
        (
            {"module_names_per_stage": [["model.embed_tokens", *L[:4], "lm_head"], [*L[4:], "model.norm"]]},
            r"ValueError: .*module_names_per_stage\[0\] has 'lm_head', which belongs to the last stage",
        ),
        (
            {"module_names_per_stage": [L[:4], ["model.embed_tokens", *L[4:], "model.norm", "lm_head"]]},
            r"ValueError: .*module_names_per_stage\[1\] has 'model.embed_tokens', which belongs to the first stage",
        ),
        (
            {"module_names_per_stage": [[*WHOLE[:1], "model.layers.0.mlp", *L[1:4]], [*L[4:], *WHOLE[1:]]]},
            r"ValueError: .*module_names_per_stage\[0\] has 'model.layers.0.mlp', part of a layer; pass the layer",
        ),
        (
            {"module_names_per_stage": [[*WHOLE[:1], *L[:4], "model.layer.9"], [*L[4:], *WHOLE[1:]]]},
            "ValueError: .*has 'model.layer.9', no module of the model",
        ),
        (
            {"module_names_per_stage": [[*WHOLE[:1], *L[:4]], [*L[4:], "lm_head"]]},
            "ValueError: .*parameter 'model.norm.weight' is on no stage",
        ),
        (
            {"tied": True, "module_names_per_stage": [[*WHOLE[:1], *L[:4]], [*L[4:], "model.norm"]]},
            "ValueError: .*parameter 'lm_head.weight' is on no stage",
        ),
        ({"patch_inner_model": False}, "ValueError: .*patch_inner_model=False, but the forward of LlamaModel calls"),
        ({"patch_causal_lm_model": False}, "ValueError: .*patch_causal_lm_model=False, but the forward of LlamaFor"),
    ],
)
def test_unsplittable_models_are_rejected_on_every_rank(options, words):
    ranks = run(rejection, case_of(2, **options))
    assert ranks.ledger.rows == []
    assert all(re.match(words, sentence) for sentence in ranks.results), ranks.results
