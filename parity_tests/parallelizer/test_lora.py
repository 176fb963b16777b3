"""Adapters under tp, sequence parallelism and FSDP: values, every gradient, frozen and merged weights, rejections."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from jax_ref.parallelizer import lora_weight
from parity_tests.parallelizer.adapted_layer import ALPHA, adapted_layer
from parity_tests.parallelizer.families import Chosen, batch, model_of
from parity_tests.parallelizer.plain_modules import differentiated
from parity_tests.parallelizer.styled import accumulated, styled
from parity_tests.parallelizer.training import broken, broken_on_ranks, parallelized, summed_loss
from parity_tests.parity import parity
from parity_tests.slow import slow_but
from shardproof import CaseSpec, scheme, values
from shardproof.engines.engines import run
from shardproof.judge import bridge
from torch_impl.parallelizer import (
    LoRALinear,
    add_lora,
    fsdp2_strategy_parallelize,
    merge_lora,
    to_cpu,
    translate_to_torch_parallel_style,
    unmerge_lora,
)
from torch_impl.parallelizer.mesh_axes import mesh_axes
from torch_impl.parallelizer.tp_plan import check_plan

TRAINED = ("lora_A.weight", "lora_B.weight", "lora_magnitude")


def merged_twice(layer):
    """The full weight of a layer after two merges, and after it is unmerged."""
    merged = to_cpu(merge_lora(merge_lora(layer)).weight).detach().clone()
    return merged, to_cpu(unmerge_lora(layer).weight).detach()


def gradients_of(outcome, prefix=""):
    return tuple(outcome[prefix + name] for name in TRAINED if prefix + name in outcome)


def shape(*names):
    return {name: f"{dims} tp=I" for name, dims in names}


ADAPTER = shape(("weight", "o i"), ("bias", "o"), ("a", "r i"), ("b", "o r"))
DECLARED = dict(
    mesh={"tp": (1, 2, 4, 8)},  # on 8 ranks some have no rows or columns
    dtypes=("float64", "float32", "bfloat16"),
    roundings=8,  # the products with W, A and B, their sums and the norms are stored in the tested dtype on their way
)


def whole_layer(x, weight, bias, a, b, magnitude, cotangent, weights, is_bias_trained):
    def forward(x, bias, a, b, *magnitude):
        return x @ lora_weight(weight, a, b, ALPHA / len(a), *magnitude).T + bias[None]

    moving = (x, bias, a, b) if magnitude is None else (x, bias, a, b, magnitude)
    return differentiated(forward, moving, cotangent, weights, None if is_bias_trained else 1)


def whole_layer_without_magnitude(x, weight, bias, a, b, cotangent, weights, is_bias_trained):
    return whole_layer(x, weight, bias, a, b, None, cotangent, weights, is_bias_trained)


WHOLE = ("colwise_gather_output", "rowwise_split_input", "replicate")
NORMAL = values("normal")


def of_layer(has_magnitude):
    """The declaration of one layer with full inputs and outputs."""
    inputs = {"x": "b i tp=I", **ADAPTER} | ({"magnitude": "o tp=I"} if has_magnitude else {})
    floats = {**inputs, "cotangent": "b o tp=I", "weights": "n tp=I"}
    gradients = ("b i tp=I", "o tp=I", "r i tp=I", "o r tp=I") + (("o tp=I",) if has_magnitude else ())
    return scheme(
        reference=whole_layer if has_magnitude else whole_layer_without_magnitude,
        inputs=floats,
        outputs=("b o tp=I", *gradients),
        dims={"b": (2,), "i": (5, 4), "o": (7, 4), "r": (2, 3), "n": (3,)},
        options={"is_bias_trained": (False, True)},
        rank_options={"times": (1, 2), "style": WHOLE},
        nograd=tuple(floats),
        draw=dict.fromkeys(floats, NORMAL),
        **DECLARED,
    )


@of_layer(has_magnitude=False)
def lora_layer(mesh, x, weight, bias, a, b, cotangent, weights, is_bias_trained, times, style):
    layer = styled(mesh, adapted_layer(weight, bias, a, b, None, is_bias_trained), {"": style})
    y, moved, outcome = accumulated(layer, (x,), cotangent, weights, times)
    return y, *moved, outcome["bias"], *gradients_of(outcome)


@of_layer(has_magnitude=True)
def dora_layer(mesh, x, weight, bias, a, b, magnitude, cotangent, weights, is_bias_trained, times, style):
    layer = styled(mesh, adapted_layer(weight, bias, a, b, magnitude, is_bias_trained), {"": style})
    y, moved, outcome = accumulated(layer, (x,), cotangent, weights, times)
    return y, *moved, outcome["bias"], *gradients_of(outcome)


def merged_and_unmerged(weight, a, b, magnitude, dora):
    return lora_weight(weight, a, b, ALPHA / len(a), magnitude if dora else None), weight


MERGED = shape(("weight", "o i"), ("a", "r i"), ("b", "o r"), ("magnitude", "o"))


@scheme(
    reference=merged_and_unmerged,
    inputs=MERGED,
    outputs=("o i tp=I", "o i tp=I"),
    dims={"i": (5, 4), "o": (7, 4), "r": (2, 3)},
    options={"dora": (False, True)},
    rank_options={"style": WHOLE},
    nograd=tuple(MERGED),
    draw={**dict.fromkeys(MERGED, NORMAL), "b": values("normal", "large")},  # a weight below its adapter's last digit
    **{**DECLARED, "sums": "float32"},
)
def merged_layer(mesh, weight, a, b, magnitude, dora, style):
    """The merged weight is rounded once; the products of the layers above may be stored on their way."""
    layer = adapted_layer(weight, None, a, b, magnitude if dora else None)
    return merged_twice(styled(mesh, layer, {"": style}))


PAIR = shape(
    ("up", "f d"), ("up_a", "r d"), ("up_b", "f r"), ("up_m", "f"),
    ("down", "d f"), ("down_a", "r f"), ("down_b", "d r"), ("down_m", "d"), ("bias", "d"),
)  # fmt: skip


def whole_pair(x, up, up_a, up_b, up_m, down, down_a, down_b, down_m, bias, cotangent, weights, dora, is_bias_trained):
    def forward(x, up_a, up_b, up_m, down_a, down_b, down_m, bias):
        scaling = ALPHA / len(up_a)
        inner = jax.nn.silu(x @ lora_weight(up, up_a, up_b, scaling, up_m if dora else None).T)
        return inner @ lora_weight(down, down_a, down_b, scaling, down_m if dora else None).T + jnp.broadcast_to(
            bias, x.shape
        )

    moving = (x, up_a, up_b, up_m, down_a, down_b, down_m, bias)
    return differentiated(forward, moving, cotangent, weights, None if is_bias_trained else 7)


class Pair(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


def of_pair(rows, dims):
    """The declaration of a pair that takes and returns these rows."""
    return scheme(
        reference=whole_pair,
        inputs={"x": rows, **PAIR, "cotangent": rows, "weights": "n tp=I"},
        outputs=(rows, rows, "r d tp=I", "f r tp=I", "f tp=I", "r f tp=I", "d r tp=I", "d tp=I", "d tp=I"),
        dims={"b": (2,), "d": (3,), "f": (5, 8), "r": (2,), "n": (3,), **dims},
        options={"dora": (False, True), "is_bias_trained": (False, True)},
        rank_options={"times": (1, 2)},
        nograd=("x", *PAIR, "cotangent", "weights"),
        draw=dict.fromkeys(("x", *PAIR, "cotangent", "weights"), NORMAL),
        **DECLARED,
    )


@of_pair("b d tp=I", {})
def lora_pair(
    mesh, x, up, up_a, up_b, up_m, down, down_a, down_b, down_m, bias, cotangent, weights, dora, is_bias_trained, times
):  # fmt: skip
    """Column-wise, then row-wise; between them a rank has its own columns."""
    adapters = (up_a, up_b, up_m), (down_a, down_b, down_m)
    plan = {"up": "colwise", "down": "rowwise"}
    return of_styled_pair(mesh, plan, x, up, down, adapters, bias, cotangent, weights, dora, is_bias_trained, times)


@of_pair("b s/tp d", {"s": "l*tp", "l": (2, 1)})
def lora_pair_of_positions(
    mesh, x, up, up_a, up_b, up_m, down, down_a, down_b, down_m, bias, cotangent, weights, dora, is_bias_trained, times
):  # fmt: skip
    """The same between layers of sequence parallelism: the first gathers the positions, the second scatters its sum."""
    adapters = (up_a, up_b, up_m), (down_a, down_b, down_m)
    plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    return of_styled_pair(mesh, plan, x, up, down, adapters, bias, cotangent, weights, dora, is_bias_trained, times)


def of_styled_pair(mesh, plan, x, up, down, adapters, bias, cotangent, weights, dora, is_bias_trained, times):
    (up_a, up_b, up_m), (down_a, down_b, down_m) = adapters
    layers = (
        adapted_layer(up, None, up_a, up_b, up_m if dora else None),
        adapted_layer(down, bias, down_a, down_b, down_m if dora else None, is_bias_trained),
    )
    module = styled(mesh, Pair(*layers), plan)
    y, moved, outcome = accumulated(module, (x,), cotangent, weights, times)
    for name, magnitude in (("up", up_m), ("down", down_m)):
        outcome.setdefault(f"{name}.lora_magnitude", torch.zeros_like(magnitude))
    return y, *moved, *gradients_of(outcome, "up."), *gradients_of(outcome, "down."), outcome["down.bias"]


SCHEMES = (lora_layer, dora_layer, merged_layer, lora_pair, lora_pair_of_positions)
test_parity = parity(SCHEMES, lockstep=20)


test_parity_on_processes = pytest.mark.slow(parity(SCHEMES, gloo=3))


# ---- Models of transformers

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 3


def model_with_adapters(chosen, dora):
    """The model of a family, with an adapter of drawn values in every projection."""
    model = model_of(chosen)
    add_lora(model, [f"model.layers.*.*.{name}" for name in ALL], rank=RANK, alpha=ALPHA, dora=dora)
    return with_values(model)


def with_values(model):
    """A and B of each adapter are drawn, with their number as seed; magnitudes are drawn near the norms."""
    for number, (name, parameter) in enumerate(trained(model)):
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator) / 4
        with torch.no_grad():
            parameter.copy_(parameter + drawn if name.endswith("magnitude") else drawn)
    return model


def trained(model):
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def whole_gradients(chosen, dora, ids, targets):
    """The adapters' gradients on one device, by the chain rule, of a model of transformers with the merged weights."""
    adapted, plain = model_with_adapters(chosen, dora), model_of(chosen)
    layers = {name: layer for name, layer in adapted.named_modules() if isinstance(layer, LoRALinear)}
    factors = {}
    with torch.no_grad():
        for name, layer in layers.items():
            weight = layer.weight + ALPHA / RANK * layer.lora_B.weight @ layer.lora_A.weight
            norms = weight.norm(dim=1)
            factors[name] = (layer.lora_magnitude / norms if dora else torch.ones_like(norms)), weight / norms[:, None]
            plain.get_submodule(name).weight.copy_(factors[name][0][:, None] * weight)
    tokens = int((targets >= 0).sum())
    loss = summed_loss(plain(input_ids=torch.from_numpy(ids)).logits, torch.from_numpy(targets)) / tokens
    loss.backward()
    gradients = {}
    for name, layer in layers.items():
        factor, direction = factors[name]
        gradient = plain.get_submodule(name).weight.grad
        of_sum = ALPHA / RANK * factor[:, None] * gradient
        gradients[f"{name}.lora_A.weight"] = layer.lora_B.weight.T @ of_sum
        gradients[f"{name}.lora_B.weight"] = of_sum @ layer.lora_A.weight.T
        if dora:
            gradients[f"{name}.lora_magnitude"] = (gradient * direction).sum(1)
    return loss.item(), {name: x.detach().numpy() for name, x in gradients.items()}


