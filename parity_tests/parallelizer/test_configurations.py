"""Families of transformers on meshes: gradients of three micro-batches and clipping equal one process's.

Here each configuration is on one mesh, in turn; `python -m parity_tests.parallelizer.configurations` runs all of them
on every mesh.
"""

import pytest
from torch.distributed.tensor import Replicate, Shard

from parity_tests.parallelizer.configurations import MAX_NORM, MESHES, WIDE_TP, alone, cases, configuration, judged
from torch_impl.parallelizer.head_styles import Conv1DPackedColwise, ReplicatedHeads

EVERY = cases()
# Families with a plan of ours, or heads that ranks replicate, on each of their meshes; of the others one mesh each.
OURS = [case for case in EVERY if case[0].family in ("gpt2", "apertus", "doge") or case[2] == WIDE_TP]
OTHERS = [case for case in EVERY if case not in OURS]
VIEWS = [
    case for case in OTHERS if (case[0].family, case[1]) == ("phi", "hsdp")
]  # which the model returns without tp too
IN_TURN = [OTHERS[start + n % len(MESHES)] for n, start in enumerate(range(0, len(OTHERS), len(MESHES)))]


def label(case):
    return "-".join([case[0].family, "tied" * case[0].tied, case[1]])


def test_every_configuration_is_on_every_mesh():
    on_all = {chosen for chosen, _, mesh in EVERY if mesh != WIDE_TP}
    assert len(on_all) >= 27 and len(EVERY) >= 27 * len(MESHES)
    assert all((chosen, name, mesh) in EVERY for chosen in on_all for name, mesh in MESHES.items())
    assert {chosen for chosen, *_ in OURS + VIEWS + IN_TURN} == {chosen for chosen, *_ in EVERY}


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("case", OURS + VIEWS + IN_TURN, ids=label)
def test_one_step_matches_one_process(case):
    chosen, _, mesh = case
    assert judged(chosen, mesh) == []
    assert alone(chosen).norm > MAX_NORM


def test_a_third_of_another_rank_is_reported(monkeypatch):
    """q, k and v of GPT-2 sharded as one weight: the mistake of a plan that calls its projection column-wise."""
    as_one = {"weight": Shard(1), "bias": Replicate()}
    monkeypatch.setattr(Conv1DPackedColwise, "placements", lambda self, module: as_one)
    assert judged(configuration("gpt2"), {"tp": 2})


@pytest.mark.slow
def test_heads_whose_replicas_are_not_summed_are_reported(monkeypatch):
    monkeypatch.setattr(
        ReplicatedHeads,
        "local_parameter",
        lambda self, name, p: p.to_local().chunk(self.heads)[
            p.device_mesh.get_local_rank() * self.heads // p.device_mesh.size()
        ],
    )
    sentences = judged(configuration("llama", kv_heads=1), WIDE_TP)
    assert "gradients: model.layers.0.self_attn.k_proj.weight misses a sum over tp" in sentences
    assert not [each for each in sentences if each.startswith("loss")]
