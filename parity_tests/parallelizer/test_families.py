"""Every family on every kind of mesh: losses, every gradient, and the weights after three steps of AdamW.

The bound is the one that is promised, for float64; see promise.py.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import CPUOffloadPolicy

from parity_tests.parallelizer.families import OWN, Chosen
from parity_tests.parallelizer.reference import reference
from parity_tests.parallelizer.training import Training, on_mesh, parallelized, verdict
from parity_tests.slow import slow_but
from shardproof.draw.profiles import few
from torch_impl.parallelizer import fsdp2_strategy_parallelize, get_hf_tp_shard_plan

MESHES = [
    {"dp_shard": 1},
    {"dp_shard": 2},
    {"tp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 3},
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 1},
    {"dp_shard": 1, "cp": 2, "tp": 2},
    {"data_parallel": 2, "context_parallel": 1, "tensor_parallel": 2},
    {"data_parallel": 2, "context_parallel": 2},
    {"tp": 2, "cp": 2, "dp_shard": 1},
]
SWITCHES = [{}, {"activation_checkpointing": True}, {"offload_policy": CPUOffloadPolicy()}]


@st.composite
def runs(draw, family):
    """Meshes first, then the models trained on each."""
    mesh, tied = draw(st.sampled_from(MESHES)), draw(st.booleans())
    ranks = [size for axis, size in mesh.items() if axis not in ("tp", "tensor_parallel")]
    limit = 12 // int(torch.tensor(ranks or [1]).prod())
    accumulation = draw(st.sampled_from([n for n in (1, 2, 3) if limit % n == 0]))
    return mesh, Training(Chosen(family, tied), accumulation), draw(st.sampled_from(SWITCHES))


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["llama", "gemma"], OWN))
def test_three_steps_match_the_reference(family):
    @settings(max_examples=few(5))
    @given(runs(family))
    def example(settings):
        mesh, training, switches = settings
        ranks, _ = on_mesh(mesh, training, parallelized(**switches))
        assert verdict(mesh, training, ranks, reference(training.chosen, training.batches)) == []

    example()


@pytest.mark.slow
@pytest.mark.parametrize("tied", slow_but([True], [False, True]))
def test_three_steps_on_processes(tied):
    mesh, training = {"dp_shard": 2, "tp": 2}, Training(Chosen("qwen3", tied), accumulation=2)
    ranks, _ = on_mesh(mesh, training, parallelized(activation_checkpointing=tied), "gloo")
    assert verdict(mesh, training, ranks, reference(training.chosen, training.batches)) == []


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_heads_of_one_rank_are_fewer_than_groups(family):
    """Four ranks of tp with four KV heads; the vocabulary of 31 leaves the last rank a shorter part."""
    training = Training(Chosen(family, True, (("num_key_value_heads", 4), ("num_hidden_layers", 1))), steps=2)
    ranks, _ = on_mesh({"tp": 4}, training, parallelized())
    assert verdict({"tp": 4}, training, ranks, reference(training.chosen, training.batches)) == []


@pytest.mark.slow
@pytest.mark.parametrize("padding", [3, 37])
def test_the_lookup_of_padding_has_no_gradient(padding):
    """One id of either rank's vocabulary; the other rank has another id at the same place."""
    training, mesh = Training(Chosen("gemma", changes=(("pad_token_id", padding),)), steps=1), {"dp_shard": 1, "tp": 2}
    ranks, _ = on_mesh(mesh, training, parallelized())
    assert (training.batches[0][0] == 3).any() and (training.batches[0][0] == 37).any()
    assert verdict(mesh, training, ranks, reference(training.chosen, training.batches)) == []


@pytest.mark.slow
def test_a_sum_that_is_missing_is_reported():
    """Without the norms of heads in the plan, losses are right and one gradient has the rank's own heads only."""

    def parallelize(model, device_mesh):
        plan = {key: style for key, style in get_hf_tp_shard_plan(model).items() if not key.endswith("_norm")}
        return fsdp2_strategy_parallelize(model, device_mesh, tp_shard_plan=plan)

    training, mesh = Training(Chosen("qwen3"), steps=1), {"dp_shard": 1, "tp": 2}
    with pytest.warns(UserWarning, match=r"self_attn.q_norm' is not in the plan while .* shards the heads before it"):
        ranks, _ = on_mesh(mesh, training, parallelize)
    sentences = verdict(mesh, training, ranks, reference(training.chosen, training.batches))
    assert "gradient: model.layers.0.self_attn.q_norm.weight misses a sum over tp" in sentences
    assert not [each for each in sentences if each.startswith("loss")]
