"""Sequence parallelism inside blocks: gradients are those without it, between layers a rank has its positions alone."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from jax_ref.parallelizer import from_state_dict
from jax_ref.parallelizer import mean_loss as reference_loss
from parity_tests.parallelizer.configurations import configuration, judged
from parity_tests.parallelizer.families import Chosen, model_of
from parity_tests.parallelizer.plain_modules import differentiated
from parity_tests.parallelizer.steps import dims, mean_loss, reduced_loss, specs
from parity_tests.parallelizer.styled import EPS, Norm, accumulated, linear_layer
from parity_tests.parallelizer.training import parallelized
from shardproof import CaseSpec, check_cases, ids, scheme, token_below, values
from shardproof.declare.declared import flat
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl.parallelizer import fsdp2_strategy_parallelize, translate_to_torch_parallel_style
from torch_impl.parallelizer.mesh_axes import mesh_axes
from torch_impl.parallelizer.sequence_parallel import sequence_styles, shard_sequences
from torch_impl.parallelizer.tp_plan import shard_modules, validate_styles

EVEN = 4  # positions, which tp divides
QWEN3 = Chosen("qwen3", True, (("num_hidden_layers", 2),))
MESH = {"dp_shard": (1, 2), "tp": (1, 2, 4)}
TREE = specs(QWEN3, tuple(MESH))


def loss(parameters, token, target):
    return reference_loss(from_state_dict(QWEN3.config, flat(parameters))(token), target)


@scheme(
    reference=loss,
    mesh=MESH,
    inputs={"parameters": TREE, "token": "b/dp_shard s", "target": "b/dp_shard s"},
    outputs="dp_shard=I tp=I",
    rank_options={"microbatches": (1, 2), "recomputed": (False, True), "overlapped": (False, True)},
    draw={f"parameters.{path}": values("normal") for path in flat(TREE)}
    | {"token": token_below("v"), "target": ids("v", ignore=-100)},
    dims={**dims(QWEN3), "b": (4,), "s": (4, 8)},
    dtypes=("float64",),
    reduction=("s", "d"),
)
def step_of_sharded_sequences(mesh, parameters, token, target, microbatches, recomputed, overlapped):
    switches = {"activation_checkpointing": recomputed, "enable_async_tensor_parallel": overlapped}
    parallelize = parallelized(MixedPrecisionPolicy(), sequence_parallel=True, **switches)
    return mean_loss(mesh, QWEN3, parameters, token, target, parallelize, microbatches)


class DirectBlock(nn.Module):
    """A norm, another that the plan names, and two linear layers that belong to the block itself."""

    def __init__(self, norm, named_norm, up, down):
        super().__init__()
        self.norm, self.named_norm = Norm(norm), Norm(named_norm)
        self.up, self.down = linear_layer(up), linear_layer(down)

    def forward(self, x):
        return self.named_norm(x + self.down(F.silu(self.up(self.norm(x)))))


class DirectNet(nn.Module):
    """One list of blocks behind another, which may be empty; between them each position loses the mean over all."""

    def __init__(self, blocks, more_blocks):
        super().__init__()
        self.blocks, self.more_blocks = (
            nn.ModuleList(DirectBlock(*weights) for weights in each) for each in (blocks, more_blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if len(self.more_blocks):
            x = x - x.mean(1, keepdim=True)
        for block in self.more_blocks:
            x = block(x)
        return x


def names_of_blocks(count, lists):
    return [f"blocks.{number}" if number < count - lists + 1 else "more_blocks.0" for number in range(count)]


LEAVES = {"norm": "l d", "named_norm": "l d", "up": "l f d", "down": "l d f"}
ENDS = {"sharded": ("colwise", "rowwise"), "full": ("colwise_gather_output", "rowwise_split_input")}


def plan_of_ends(ends, lists):
    named = dict(zip(("up", "down"), ENDS[ends], strict=True)) | {"named_norm": "replicated_with_grad_allreduce"}
    keys = [
        (f"{blocks}.*.{leaf}", style) for blocks in ("blocks", "more_blocks")[:lists] for leaf, style in named.items()
    ]
    return {key: translate_to_torch_parallel_style(style) for key, style in keys}


def imported_plan():
    return plan_of_ends("sharded", 2)


def loss_of_direct_layers(x, norm, named_norm, up, down, lists):
    def normed(x, weight):
        return weight[None, None] * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPS)

    for block, weights in enumerate(zip(norm, named_norm, up, down, strict=True)):
        if (block, lists) == (1, 2):
            x = x - x.mean(1, keepdims=True)
        x = normed(x + jax.nn.silu(normed(x, weights[0]) @ weights[2].T) @ weights[3].T, weights[1])
    return ((2 * x) ** 3).sum()


@scheme(
    reference=loss_of_direct_layers,
    mesh=MESH,
    inputs={"x": "b/dp_shard s d", **{leaf: f"{spec} dp_shard=I tp=I" for leaf, spec in LEAVES.items()}},
    outputs="dp_shard=I tp=I",
    options={"lists": (1, 2)},
    rank_options={"ends": tuple(ENDS), "has_path": (False, True)},
    nograd=("x",),
    draw=dict.fromkeys(("x", *LEAVES), values("normal")),
    dims={"b": (2,), "s": (4, 8), "d": (3, 4), "f": (4, 8), "l": (2,)},
    dtypes=("float64", "float32"),
    reduction=("b", "s", "d", "f"),
    roundings=10,
)
def direct_layers_of_sharded_sequences(mesh, x, norm, named_norm, up, down, lists, ends, has_path):
    """Linear layers of a block take and return their positions; the plan of one pair is passed by its import path.

    The model's output is written in place.
    """
    axes, leaves = mesh_axes(mesh.device_mesh), dict(zip(LEAVES, (norm, named_norm, up, down), strict=True))
    blocks = names_of_blocks(len(norm), lists)
    named = {
        f"{block}.{leaf}.weight": x[number].contiguous()
        for leaf, x in leaves.items()
        for number, block in enumerate(blocks)
    }
    is_imported = has_path and ends == "sharded" and lists == 2
    plan = f"{__name__}:imported_plan" if is_imported else plan_of_ends(ends, lists)

    def local_loss(*tensors):
        weights = dict(zip(named, tensors, strict=True))
        of_blocks = [[weights[f"{block}.{leaf}.weight"] for leaf in LEAVES] for block in blocks]
        net = DirectNet(of_blocks[: len(blocks) - lists + 1], of_blocks[len(blocks) - lists + 1 :])
        model = fsdp2_strategy_parallelize(net, mesh.device_mesh, MixedPrecisionPolicy(), plan, sequence_parallel=True)
        return model, [(model(x).mul_(2) ** 3).sum()]

    return reduced_loss(axes, named, local_loss)


class GatedHeads(nn.Module):
    """A layer of heads, each normed, and where it has a gate of each position, which every rank computes in full."""

    def __init__(self, up, heads_norm, down, gate):
        super().__init__()
        self.up, self.heads_norm, self.down = linear_layer(up), Norm(heads_norm), linear_layer(down)
        self.gate = None if gate is None else linear_layer(gate)

    def forward(self, x):
        heads = self.up(x).unflatten(-1, (-1, len(self.heads_norm.weight)))
        y = self.down(self.heads_norm(heads).flatten(-2))
        return y if self.gate is None else y * torch.sigmoid(self.gate(x))


class GatedNet(nn.Module):
    def __init__(self, norm, layer):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(OrderedDict(norm=Norm(norm), layer=layer))])

    def forward(self, x):
        return self.blocks[0](x)


def gated_heads(x, norm, up, heads_norm, down, gate, cotangent, weights, has_gate, mesh):
    def normed(x, weight):
        return x * weight / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPS)

    def forward(x, norm, up, heads_norm, down, gate):
        x = normed(x, norm[None, None])
        heads = normed(jnp.einsum("bsd,hpd->bshp", x, up), heads_norm[None, None, None])
        y = jnp.einsum("bshp,dhp->bsd", heads, down)
        return y * jax.nn.sigmoid(x @ gate.T) if has_gate else y

    # A sum over the ranks leaves each its positions, unless something beside it was computed in full.
    full, local = x.shape[1], x.shape[1] // mesh["tp"]
    positions = jnp.asarray([local, full, full if has_gate else local], x.dtype)
    return *differentiated(forward, (x, norm, up, heads_norm, down, gate), cotangent, weights), positions


GATED = {"norm": "d tp=I", "up": "h p d tp=I", "heads_norm": "p tp=I", "down": "d h p tp=I", "gate": "g d tp=I"}


@scheme(
    reference=gated_heads,
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "b s d tp=I", **GATED, "cotangent": "b s d tp=I", "weights": "n tp=I"},
    outputs=("b s d tp=I", "b s d tp=I", *GATED.values(), "k tp=I"),
    dims={"b": (2,), "s": (8,), "d": (3,), "h": (4,), "p": (2,), "g": (1,), "n": (3,), "k": (3,)},
    options={"has_gate": (True, False)},
    rank_options={"times": (1, 2), "is_planned": (True, False)},
    nograd=("x", *GATED, "cotangent", "weights"),
    draw=dict.fromkeys(("x", *GATED, "cotangent", "weights"), values("normal")),
    dtypes=("float64",),
    reduction=("b", "s", "d", "h", "p"),
    roundings=4,
)
def layer_of_all_positions(mesh, x, norm, up, heads_norm, down, gate, cotangent, weights, has_gate, times, is_planned):
    """A layer between shards of the sequence; positions that enter the norm and the layer, and those it sums.

    The plan names the gate as replicated, or not at all.
    """
    layer = GatedHeads(up.flatten(0, 1), heads_norm, down.flatten(1), gate if has_gate else None)
    net, leaves = GatedNet(norm, layer), {"up": "colwise", "heads_norm": "replicated_with_grad_allreduce"}
    leaves |= {"down": "rowwise"} | ({"gate": "replicate"} if has_gate and is_planned else {})
    plan = {f"blocks.0.layer.{leaf}": translate_to_torch_parallel_style(style) for leaf, style in leaves.items()}
    seen = {}
    for name, module in net.blocks[0].named_children():
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].shape[1]}))
    styles = validate_styles(net, plan, mesh.size("tp"), fsdp_size=1)
    changed, gathering = sequence_styles(net, styles)
    shard_modules(net, changed, mesh.device_mesh)
    shard_sequences(net, styles, gathering, mesh.device_mesh, changed)
    layer.down.register_forward_hook(lambda _, args, output: seen.update(sums=output.shape[1]))
    y, moved, of = accumulated(net, (x,), cotangent, weights, times)
    named = {"norm": norm, **{f"layer.{name}": each for name, each in (("up", up), ("heads_norm", heads_norm))}}
    named |= {"layer.down": down, "layer.gate": gate}
    gradients = (
        of.get(f"blocks.0.{name}.weight", torch.zeros_like(each)).view(each.shape) for name, each in named.items()
    )
    return y, *moved, *gradients, torch.tensor([*seen.values()], dtype=x.dtype)


@pytest.mark.parametrize(
    "declared",
    [step_of_sharded_sequences, direct_layers_of_sharded_sequences, layer_of_all_positions],
    ids=lambda x: x.name,
)
def test_parity(declared):
    check_cases(declared, 8)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("family", ["gpt2", "phi3", "cohere", "gemma2", "phi", "gpt_neox", "olmo2"])
def test_families_on_a_mesh(family):
    assert judged(configuration(family), {"dp_shard": 2, "tp": 2}, EVEN, sequence_parallel=True) == []


@pytest.mark.slow
def test_heads_of_keys_that_ranks_replicate():
    assert judged(configuration("qwen3", kv_heads=1), {"dp_shard": 1, "tp": 4}, EVEN, sequence_parallel=True) == []


def test_between_layers_a_rank_has_its_positions():
    def body(view, case):
        model = parallelized(sequence_parallel=True)(model_of(QWEN3), view.device_mesh)
        shapes = {}
        for name in ("model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm", "model.norm"):
            model.get_submodule(name).register_forward_hook(
                lambda module, args, output, name=name: shapes.update({name: tuple(output.shape)})
            )
        model(input_ids=torch.zeros(1, 8, dtype=torch.int64)).logits.sum().item()
        return list(shapes.values())

    ranks = run(body, CaseSpec("positions", {"dp_shard": 1, "tp": 2}, dtype="float64"))
    assert ranks.results == ([(1, 4, 12), (1, 4, 12), (1, 8, 12)],) * 2
    # The output of attention and mlp of both layers; only the lookup of the embedding is summed in full.
    ops = [row.op for row in ranks.ledger.of(0) if row.op in ("all_reduce", "reduce_scatter")]
    assert (ops.count("reduce_scatter"), ops.count("all_reduce")) == (4, 1)


@pytest.mark.parametrize("has_gate", [True, False])
def test_gradients_of_a_gathered_sequence_are_summed_and_scattered_at_once(has_gate):
    """Unless a part of the layer is computed in full, whose gradient is the same on each rank."""
    report = verify_case(layer_of_all_positions, layer_of_all_positions.case(tp=2, has_gate=has_gate, times=1))
    ops = [row.op for row in report.ledger.of(0) if row.phase == "bwd"]
    assert ops.count("reduce_scatter") == (0 if has_gate else 1)
    assert ops.count("all_reduce") == (3 if has_gate else 2)  # of norms, and of the full input


@pytest.mark.slow
def test_a_norm_whose_positions_are_not_summed_is_reported(monkeypatch):
    from torch_impl.parallelizer import sequence_parallel
    from torch_impl.parallelizer.tp_styles import Replicated

    monkeypatch.setattr(sequence_parallel, "ReplicatedOnShards", Replicated)
    sentences = judged(configuration("llama"), {"dp_shard": 1, "tp": 2}, EVEN, sequence_parallel=True)
    assert "gradients: model.layers.0.input_layernorm.weight misses a sum over tp" in sentences


def test_a_length_that_tp_does_not_divide():
    def body(view, case):
        model = parallelized(sequence_parallel=True)(model_of(QWEN3), view.device_mesh)
        with pytest.raises(ValueError, match=r"a sequence of 5 positions does not divide by tp=2; pad to 6"):
            model.model.layers[0](torch.zeros(1, 5, 12, dtype=torch.float64))

    run(body, CaseSpec("odd", {"dp_shard": 1, "tp": 2}, dtype="float64"))


@pytest.mark.parametrize("switches", [{}, {"enable_async_tensor_parallel": True}], ids=str)
def test_a_length_that_tp_does_not_divide_is_rejected_before_anything_is_sent(switches):
    """By the model itself, on every rank, of ids by name or by position, and of embeddings."""

    def body(view, case):
        model = parallelized(sequence_parallel=True, **switches)(model_of(QWEN3), view.device_mesh)
        ids = torch.zeros(1, 5, dtype=torch.int64)
        for call in (
            lambda: model(input_ids=ids),
            lambda: model(ids),
            lambda: model(inputs_embeds=torch.zeros(1, 5, 12, dtype=torch.float64)),
        ):
            with pytest.raises(ValueError, match="a sequence of 5 positions does not divide by tp=2; pad to 6"):
                call()

    ranks = run(body, CaseSpec("odd", {"dp_shard": 2, "tp": 2}, dtype="float64"))
    assert {row.op for row in ranks.ledger.rows} <= {"broadcast", "scatter"}  # of the construction alone


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (lambda: nn.ModuleDict({"up": nn.Linear(2, 2)}), {"up": "colwise"}, "ModuleDict has no list of blocks"),
        (
            lambda: nn.ModuleDict({"h": nn.ModuleList([Scaled()])}),
            {"h.0.up": "colwise"},
            "'h.0' has the parameter 'scale' of its own",
        ),
        (
            lambda: nn.ModuleDict({"h": nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])}),
            {"h.0.0": "packed_colwise"},
            "'h.0.0' of a block is PackedColwise, which takes the full sequence",
        ),
    ],
)
def test_blocks_that_cannot_have_shards(model, plan, message):
    def body(view, case):
        styles = {key: translate_to_torch_parallel_style(name) for key, name in plan.items()}
        with pytest.raises(ValueError, match=f"sequence_parallel=True: {message}"):
            fsdp2_strategy_parallelize(model(), view.device_mesh, tp_shard_plan=styles, sequence_parallel=True)

    ranks = run(body, CaseSpec("rejected", {"dp_shard": 1, "tp": 2}))
    assert ranks.ledger.rows == []
