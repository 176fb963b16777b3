"""Sequence parallelism inside blocks: gradients are those without it, between layers a rank has its positions alone."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from jax_ref.parallelizer import from_state_dict
from jax_ref.parallelizer import mean_loss as reference_loss
from parity_tests.harness.declare.declared import flat
from parity_tests.harness.run.engines import run
from parity_tests.parallelizer.configurations import configuration, judged
from parity_tests.parallelizer.families import Chosen, model_of
from parity_tests.parallelizer.steps import dims, mean_loss, specs
from parity_tests.parallelizer.training import parallelized
from shardproof import CaseSpec, check_cases, ids, scheme, token_below, values
from torch_impl.parallelizer import fsdp2_strategy_parallelize, translate_to_torch_parallel_style

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
    rank_options={"microbatches": (1, 2), "recomputed": (False, True)},
    draw={f"parameters.{path}": values("normal") for path in flat(TREE)}
    | {"token": token_below("v"), "target": ids("v", ignore=-100)},
    dims={**dims(QWEN3), "b": (4,), "s": (4, 8)},
    dtypes=("float64",),
    reduction=("s", "d"),
)
def step_of_sharded_sequences(mesh, parameters, token, target, microbatches, recomputed):
    parallelize = parallelized(MixedPrecisionPolicy(), sequence_parallel=True, activation_checkpointing=recomputed)
    return mean_loss(mesh, QWEN3, parameters, token, target, parallelize, microbatches)


def test_parity():
    check_cases(step_of_sharded_sequences, 8)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "cohere", "gemma2", "phi", "gpt_neox", "olmo2"])
def test_families_on_a_mesh(family):
    assert judged(configuration(family), {"dp_shard": 2, "tp": 2}, EVEN, sequence_parallel=True) == []


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
