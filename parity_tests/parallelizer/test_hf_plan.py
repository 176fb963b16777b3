"""A model's own plan: where it is found, which entries are dropped, folded, added and rejected."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parity_tests.parallelizer.families import OWN, Chosen, empty
from torch_impl.parallelizer import get_hf_tp_shard_plan, translate_to_torch_parallel_style
from torch_impl.parallelizer.module_names import names_of
from torch_impl.parallelizer.tp_styles import Experts, ReplicatedOnShards

MOE = Chosen("qwen3_moe", changes=(("num_experts", 4), ("moe_intermediate_size", 10), ("num_experts_per_tok", 2)))
MODELS = [*map(Chosen, OWN), MOE, *map(Chosen, ("gemma3_text", "mixtral", "olmo2"))]


def model_of(chosen):
    return empty(chosen, device="meta")


def style_types(plan):
    """A plan in words, to be compared."""
    return {key: f"{style!r} {getattr(style, 'stacks', '')}" for key, style in plan.items()}


@pytest.mark.parametrize("chosen", MODELS, ids=lambda chosen: chosen.family)
def test_every_key_is_a_module_and_no_two_calls_share_a_style(chosen):
    model = model_of(chosen)
    first, second = get_hf_tp_shard_plan(model), get_hf_tp_shard_plan(model)
    modules = [name for name, _ in model.named_modules()]
    assert first and all(names_of(key, modules) for key in first)
    assert style_types(first) == style_types(second)
    assert not {id(style) for style in first.values()} & {id(style) for style in second.values()}
    assert len({id(style) for style in first.values()}) == len(first)


@pytest.mark.parametrize("chosen", MODELS, ids=lambda chosen: chosen.family)
def test_logits_are_gathered_and_the_vocabulary_is_sharded(chosen):
    plan = get_hf_tp_shard_plan(model_of(chosen))
    assert isinstance(plan["lm_head"], ColwiseParallel) and plan["lm_head"].output_layouts[0].is_replicate()
    assert isinstance(plan["model.embed_tokens"], RowwiseParallel)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_norms_of_heads_are_in_the_plan(family):
    plan = get_hf_tp_shard_plan(model_of(Chosen(family)))
    for name in ("q_norm", "k_norm"):
        assert isinstance(plan[f"model.layers.*.self_attn.{name}"], ReplicatedOnShards)


def test_stacks_are_folded_into_their_module_and_absent_parts_are_dropped():
    plan = get_hf_tp_shard_plan(model_of(MOE))
    experts = plan["model.layers.*.mlp.experts"]
    assert isinstance(experts, Experts)
    assert experts.stacks == {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
    assert not [key for key in plan if key.endswith(("mlp.gate_proj", "experts.gate_up_proj"))]


def test_the_inner_model_alone_has_the_same_plan_without_the_head():
    model = model_of(Chosen("llama"))
    full, inner = style_types(get_hf_tp_shard_plan(model)), style_types(get_hf_tp_shard_plan(model.model))
    assert inner == {key.removeprefix("model."): style for key, style in full.items() if key != "lm_head"}


@pytest.mark.parametrize("parts", [("embed", 0), (1,), ("head",), ("embed",), (0, 1, "head")])
def test_a_part_of_a_pipeline_has_its_modules_entries_of_the_full_plan(parts):
    model = model_of(Chosen("llama"))
    full = style_types(get_hf_tp_shard_plan(model))
    model.model.layers = nn.ModuleDict({str(i): model.model.layers[i] for i in parts if isinstance(i, int)})
    if "embed" not in parts:
        model.model.embed_tokens = None
    if "head" not in parts:
        model.lm_head = None
    modules = [name for name, _ in model.named_modules()]
    assert style_types(get_hf_tp_shard_plan(model)) == {key: s for key, s in full.items() if names_of(key, modules)}


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.up = nn.Embedding(4, 2), nn.ModuleList([nn.Linear(2, 2)])


class Outer(nn.Module):
    """A model that is none of transformers'."""

    def __init__(self, **named):
        super().__init__()
        for name, module in named.items():
            setattr(self, name, module)