def rank_gradients(view, chosen, dora, ids, targets, switches):
    """(this rank's addend of the loss, the full gradients)."""
    axes = mesh_axes(view.device_mesh)
    model = parallelized(**switches)(model_with_adapters(chosen, dora), view.device_mesh)
    rank, ranks = axes.loss_mesh.get_local_rank(), axes.data_size
    own = slice(rank, None, ranks)
    logits = model(input_ids=torch.from_numpy(ids[own])).logits
    loss = summed_loss(logits, torch.from_numpy(targets[own])) / int((targets >= 0).sum())
    (ranks * loss).backward()
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    return loss.item(), {name: to_cpu(parameter.grad).numpy() for name, parameter in trained(model)}


def check_family(family, mesh, dora, **switches):
    chosen = Chosen(family)
    ids, targets = batch(chosen, 4, 4)
    loss, want = whole_gradients(chosen, dora, ids, targets)
    body = partial(rank_gradients, chosen=chosen, dora=dora, ids=ids, targets=targets, switches=switches)
    ranks = run(lambda view, case: body(view), CaseSpec(scheme="lora", mesh=mesh, dtype="float64")).results
    assert broken_on_ranks([gradients for _, gradients in ranks], want, mesh) == []
    total = sum(addend for addend, _ in ranks) / mesh.get("tp", 1)
    assert broken({"loss": np.array(total)}, {"loss": np.array(loss)}) == []


