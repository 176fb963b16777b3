"""The dry run against what a run does: shapes and bytes that ranks hold, collectives that they issue."""

from collections import Counter

import pytest
import torch
from torch import nn

from parity_tests import CaseSpec
from parity_tests.harness.engines.run import run
from parity_tests.parallelizer.families import OWN, Chosen, batch, empty, made
from parity_tests.parallelizer.parallelized import parallelized
from parity_tests.parallelizer.training import accumulated
from torch_impl.parallelizer.dry_run import dry_run
from torch_impl.parallelizer.tp_styles import translate_to_torch_parallel_style

MESHES = [
    {"dp_shard": 2},
    {"tp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 1},
    {"data_parallel": 1, "context_parallel": 2, "tensor_parallel": 2},
]


RUNS = [("llama", mesh) for mesh in MESHES] + [
    (family, {"dp_shard": 2, "tp": 2}) for family in OWN if family != "llama"
]


@pytest.mark.parametrize(("family", "mesh"), RUNS, ids=str)
def test_it_says_what_a_run_does(family, mesh):
    chosen, dtype = Chosen(family, tied=family in ("qwen3", "gemma")), torch.float64
    if family == "llama":
        dtype = torch.float32  # which is computed with in bfloat16
    data = 1
    for axis, size in mesh.items():
        data *= 1 if axis in ("tp", "tensor_parallel") else size

    def body(view, case):
        model = parallelized()(made(chosen, dtype), view.device_mesh)
        torch.distributed.barrier()
        accumulated(model, *batch(chosen, 2 * data, 5), view.device_mesh.get_rank() % data, data, 1)
        return {name: (tuple(p.to_local().shape), p.to_local().nbytes) for name, p in model.named_parameters()}

    ranks = run(body, CaseSpec(scheme="dry", mesh=mesh, dtype="float64"))
    rows = [row for row in ranks.ledger.rows if row.rank == 0]
    rows = rows[1 + max(i for i, row in enumerate(rows) if row.op == "barrier") :]
    calls, sizes = Counter(), Counter()
    for row in rows:
        calls[row.phase, row.op] += 1
        sizes[row.phase, row.op] += row.bytes_in
    said = dry_run(empty(chosen, dtype, "meta"), mesh, tokens=10)
    promised = Counter(), Counter()
    for each in said.sent:
        key = {"forward": "fwd", "backward": "bwd"}[each.phase], each.op
        promised[0][key] += each.calls
        promised[1][key] += each.bytes_in
    assert promised == (calls, sizes)
    held = ranks.results[0]
    assert {each.local_shape for each in said.parameters} == {shape for shape, _ in held.values()}
    assert said.bytes_held == sum(size for _, size in held.values())
    assert (said.unmatched, said.unknown) == ((), ())


def test_a_large_model_on_a_mesh_that_is_not_there():
    more = (("num_hidden_layers", 80), ("hidden_size", 8192), ("intermediate_size", 28672), ("vocab_size", 128256),
            ("num_attention_heads", 64), ("num_key_value_heads", 8), ("head_dim", 128))  # fmt: skip
    said = dry_run(empty(Chosen("llama", further=more), torch.bfloat16, "meta"), {"dp_shard": 64, "tp": 8})
    shards = {each.name: each.local_shape for each in said.parameters}
    assert shards["model.layers.*.mlp.down_proj.weight"] == (8192 // 64, 28672 // 8)
    assert str(said).splitlines()[0].startswith("dp_shard=64 tp=8: 512 ranks; ")
    assert said.bytes_whole // 512 <= said.bytes_held < said.bytes_whole // 400


def test_keys_that_match_nothing_are_said():
    model = empty(Chosen("qwen3"), device="meta")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.experts": "replicate"}
    said = dry_run(model, {"tp": 2})
    assert said.unmatched == ("model.layers.*.mlp.experts",)
    assert "plan key 'model.layers.*.mlp.experts' matches nothing in this model" in str(said)


def test_a_style_whose_traffic_is_not_known():
    model = nn.Sequential(nn.Linear(4, 4))
    said = dry_run(model, {"tp": 2}, {"0": translate_to_torch_parallel_style("packed_colwise")})
    assert said.unknown == ("0",) and said.sent == ()


@pytest.mark.parametrize(
    ("mesh", "tokens", "said"),
    [
        ({"dp": 2}, 1, "device_mesh: axis 'dp' of"),
        ({"dp_shard": 0}, 1, "dry_run: dp_shard=0 is not a size; it is 1 or more"),
        ({"dp_shard": 1}, 0, "dry_run: tokens=0 is not a size"),
        ({"tp": 4}, 1, "num_key_value_heads=2 does not divide by tp=4"),
    ],
)
def test_what_would_be_refused(mesh, tokens, said):
    with pytest.raises(ValueError, match=said):
        dry_run(empty(Chosen("llama"), device="meta"), mesh, tokens=tokens)