def test_the_later_source_wins():
    of_class = {"model.up.*": "colwise", "head": "colwise_rep", "other": "colwise"}
    model = type("Planned", (Outer,), {"_tp_plan": of_class})(
        model=Inner(), head=nn.Linear(2, 2), other=nn.Linear(2, 2)
    )
    assert style_types(get_hf_tp_shard_plan(model))["model.up.*"] == style_types({"": ColwiseParallel()})[""]
    model._tp_plan = {"model.up.*": "rowwise", "head": "rowwise"}
    assert repr(get_hf_tp_shard_plan(model)["model.up.*"]) == repr(translate_to_torch_parallel_style("rowwise"))
    model.model._tp_plan = {"up.*": "replicate"}
    plan = get_hf_tp_shard_plan(model)
    assert list(plan) == ["model.embed_tokens", "model.up.*", "head", "other"]
    expected = ("embedding_rowwise", "replicate", "rowwise", "colwise")
    assert list(style_types(plan).values()) == [
        style_types({"": translate_to_torch_parallel_style(name)})[""] for name in expected
    ]


@pytest.mark.parametrize("prefix", ["", "model", "language_model", "model.language_model"])
def test_the_inner_model_is_found_where_it_stands(prefix):
    inner = Inner()
    inner._tp_plan = {"up.*": "colwise"}
    model = inner
    for name in reversed(prefix.split(".") if prefix else ()):
        model = Outer(**{name: model})
    start = f"{prefix}." if prefix else ""
    assert list(get_hf_tp_shard_plan(model)) == [f"{start}embed_tokens", f"{start}up.*"]


def test_an_embedding_that_the_plan_names_is_left_to_it():
    inner = Inner()
    inner._tp_plan = {"up.*": "colwise", "embed_tokens": "replicate"}
    assert style_types(get_hf_tp_shard_plan(inner))["embed_tokens"] == "Replicated() "


class Codes(nn.Module):
    """An embedding of another kind, which the style for a table cannot shard."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))


@pytest.mark.parametrize("says_which", [True, False])
def test_an_input_embedding_of_another_kind_is_left_replicated(says_which):
    inner = Inner()
    inner.embed_tokens, inner._tp_plan = Codes(), {"up.*": "colwise"}
    if says_which:
        inner.get_input_embeddings = lambda: inner.embed_tokens
    assert list(get_hf_tp_shard_plan(inner)) == ["up.*"]


def test_a_model_without_a_plan_is_reported():
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(n_layer=1, hidden_size=4, n_head=2, vocab_size=5)
    with torch.device("meta"), pytest.warns(UserWarning, match=r"BloomForCausalLM has no tensor-parallel plan"):
        assert get_hf_tp_shard_plan(BloomForCausalLM(config)) == {}


@pytest.mark.parametrize("model", [None, "llama", {"lm_head": "colwise"}])
def test_values_that_are_no_module(model):
    with pytest.raises(TypeError, match=r"parallelizer\.get_hf_tp_shard_plan: model is .*; pass a torch.nn.Module"):
        get_hf_tp_shard_plan(model)


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        (
            {"up.*": "ep_dispatch_experts"},
            ValueError,
            "key 'up.*': .*style='ep_dispatch_experts' is an expert-parallel",
        ),
        ({"up.*": "colwize"}, ValueError, "key 'up.*': .*style='colwize' is not known; nearest: 'colwise'"),
        ({"up.*": None}, TypeError, "key 'up.*': .*style=None is None"),
        ({"up.*.weight": "rowwise"}, ValueError, "key 'up.*.weight': style='rowwise' shards a bare parameter, and its"),
        ({"up.*.weight": "rowwise", "up.*": "colwise"}, ValueError, "and its module has ColwiseParallel; only stacks"),
    ],
)
def test_an_entry_that_cannot_be_a_style(plan, error, words):
    inner = Inner()
    inner._tp_plan = plan
    with pytest.raises(error, match=words.replace("*'", r"\*'").replace("*.weight", r"\*.weight")):
        get_hf_tp_shard_plan(inner)


def test_a_rejected_style_of_a_part_that_is_not_there_is_no_mistake():
    inner = Inner()
    inner._tp_plan = {"up.*": "colwise", "experts.*": "ep_dispatch_experts"}
    assert list(get_hf_tp_shard_plan(inner)) == ["embed_tokens", "up.*"]