SEQUENCES = {"sequence_parallel": True}
RECOMPUTED = {"activation_checkpointing": True}
RUNS = [
    ("llama", {"dp_shard": 1, "tp": 2}, True, {}),
    ("llama", {"dp_shard": 2, "tp": 2}, False, SEQUENCES),
    ("llama", {"dp_shard": 2}, True, RECOMPUTED),
    ("llama", {"dp_shard": 1, "tp": 2}, True, {**SEQUENCES, **RECOMPUTED}),
    ("qwen3", {"dp_replicate": 2, "dp_shard": 2}, False, {}),
    ("qwen3", {"dp_shard": 1, "tp": 4}, True, {}),  # more ranks than heads of keys
    ("qwen3", {"dp_shard": 1, "tp": 2}, True, SEQUENCES),
    ("gemma", {"dp_shard": 1, "tp": 2}, False, {}),
    ("gemma", {"dp_shard": 2, "tp": 2}, True, {}),
    ("gemma", {"dp_shard": 1, "tp": 4}, False, SEQUENCES),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh", "dora", "switches"), RUNS)
def test_gradients_equal_one_devices(family, mesh, dora, switches):
    check_family(family, mesh, dora, **switches)


@pytest.mark.slow
def test_gradients_equal_one_devices_on_processes():
    chosen, mesh = Chosen("qwen3"), {"dp_shard": 1, "tp": 2}
    ids, targets = batch(chosen, 4, 4)
    _, want = whole_gradients(chosen, True, ids, targets)
    body = partial(rank_gradients, chosen=chosen, dora=True, ids=ids, targets=targets, switches=SEQUENCES)
    ranks = run(lambda view, case: body(view), CaseSpec(scheme="lora", mesh=mesh, dtype="float64"), "gloo").results
    assert broken_on_ranks([gradients for _, gradients in ranks], want, mesh) == []


# ---- Construction, merge and unmerge


def small(dora=False):
    model = nn.ModuleDict({"up": nn.Linear(3, 7), "down": nn.Linear(7, 3), "norm": nn.LayerNorm(3)}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 2, parameter.numel()).sin().view_as(parameter))
    return add_lora(model, ["up", "down"], rank=2, alpha=ALPHA, dora=dora)


