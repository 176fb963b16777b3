"""Which parameters are matrices, embeddings and vectors, and the groups that are decayed."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from parity_tests.optimizers.parameters import local, weight
from shardproof import scheme, values
from torch_impl.optimizers import ParameterKinds, parameter_kinds

LR, DECAY, LATER_DECAY = 0.5, 0.25, 0.125
SPECS = {"tokens": "v/dp d", "qkv": "h/dp d", "qkv_bias": "h d dp=I", "experts": "e d/dp f", "conv": "c one k dp=I",
         "norm": "d dp=I", "head_embed": "v d dp=I", "frozen": "d f dp=I"}  # fmt: skip
MATRICES, TABLES = ("qkv", "experts", "head_embed"), ("tokens",)  # by their dims, and by their module


def twice_stepped(weights, gradients, pattern):
    """Step SGD twice by its decay groups: first every matrix decays, then only the matrices that Muon leaves."""
    new = {}
    for name, w in weights.items():
        is_matrix = name in (*MATRICES, *TABLES) and min(w.shape[-2:]) > 1
        is_named = "embed" in name if pattern is None else name.startswith(pattern)
        decays = [DECAY, LATER_DECAY] if is_matrix else [0.0, 0.0]
        if is_matrix and not (is_named or name in TABLES):
            decays = decays[:1]  # Muon's
        for decay in decays if name != "frozen" else ():
            w = w - LR * (gradients[name] + decay * w)
        new[name] = w
    return new


@scheme(
    reference=twice_stepped,
    mesh={"dp": (1, 2)},
    inputs={"weights": SPECS, "gradients": SPECS},
    outputs=SPECS,
    dims={"v": (2, 4), "d": (2, 4), "h": (2, 4), "e": (1, 2), "f": (3, 1), "c": (2, 3), "one": (1,), "k": (2, 3)},
    draw={f"{tree}.{name}": values("normal", "iota") for tree in ("weights", "gradients") for name in SPECS},
    options={"pattern": (None, "qkv", "conv")},
    nograd=tuple(f"{tree}.{name}" for tree in ("weights", "gradients") for name in SPECS),
    dtypes=("float32", "float64"),
)
@pytest.mark.cases
def steps_of_kinds(mesh, weights, gradients, pattern):
    """A rank may have one row of a matrix, which is one by its full shape."""
    model, shards = nn.Module(), {"tokens": Shard(0), "qkv": Shard(0), "experts": Shard(1)}
    for name, x in weights.items():
        placement = [shards.get(name, Replicate())]
        parameter = weight(x, gradients[name], mesh.device_mesh, placement).requires_grad_(name != "frozen")
        model.register_parameter(name, parameter)
    model.part = nn.Module()
    model.part.table = nn.Embedding.from_pretrained(torch.zeros(1, 1))  # draws nothing
    model.part.table.weight = model.tokens  # tied: named `tokens`, an embedding by its module, which a part has
    kinds = parameter_kinds(model, None if pattern is None else [f"{pattern}*"])
    for groups in (kinds.decay_groups(DECAY), kinds.adamw_groups(LATER_DECAY)):
        torch.optim.SGD(groups, lr=LR).step()
    return {name: local(getattr(model, name).detach()) for name in weights}


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
