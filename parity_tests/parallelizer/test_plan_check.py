"""Plans that are not refused though they leave something out; those that are stand in test_tp_plan."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from parity_tests import CaseSpec
from parity_tests.harness.run.engines import run
from parity_tests.parallelizer.families import Chosen, batch, made
from parity_tests.parallelizer.float64 import Float64Throughout
from parity_tests.parallelizer.promise import PROMISED, broken_on_ranks, deviation
from parity_tests.parallelizer.reference import reference
from parity_tests.parallelizer.small_net import NAMES, Net
from parity_tests.parallelizer.test_tp_plan import on_ranks, trained
from torch_impl.parallelizer import fsdp2_strategy_parallelize, to_cpu, translate_to_torch_parallel_style
from torch_impl.parallelizer.tp_plan import apply_plan, check_plan

ALONE = [{"q_proj": "colwise_gather_output"}, {"k_proj": "colwise_gather_output", "o_proj": "rowwise_split_input"}]


@pytest.mark.parametrize("styles", ALONE, ids=str)
def test_part_of_attention_may_be_cut_where_each_rank_has_all_heads(styles):
    chosen = Chosen("llama")
    ids, targets = batch(chosen, 3, 5)
    (want,) = reference(chosen, [(ids, targets)]).steps

    def body(mesh, case):
        with Float64Throughout():
            model = made(chosen)
            plan = {
                f"model.layers.*.self_attn.{leaf}": translate_to_torch_parallel_style(style)
                for leaf, style in styles.items()
            }
            check_plan(model, plan, mesh.device_mesh)
            apply_plan(model, plan, mesh.device_mesh)
            return trained(model, torch.from_numpy(ids), torch.from_numpy(targets), 1)

    ranks = on_ranks(body).results
    assert max(deviation(logits, want.logits) for _, logits, _ in ranks) <= PROMISED
    assert broken_on_ranks([found for _, _, found in ranks], want.gradients, {"tp": 2}) == []


@pytest.mark.parametrize("plan", [None, {}])
def test_one_rank_of_tp_needs_no_plan(plan):
    def body(mesh, case):
        net = Net().double()
        before = [p.detach().clone() for p in net.parameters()]
        check_plan(net, plan, mesh.device_mesh["tp"])
        net = fsdp2_strategy_parallelize(net, mesh.device_mesh, None, plan)
        assert all(to_cpu(p).equal(x) for p, x in zip(net.parameters(), before, strict=True))
        return [p.placements for p in net.parameters() if isinstance(p, DTensor)]

    assert run(body, CaseSpec("tp_plan", {"dp_shard": 1, "tp": 1})).results == ([(Shard(0),)] * len(NAMES),)