@pytest.mark.parametrize("dora", [False, True])
def test_a_new_adapter_changes_no_output_and_is_trained_alone(dora):
    model, x = small(dora), torch.randn(4, 3, dtype=torch.float64)
    layer = model["up"]
    plain = F.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), plain)  # the adapter adds 0, and the magnitude equals the norm, its divisor
    names = {f"{name}.{leaf}" for name in ("up", "down") for leaf in TRAINED[: 2 + dora]}
    assert {name for name, _ in trained(model)} == names


def merged_on_ranks(mesh, dora):
    """(full weights merged, again after unmerging, whether the outputs agreed) of each rank."""

    def body(view, case):
        model = with_values(small(dora))
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
        names = {"up": "colwise", "down": "rowwise"}
        plan = {name: translate_to_torch_parallel_style(style) for name, style in names.items()}
        net = Chain(model)
        fsdp2_strategy_parallelize(net, view.device_mesh, tp_shard_plan={f"net.{k}": v for k, v in plan.items()})
        before = net(x).detach()
        merge_lora(net)
        merge_lora(net)  # a second merge changes nothing
        weights = {name: to_cpu(model[name].weight).detach().clone() for name in names}
        after = net(x).detach()
        unmerge_lora(net)
        again = {name: to_cpu(model[name].weight).detach() for name in names}
        return weights, again, before, after

    return run(body, CaseSpec(scheme="lora", mesh=mesh, dtype="float64")).results


