"""Layers whose products overlap with the gather and the scatter of their sequence, and models of such layers."""

from collections import OrderedDict

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parity_tests.parallelizer.configurations import configuration, judged
from parity_tests.parallelizer.families import model_of
from parity_tests.parallelizer.plain_modules import differentiated
from parity_tests.parallelizer.small_net import Net, plan
from parity_tests.parallelizer.styled import accumulated, linear_layer
from parity_tests.parallelizer.test_sequence_parallel import EVEN, QWEN3
from parity_tests.parallelizer.training import parallelized
from parity_tests.rejections import rejected
from parity_tests.slow import slow_but
from shardproof import CaseSpec, check_cases, scheme, values
from shardproof.engines.engines import run
from torch_impl.parallelizer import fsdp2_strategy_parallelize, translate_to_torch_parallel_style
from torch_impl.parallelizer.sequence_parallel import sequence_styles, shard_sequences
from torch_impl.parallelizer.tp_plan import shard_modules, validate_styles

LEAVES = {"gate": "f d", "gate_bias": "f", "up": "f d", "up_bias": "f", "down": "d f", "down_bias": "d"}
NAMES = {"gate": "gate.weight", "up": "up.weight", "down": "down.weight"} | {
    f"{leaf}_bias": f"{leaf}.bias" for leaf in ("gate", "up", "down")
}
PLAN = {"gate": "colwise", "up": "colwise", "down": "rowwise"}


class GatedMlp(nn.Module):
    """Two column-wise modules and a row-wise one; with `is_scaled` their input is not the layer's as it came."""

    def __init__(self, gate, gate_bias, up, up_bias, down, down_bias, is_scaled):
        super().__init__()
        self.gate, self.up = linear_layer(gate, gate_bias), linear_layer(up, up_bias)
        self.down, self.is_scaled = linear_layer(down, down_bias), is_scaled

    def forward(self, x):
        scaled = 2 * x if self.is_scaled else x
        return self.down(F.silu(self.gate(x)) * self.up(scaled))


class OneBlock(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(OrderedDict(layer=layer))])

    def forward(self, x):
        return self.blocks[0](x)


def gated_mlp(x, gate, gate_bias, up, up_bias, down, down_bias, cotangent, weights, is_scaled):
    def forward(x, gate, gate_bias, up, up_bias, down, down_bias):
        scaled = 2 * x if is_scaled else x
        hidden = jax.nn.silu(x @ gate.T + gate_bias[None, None]) * (scaled @ up.T + up_bias[None, None])
        return hidden @ down.T + down_bias[None, None]

    return differentiated(forward, (x, gate, gate_bias, up, up_bias, down, down_bias), cotangent, weights)


SPECS = {leaf: f"{spec} tp=I" for leaf, spec in LEAVES.items()}


@scheme(
    reference=gated_mlp,
    mesh={"tp": (1, 2, 4, 8)},
    inputs={"x": "b s d tp=I", **SPECS, "cotangent": "b s d tp=I", "weights": "n tp=I"},
    outputs=("b s d tp=I", "b s d tp=I", *SPECS.values()),
    dims={"b": (2, 1), "s": (8, 16), "d": (3, 5), "f": (11, 16, 6), "n": (3,)},
    options={"is_scaled": (False, True)},
    rank_options={"times": (1, 2)},
    nograd=("x", *LEAVES, "cotangent", "weights"),
    draw=dict.fromkeys(("x", *LEAVES, "cotangent", "weights"), values("normal")),
    dtypes=("float64", "float32", "bfloat16"),
    reduction=("b", "s", "d", "f"),
    roundings=10,
)
def layer_of_rings(
    mesh, x, gate, gate_bias, up, up_bias, down, down_bias, cotangent, weights, is_scaled, times
):  # fmt: skip
    """A width that the ranks do not share equally too; on more ranks than features some have none."""
    net = OneBlock(GatedMlp(gate, gate_bias, up, up_bias, down, down_bias, is_scaled))
    named = {f"blocks.0.layer.{leaf}": translate_to_torch_parallel_style(style) for leaf, style in PLAN.items()}
    styles = validate_styles(net, named, mesh.size("tp"), fsdp_size=1)
    changed, gathering = sequence_styles(net, styles, is_async=True)
    shard_modules(net, changed, mesh.device_mesh)
    shard_sequences(net, styles, gathering, mesh.device_mesh, changed)
    y, moved, of = accumulated(net, (x,), cotangent, weights, times)
    return y, *moved, *(of[f"blocks.0.layer.{NAMES[leaf]}"] for leaf in LEAVES)


@pytest.mark.parametrize("engine", slow_but(["lockstep"], ["lockstep", "gloo"]))
def test_parity(engine):
    check_cases(layer_of_rings, 15 if engine == "lockstep" else 3, engine=engine)


ASYNC = {"sequence_parallel": True, "enable_async_tensor_parallel": True}


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi", "gemma2", "olmo2"])
def test_families_on_a_mesh(family):
    """Llama and Phi have biases; OLMo-2's norms of all heads leave its attention without rings."""
    assert judged(configuration(family), {"dp_shard": 2, "tp": 2}, EVEN, **ASYNC) == []


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_heads_of_keys_that_ranks_replicate(recomputed):
    chosen = configuration("qwen3", kv_heads=1)
    assert judged(chosen, {"dp_shard": 1, "tp": 4}, EVEN, activation_checkpointing=recomputed, **ASYNC) == []


@pytest.mark.slow
def test_compiled_blocks_are_cut_at_their_rings():
    compiled = {"enable_compile": True, "compile_backend": "aot_eager"}
    assert judged(configuration("qwen3"), {"dp_shard": 1, "tp": 2}, EVEN, **ASYNC, **compiled) == []


def test_one_ring_gathers_for_all_the_products_of_a_layer():
    """Blocks travel once for q, k and v, once for gate and up, and once for each sum; the lookup alone is reduced."""

    def body(view, case):
        model = parallelized(**ASYNC)(model_of(QWEN3), view.device_mesh)
        model(input_ids=torch.zeros(1, 8, dtype=torch.int64)).logits.sum().item()

    ranks = run(body, CaseSpec("rings", {"dp_shard": 1, "tp": 2}, dtype="float64"))
    ops = [row.op for row in ranks.ledger.of(0)]
    assert (ops.count("send"), ops.count("reduce_scatter"), ops.count("all_reduce")) == (2 * 4, 0, 1)


def overlapped(**options):
    return lambda mesh: fsdp2_strategy_parallelize(Net(), mesh.device_mesh, tp_shard_plan=plan(), **options)


NAME = "enable_async_tensor_parallel=True"
REJECTED = [
    (
        "no sequences",
        overlapped(enable_async_tensor_parallel=True),
        f"parallelizer.fsdp2_strategy_parallelize: {NAME} overlaps gathers of sequences; pass sequence_parallel=True",
    ),
    (
        "no layers",
        overlapped(**ASYNC),
        f"{NAME}: no layer of Net has column-wise modules and one row-wise module behind them in the plan, all without "
        "adapters; pass False",
    ),
]
test_rejection = rejected({"dp_shard": 1, "tp": 2}, REJECTED)
