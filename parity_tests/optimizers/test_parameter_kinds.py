"""Which parameters are matrices, embeddings and vectors, and the groups that are decayed."""

import re

import pytest
import torch
from torch import nn

from torch_impl.optimizers import ParameterKinds, parameter_kinds


class Model(nn.Module):
    """A tied embedding, a fused projection, experts with a bias each, a convolution over channels, a norm."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.qkv = nn.Linear(4, 12)
        self.experts = nn.Parameter(torch.zeros(3, 4, 2))
        self.shared_expert = nn.Parameter(torch.zeros(1, 4, 2))
        self.experts_bias = nn.Parameter(torch.zeros(3, 4))
        self.conv = nn.Conv1d(4, 4, 3, groups=4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.tokens.weight
        self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)


def test_kinds_of_a_model():
    model = Model()
    kinds = parameter_kinds(model)
    assert list(kinds.matrices) == ["experts", "shared_expert", "qkv.weight"]
    assert list(kinds.embeddings) == ["tokens.weight", "lm_head.weight"]
    assert list(kinds.vectors) == ["experts_bias", "qkv.bias", "conv.weight", "norm.weight", "norm.bias"]
    assert kinds.matrices["experts"] is model.experts
    assert list(parameter_kinds(model, ["qkv.*"]).embeddings) == ["tokens.weight", "qkv.weight"]


def test_vectors_are_not_decayed():
    kinds = parameter_kinds(Model())
    every, vectors = kinds.decay_groups(0.1)
    assert every["weight_decay"] == 0.1 and vectors["weight_decay"] == 0.0
    assert [id(p) for p in every["params"]] == [id(p) for p in (kinds.matrices | kinds.embeddings).values()]
    assert [id(p) for p in vectors["params"]] == [id(p) for p in kinds.vectors.values()]
    embeddings, again = kinds.adamw_groups(0.1)
    assert [id(p) for p in embeddings["params"]] == [id(p) for p in kinds.embeddings.values()]
    assert embeddings["weight_decay"] == 0.1 and again == vectors


def test_torch_takes_the_groups_of_a_model_that_has_one_kind_alone():
    assert torch.optim.AdamW(parameter_kinds(nn.LayerNorm(4)).decay_groups(0.1)).param_groups[0]["weight_decay"] == 0.0
    assert parameter_kinds(nn.ReLU()) == ParameterKinds()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "optimizers.parameter_kinds: model is None; pass a torch.nn.Module"),
        ({"embeddings": "*embed*"}, "optimizers.parameter_kinds: embeddings='*embed*' is a str; pass a list of names"),
        (
            {"embeddings": ["head.*"]},
            "optimizers.parameter_kinds: 'head.*' matches no parameter of Linear; pass patterns of parameters' names",
        ),
    ],
)
def test_rejected(arguments, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        parameter_kinds(**{"model": nn.Linear(2, 2), **arguments})
