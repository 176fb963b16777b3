"""Parity of models of many families in stages; unsupported ones are rejected and never split wrongly."""

import pytest
import torch
from torch import nn

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.pipelining.functional import split_model_into_stages

families = pytest.importorskip("parity_tests.parallelizer.families", reason="needs transformers")

WIDTH, VOCAB, LAYERS = 8, 31, 4
IDS = torch.arange(10).view(2, 5)
DROPOUT = {"gpt_neox": "hidden_dropout", "phi": "embd_pdrop"}


def on_one_rank(body):
    return run(lambda mesh, case: body(mesh.device_mesh), CaseSpec("anatomy", {"pp": 1})).results[0]


def cut(mesh, model, names=None):
    return split_model_into_stages(model, mesh, "pp", "LoopedBFS", torch.device("cpu"), names)[1]


def in_a_row(parts):
    x = IDS
    for part in parts:
        x = part(x)
    return x


def model_of(family, **settings):
    config = {"num_hidden_layers": LAYERS, "n_layer": LAYERS, **settings}
    return families.empty(families.Chosen(family, False, tuple(config.items())), torch.float32)


@pytest.mark.parametrize("family", sorted(DROPOUT))
def test_dropout_before_the_layers_is_the_first_stages(family):
    def body(mesh):
        model = model_of(family, **{DROPOUT[family]: 0.5})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            expected = model(IDS, use_cache=False).logits
            torch.manual_seed(3)
            return in_a_row(cut(mesh, model)).equal(expected)

    assert on_one_rank(body)


def test_modules_without_parameters_need_not_be_named():
    names = [
        ["model.embed_tokens"],
        [f"model.layers.{layer}" for layer in range(LAYERS)],
        ["model.norm", "lm_head"],
    ]

    def body(mesh):
        model = model_of("llama")
        expected = model(IDS, use_cache=False).logits
        return in_a_row(cut(mesh, model, names)).equal(expected)

    assert on_one_rank(body)


class Stack(nn.Module):
    """A user's own decoder, whose forward may do something beside its layers."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        if kind == "headed":
            self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids=None, inputs_embeds=None, use_cache=None):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = 2 * x if self.kind == "scaled" else x
        entered = x
        for layer in reversed(list(self.layers)) if self.kind == "reversed" else self.layers:
            x = layer(x)
            x = x + entered if self.kind == "skipped" else x[0].unsqueeze(0) if self.kind == "indexed" else x
        x = 2 * self.norm(x) if self.kind == "scaled at the end" else self.norm(x)
        return self.lm_head(x) if self.kind == "headed" else x


@pytest.mark.parametrize("kind", ["plain", "headed"])
def test_a_custom_stack_of_layers_is_split(kind):
    def body(mesh):
        model = Stack(kind)
        expected = model(IDS)
        return in_a_row(cut(mesh, model)).equal(expected)

    assert on_one_rank(body)


@pytest.mark.parametrize("kind", ["scaled", "reversed", "skipped", "indexed", "scaled at the end"])
def test_work_that_every_stage_would_repeat_is_rejected(kind):
    def body(mesh):
        parts = cut(mesh, Stack(kind))
        with pytest.raises(ValueError, match="Stack changes hidden states outside its embedding"):
            in_a_row(parts)

    on_one_rank(body)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: model_of("bloom"),
            "BloomForCausalLM has its layers in 'transformer.h'; the modules before and after",
        ),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), r"Sequential has no nn\.ModuleList of layers"),
    ],
)
def test_an_unsupported_family_is_rejected(model, words):
    def body(mesh):
        with pytest.raises(ValueError, match=f"split_model_into_stages: {words}"):
            cut(mesh, model())

    on_one_rank(body)
