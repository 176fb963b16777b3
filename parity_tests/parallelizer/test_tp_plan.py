"""Whole models under their own tensor-parallel plan, every parameter's gradient; what a plan is refused for."""


import pytest
import torch

from parity_tests import CaseSpec
from parity_tests.harness.engines.run import run
from parity_tests.parallelizer.families import IGNORED, OWN, Chosen, batch, made
from parity_tests.parallelizer.float64 import Float64Throughout
from parity_tests.parallelizer.promise import PROMISED, broken_on_ranks, deviation
from parity_tests.parallelizer.reference import reference
from parity_tests.parallelizer.whole_model import summed_loss
from torch_impl.parallelizer import get_hf_tp_shard_plan, to_cpu
from torch_impl.parallelizer.tp_plan import apply_plan, check_plan

FOUR_KV_HEADS = (("num_key_value_heads", 4),)
MODELS = [Chosen(family, tied) for family in OWN for tied in (False, True)]


def gradients(mesh, case):
    """Loss, logits and the gradient of every parameter, in `times` backwards of some rows each."""
    chosen, ids, targets = case.options["model"], *map(torch.from_numpy, case.options["batch"])
    with Float64Throughout():
        model = made(chosen)
        plan = get_hf_tp_shard_plan(model)
        check_plan(model, plan, mesh.device_mesh)
        apply_plan(model, plan, mesh.device_mesh)
        count, loss, logits = int((targets != IGNORED).sum()), 0.0, []
        for rows, wanted in zip(ids.chunk(case.times), targets.chunk(case.times), strict=True):
            logits.append(model(input_ids=rows).logits)
            part = summed_loss(logits[-1], wanted) / count
            part.backward()
            loss += part.item()
    named = dict(model.named_parameters(remove_duplicate=False))
    found = {name: to_cpu(parameter.grad).numpy() for name, parameter in named.items()}
    return loss, torch.cat(logits).detach().numpy(), found


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("chosen", MODELS, ids=str)
def test_every_gradient_is_that_of_the_whole_model(chosen, tp):
    """Vocabularies of 31 and 67 do not divide, 24 columns do; four ranks need as many KV heads."""
    chosen = Chosen(chosen.family, chosen.tied, FOUR_KV_HEADS) if tp == 4 else chosen
    given = batch(chosen, 3, 5)
    (want,) = reference(chosen, [given]).steps
    case = CaseSpec(scheme="tp", mesh={"tp": tp}, options={"times": {1: 1, 2: 3, 4: 3}[tp]})
    vars(case)["options"] = {**case.options, "model": chosen, "batch": given}
    ranks = run(gradients, case).results
    assert max(deviation(loss, want.loss) for loss, _, _ in ranks) <= PROMISED
    assert max(deviation(logits, want.logits) for _, logits, _ in ranks) <= PROMISED
    assert broken_on_ranks([found for _, _, found in ranks], want.gradients, case.mesh) == []
