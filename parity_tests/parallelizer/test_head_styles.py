"""Heads that are not one Linear per projection on every rank: q, k and v in one Conv1D, fewer key heads than ranks."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from parity_tests.parallelizer.adapted_layer import ALPHA, adapted_layer
from parity_tests.parallelizer.families import Chosen, empty, model_of
from parity_tests.parallelizer.plain_modules import differentiated
from parity_tests.parallelizer.styled import accumulated, linear_layer, styled
from parity_tests.parallelizer.training import parallelized
from parity_tests.parity import parity
from shardproof import CaseSpec, scheme, values
from shardproof.engines.engines import run
from torch_impl.parallelizer import to_cpu
from torch_impl.parallelizer.head_styles import GROUPS, ReplicatedHeads
from torch_impl.parallelizer.hf_plan import translate_to_torch_parallel_style
from torch_impl.parallelizer.tp_plan import validate_styles

ORDINARY = values("normal")


class Packed(nn.Module):
    """One Conv1D computes q, k and v, split as in GPT-2; another Conv1D projects q * k + v."""

    def __init__(self, weight, bias, out, out_bias):
        super().__init__()
        self.split_size = weight.shape[1] // 3
        self.c_attn, self.c_proj = conv1d(weight, bias), conv1d(out, out_bias)

    def forward(self, x):
        q, k, v = self.c_attn(x).split(self.split_size, dim=-1)
        return self.c_proj(q * k + v)


class Gelu(nn.Module):
    def __init__(self, weight, bias, out, out_bias):
        super().__init__()
        self.c_fc, self.c_proj = conv1d(weight, bias), conv1d(out, out_bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


def conv1d(weight, bias):
    with torch.device("meta"):  # Conv1D draws its weights; on meta it draws nothing
        layer = Conv1D(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer


def packed_reference(x, weight, bias, out, out_bias, cotangent, weights, is_frozen):
    def forward(x, weight, bias, out, out_bias):
        q, k, v = jnp.moveaxis(jnp.einsum("bi,ipo->bpo", x, weight) + bias[None], 1, 0)
        return (q * k + v) @ out + out_bias[None]

    return differentiated(forward, (x, weight, bias, out, out_bias), cotangent, weights, 1 if is_frozen else None)


CONV1D = {"x": "b i tp=I", "weight": "i p o tp=I", "bias": "p o tp=I", "out": "o d tp=I", "out_bias": "d tp=I"}
OUTPUTS = ("b d tp=I", "b i tp=I", "i p o tp=I", "p o tp=I", "o d tp=I", "d tp=I")
DECLARED = dict(
    mesh={"tp": (1, 2, 4)},
    inputs={**CONV1D, "cotangent": "b d tp=I", "weights": "n tp=I"},
    outputs=OUTPUTS,
    options={"is_frozen": (False, True)},
    rank_options={"times": (1, 2, 3)},
    nograd=(*CONV1D, "cotangent", "weights"),
    draw=dict.fromkeys((*CONV1D, "cotangent", "weights"), ORDINARY),
    dtypes=("float64", "float32"),
    roundings=4,
)


@scheme(
    reference=packed_reference,
    dims={"b": (2,), "i": (3,), "p": (3,), "o": (4, 8), "d": (5,), "n": (3,)},
    **DECLARED,
)
def packed_conv1d_heads(mesh, x, weight, bias, out, out_bias, cotangent, weights, is_frozen, times):
    plan = {"c_attn": "conv1d_packed_colwise", "c_proj": "conv1d_rowwise"}
    module = styled(
        mesh, Packed(weight.flatten(1), bias.flatten(), out, out_bias), plan, "c_attn.weight" if is_frozen else None
    )
    y, moved, of = accumulated(module, (x,), cotangent, weights, times)
    packed = of["c_attn.weight"].view(weight.shape), of["c_attn.bias"].view(bias.shape)
    return y, *moved, *packed, of["c_proj.weight"], of["c_proj.bias"]


def gelu_reference(x, weight, bias, out, out_bias, cotangent, weights, is_frozen):
    def forward(x, weight, bias, out, out_bias):
        return jax.nn.gelu(x @ weight[:, 0] + bias, approximate=True) @ out + out_bias[None]

    return differentiated(forward, (x, weight, bias, out, out_bias), cotangent, weights, 1 if is_frozen else None)


@scheme(
    reference=gelu_reference,
    dims={"b": (2,), "i": (3,), "p": (1,), "o": (7, 8), "d": (5,), "n": (3,)},
    **DECLARED,
)
def conv1d_mlp(mesh, x, weight, bias, out, out_bias, cotangent, weights, is_frozen, times):
    plan = {"c_fc": "conv1d_colwise", "c_proj": "conv1d_rowwise"}
    module = styled(
        mesh, Gelu(weight.flatten(1), bias.flatten(), out, out_bias), plan, "c_fc.weight" if is_frozen else None
    )
    y, moved, of = accumulated(module, (x,), cotangent, weights, times)
    first = of["c_fc.weight"].view(weight.shape), of["c_fc.bias"].view(bias.shape)
    return y, *moved, *first, of["c_proj.weight"], of["c_proj.bias"]


class Grouped(nn.Module):
    """Attention whose heads of keys and values are shared by groups of queries, as transformers writes it.

    With `sinks` each head's softmax has one more logit, as in gpt-oss.
    """

    def __init__(self, heads, width, projections, sinks=None):
        super().__init__()
        self.sinks = None if sinks is None else nn.Parameter(sinks.clone())
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = map(linear_layer, projections)
        self.head_dim = width
        self.num_key_value_groups = heads // (len(projections[1]) // width)
        self.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=heads // self.num_key_value_groups)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, self.head_dim)) for each in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (k, v))
        logits = torch.einsum("shp,Shp->hsS", q, k)
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks[:, None, None].expand(-1, len(x), 1)], -1)
        scores = logits.softmax(-1)[..., : len(x)]
        return self.o_proj(torch.einsum("hsS,Shp->shp", scores, v).flatten(1))


def grouped(x, query, key, value, out, sinks):
    q = jnp.einsum("sd,hpd->shp", x, query)
    k, v = (jnp.einsum("sd,gpd->sgp", x, each) for each in (key, value))
    q = q.reshape(len(x), key.shape[0], -1, q.shape[-1])
    sink_logits = jnp.broadcast_to(sinks.reshape(*q.shape[1:3], 1, 1), (*q.shape[1:3], len(x), 1))
    logits = jnp.concatenate([jnp.einsum("sgrp,Sgp->grsS", q, k), sink_logits], -1)
    scores = jax.nn.softmax(logits, -1)[..., :-1]
    return jnp.einsum("grsS,Sgp->sgrp", scores, v).reshape(len(x), -1) @ out.T


def grouped_reference(x, query, key, value, out, sinks, cotangent, weights, is_frozen):
    return differentiated(grouped, (x, query, key, value, out, sinks), cotangent, weights, 2 if is_frozen else None)


def adapted_reference(x, query, key, value, out, sinks, a, b, cotangent, weights):
    """The weights of keys are frozen, and have an adapter."""

    def forward(x, a, b):
        return grouped(x, query, key + ALPHA / len(a) * jnp.einsum("gpr,rd->gpd", b, a), value, out, sinks)

    return differentiated(forward, (x, a, b), cotangent, weights)


HEADS = {"x": "s d tp=I", "query": "h p d tp=I", "key": "g p d tp=I", "value": "g p d tp=I", "out": "d c tp=I"}
HEADS["sinks"] = "h tp=I"
ADAPTED = {**HEADS, "a": "r d tp=I", "b": "g p r tp=I"}
PLAN = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise"), "o_proj": "rowwise", "": "per_head"}


@scheme(
    reference=grouped_reference,
    mesh={"tp": (1, 2, 4)},
    inputs={**HEADS, "cotangent": "s d tp=I", "weights": "n tp=I"},
    outputs=("s d tp=I", *HEADS.values()),
    dims={"s": (5,), "d": (3,), "h": (4, 8), "g": (1, 2, 4), "p": (2,), "c": "h*p", "n": (3,)},
    options={"is_frozen": (False, True)},
    rank_options={"times": (1, 2, 3)},
    nograd=(*HEADS, "cotangent", "weights"),
    draw=dict.fromkeys((*HEADS, "cotangent", "weights"), ORDINARY),
    dtypes=("float64",),
)
def heads_of_keys_on_more_ranks(mesh, x, query, key, value, out, sinks, cotangent, weights, is_frozen, times):
    projections = [*(each.flatten(0, 1) for each in (query, key, value)), out]
    attention = Grouped(len(query), query.shape[1], projections, sinks)
    module = styled(mesh, attention, PLAN, "k_proj.weight" if is_frozen else None)
    y, moved, of = accumulated(module, (x,), cotangent, weights, times)
    named = {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": out}
    return y, *moved, *(of[f"{name}.weight"].view(full.shape) for name, full in named.items()), of["sinks"]


@scheme(
    reference=adapted_reference,
    mesh={"tp": (1, 2, 4)},
    inputs={**ADAPTED, "cotangent": "s d tp=I", "weights": "n tp=I"},
    outputs=("s d tp=I", "s d tp=I", "r d tp=I", "g p r tp=I"),
    dims={"s": (5,), "d": (3,), "h": (4, 8), "g": (2, 1, 4), "p": (2,), "c": "h*p", "n": (3,), "r": (3, 2)},
    rank_options={"times": (1, 2, 3)},
    nograd=(*ADAPTED, "cotangent", "weights"),
    draw=dict.fromkeys((*ADAPTED, "cotangent", "weights"), ORDINARY),
    dtypes=("float64",),
)
def adapted_heads_of_keys(mesh, x, query, key, value, out, sinks, a, b, cotangent, weights, times):
    projections = [*(each.flatten(0, 1) for each in (query, key, value)), out]
    attention = Grouped(len(query), query.shape[1], projections, sinks)
    attention.requires_grad_(False)
    attention.k_proj = adapted_layer(projections[1], None, a, b.flatten(0, 1), None)
    y, moved, of = accumulated(styled(mesh, attention, PLAN), (x,), cotangent, weights, times)
    return y, *moved, of["k_proj.lora_A.weight"], of["k_proj.lora_B.weight"].view(b.shape)


test_parity = parity([packed_conv1d_heads, conv1d_mlp, heads_of_keys_on_more_ranks, adapted_heads_of_keys], lockstep=20)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 1)])
def test_each_rank_has_the_head_of_its_queries(heads, groups):
    """Four query heads on four ranks. A state dict has every key head once, for any number of ranks."""
    chosen = Chosen("qwen3", changes=(("num_key_value_heads", heads),))

    def body(view, case):
        model = parallelized()(model_of(chosen), view.device_mesh)
        attention = model.model.layers[0].self_attn
        saved = {name: to_cpu(value) for name, value in model.state_dict().items()}
        return getattr(attention, GROUPS), saved

    results = run(body, CaseSpec("groups", {"tp": 4}, dtype="float64")).results
    full = model_of(chosen).state_dict()
    for rank_groups, saved in results:
        assert rank_groups == groups
        assert {name: tuple(x.shape) for name, x in saved.items()} == {n: tuple(x.shape) for n, x in full.items()}
        assert all(torch.equal(saved[name], full[name]) for name in full)


def plan_styles(chosen, tp):
    from torch_impl.parallelizer import get_hf_tp_shard_plan

    model = empty(chosen, device="meta")
    return validate_styles(model, get_hf_tp_shard_plan(model), tp, fsdp_size=1)


def test_only_keys_and_values_of_fewer_heads_than_ranks_are_replicated():
    chosen = Chosen("llama", changes=(("num_key_value_heads", 2),))
    for tp, replicated in ((2, set()), (4, {"k_proj", "v_proj"})):
        styles = plan_styles(chosen, tp)
        leaves = {name.rpartition(".")[2] for name, entry in styles.items() if type(entry.style) is ReplicatedHeads}
        assert leaves == replicated


@pytest.mark.parametrize(
    ("family", "changes", "tp", "message"),
    [
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "num_key_value_heads=3 does not divide by"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "num_attention_heads=6 does not divide by"),
        (
            "gpt2",
            {"num_attention_heads": 3},
            2,
            "'transformer.h.*.attn.c_attn' shards heads, and num_attention_heads=3",
        ),
    ],
)
def test_heads_that_ranks_cannot_share(family, changes, tp, message):
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        plan_styles(Chosen(family, changes=tuple(changes.items())), tp)


def test_an_attention_without_the_number_of_its_groups():
    module = Grouped(4, 2, [torch.zeros(8, 3), torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(3, 8)])
    plan = {leaf: translate_to_torch_parallel_style("colwise") for leaf in ("q_proj", "k_proj", "v_proj")}
    validate_styles(module, plan, 4, fsdp_size=1)
    del module.num_key_value_groups
    with pytest.raises(ValueError, match=f"or a multiple of it if attention has {GROUPS}"):
        validate_styles(module, plan, 4, fsdp_size=1)


@pytest.mark.parametrize("style", ["conv1d_colwise", "conv1d_packed_colwise", "conv1d_rowwise"])
def test_a_layer_that_is_no_conv1d(style):
    plan = {"0": translate_to_torch_parallel_style(style)}
    with pytest.raises(ValueError, match=f"key '0': {style}: shards a Conv1D of transformers, not a Linear"):
        validate_styles(nn.Sequential(nn.Linear(2, 2)), plan, 2, fsdp_size=1)


LAYERS = {
    "Conv1D": lambda width: conv1d(torch.ones(2, width), torch.ones(width)),
    "Linear": lambda width: linear_layer(torch.ones(width, 2), torch.ones(width)),
    "LayerNorm": lambda width: nn.LayerNorm(width),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("width", [6, 12, 4, 8])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("style", ["conv1d_packed_colwise", "conv1d_colwise", "conv1d_rowwise"])
def test_layers_of_conv1d_styles(style, layer, width, tp):
    """A style takes a Conv1D; only the packed one has three parts."""
    model, plan = nn.Sequential(LAYERS[layer](width)), {"0": translate_to_torch_parallel_style(style)}
    if layer == "Conv1D" and (style != "conv1d_packed_colwise" or width % 3 == 0):
        validate_styles(model, plan, tp, fsdp_size=1)
    else:
        with pytest.raises(ValueError, match=f"^tp_shard_plan: key '0': {style}: "):
            validate_styles(model, plan, tp, fsdp_size=1)


def test_a_packed_conv1d_without_thirds():
    plan = {"0": translate_to_torch_parallel_style("conv1d_packed_colwise")}
    with pytest.raises(ValueError, match="nf=4 has no 3 equal parts"):
        validate_styles(nn.Sequential(Conv1D(4, 2)), plan, 2, fsdp_size=1)
