"""Hybrids of attention with gated delta or Mamba layers: gradients on meshes of dp, tp, ep and cp are one process's."""

from dataclasses import dataclass
from functools import partial

import pytest
from transformers.models.qwen3_next import modeling_qwen3_next

from parity_tests.mamba.test_qwen3_next import convolution_over_cp, rule_over_cp
from parity_tests.parallelizer import configurations
from parity_tests.parallelizer.context_steps import LENGTH, alone, over_cp
from parity_tests.parallelizer.families import HYBRIDS, Chosen, model_of
from parity_tests.parallelizer.training import broken, broken_on_ranks, parallelized
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.context_parallel import adapt_model_to_context
from torch_impl.parallelizer import get_hf_tp_shard_plan

SEQUENCES = {"sequence_parallel": True}
RINGS = {**SEQUENCES, "enable_async_tensor_parallel": True}


@dataclass(frozen=True)
class Setting:
    family: str
    mesh: tuple[tuple[str, int], ...]
    switches: tuple[tuple[str, bool], ...] = ()


def setting(family, mesh, switches=()):
    return Setting(family, tuple(mesh.items()), tuple(dict(switches).items()))


OF_EACH = [
    ({"dp_shard": 2}, {}),
    ({"tp": 2}, {}),
    ({"dp_shard": 2, "tp": 2}, SEQUENCES),
    ({"dp_shard": 1, "tp": 2}, RINGS),
]
SETTINGS = [
    *(setting(family, mesh, switches) for family in HYBRIDS for mesh, switches in OF_EACH),
    *(setting(f, {"dp_shard": 1, "ep": 2, "tp": 2}) for f in ("qwen3_next", "qwen3_5_moe_text")),
    *(
        setting(f, {"dp_shard": 1, "ep": 2}, {"activation_checkpointing": True})
        for f in ("qwen3_next", "qwen3_5_moe_text")
    ),
]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_one_step_matches_one_process(chosen):
    assert configurations.judged(Chosen(chosen.family), dict(chosen.mesh), LENGTH, **dict(chosen.switches)) == []


def test_the_layers_of_nemotron_are_sharded():
    """transformers' plan has the experts alone."""

    def body(view, case):
        model = parallelized()(model_of(Chosen("nemotron_h")), view.device_mesh)
        over_tp = {name: p for name, p in model.named_parameters() if "tp" in p.device_mesh.mesh_dim_names}
        return {name for name, p in over_tp.items() if p.placements[-1].is_shard()}

    (sharded, _) = run(body, CaseSpec("nemotron", {"dp_shard": 1, "tp": 2}, dtype="float64")).results
    mixers = {
        1: ("experts.up_proj", "shared_experts.down_proj.weight"),
        2: ("q_proj.weight", "o_proj.weight"),
        3: ("up_proj.weight",),
    }
    wanted = {f"model.layers.{layer}.mixer.{leaf}" for layer, leaves in mixers.items() for leaf in leaves}
    assert wanted <= sharded and not any(name.startswith("model.layers.0.mixer") for name in sharded)
    assert "layers.*.mixer.q_proj" in str(get_hf_tp_shard_plan(model_of(Chosen("nemotron_h"))))


QWEN3_NEXT = Chosen("qwen3_next")
OF_THE_MODEL = ("use_cache", "output_router_logits")


def own_options(function):
    """The function without the keywords that the model passes on beside the caller's."""

    def call(*args, **options):
        return function(*args, **{name: x for name, x in options.items() if name not in OF_THE_MODEL})

    return call


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    "mesh",
    [{"dp_shard": 1, "cp": 2, "tp": 1}, {"dp_shard": 1, "cp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2, "tp": 1}],
    ids=str,
)
def test_qwen3_next_over_cp(mesh, monkeypatch):
    """Attention in the context, delta layers by our functions."""
    rule = partial(rule_over_cp, chunk_size=4)
    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", own_options(convolution_over_cp))
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", own_options(rule))

    def body(view, case):
        return over_cp(view, QWEN3_NEXT, adapt_model_to_context)

    ranks = run(body, CaseSpec("cp", mesh, dtype="float64")).results
    monkeypatch.undo()
    want = alone(QWEN3_NEXT)
    assert broken_on_ranks(ranks, want, mesh) == []
    assert broken(ranks[0], {**want, "lm_head.weight": 2 * want["lm_head.weight"]})  # a factor would show