class Chain(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net["norm"](self.net["down"](F.silu(self.net["up"](x))))


MERGED_ON = [{"dp_shard": 1, "tp": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 4}]


@pytest.mark.parametrize("mesh", slow_but(MERGED_ON[1:2], MERGED_ON), ids=str)
@pytest.mark.parametrize("dora", [False, True])
def test_merged_weights_equal_one_devices_and_are_unmerged_to_the_bit(mesh, dora):
    bridge.start()
    model = with_values(small(dora))
    want, base = {}, {name: model[name].weight.detach().clone() for name in ("up", "down")}
    for name in base:
        layer = model[name]
        arguments = [layer.weight, layer.lora_A.weight, layer.lora_B.weight]
        magnitude = layer.lora_magnitude.detach().numpy() if dora else None
        arrays = (x.detach().numpy() for x in arguments)
        want[name] = np.asarray(lora_weight(*arrays, ALPHA / 2, magnitude))
    for merged, again, before, after in merged_on_ranks(mesh, dora):
        assert broken({name: x.numpy() for name, x in merged.items()}, want) == []
        assert all(again[name].equal(base[name]) for name in base)
        assert broken({"y": after.numpy()}, {"y": before.numpy()}) == []


# ---- Arguments

WRONG = {
    "targets has 'uq', which matches no module; nearest: 'up'": {"targets": ["uq"]},
    "targets has 'norm', and 'norm' is LayerNorm; name nn.Linear layers; nearest: 'up'": {"targets": ["norm"]},
    "targets is empty; pass the names of linear layers": {"targets": []},
    "rank=0 must be at least 1": {"rank": 0},
    "alpha=0 must be positive": {"alpha": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_change_nothing(message):
    model = nn.ModuleDict({"up": nn.Linear(3, 6), "norm": nn.LayerNorm(3)})
    arguments = {"targets": ["up"], "rank": 2, "alpha": 1.0} | WRONG[message]
    with pytest.raises(ValueError, match=re.escape(f"parallelizer.add_lora: {message}")):
        add_lora(model, **arguments)
    assert type(model["up"]) is nn.Linear and all(parameter.requires_grad for parameter in model.parameters())


def test_a_layer_has_one_adapter_and_a_model_at_least_one():
    message = "parallelizer.add_lora: targets has 'up', and 'up' has an adapter; name each layer once"
    with pytest.raises(ValueError, match=re.escape(message)):
        add_lora(small(), ["up"], rank=2, alpha=1.0)
    for function in (merge_lora, unmerge_lora):
        with pytest.raises(ValueError, match=r"_lora: model is a Linear without an adapter; call add_lora first"):
            function(nn.Linear(2, 2))


def test_packed_halves_with_an_adapter_are_rejected():
    def body(view, case):
        plan = {"up": translate_to_torch_parallel_style("packed_colwise")}
        with pytest.raises(ValueError, match="PackedColwise shards halves of a layer, and this one has an adapter"):
            check_plan(small(), plan, view.device_mesh)

    run(body, CaseSpec(scheme="lora", mesh={"tp": 2}))
