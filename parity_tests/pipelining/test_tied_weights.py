"""Parity of tied and untied models, split into stages, with the decoder in JAX; for every schedule."""

import pytest
import torch
from hypothesis import given, settings

from jax_ref.parallelizer import from_state_dict, mean_loss
from parity_tests.parallelizer.families import Chosen, model_of
from parity_tests.parallelizer.steps import dims, specs
from parity_tests.pipelining.staged_loss import staged_loss
from parity_tests.pipelining.unsplit_models import ROWS, loss_of, tokens
from shardproof import CaseSpec, check, every_case, ids, scheme, token_below, values
from shardproof.declare.declared import flat
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.schedule import build_pipeline_schedule
from torch_impl.pipelining.split import split_model_into_stages

LAYERS = (("num_hidden_layers", 4),)
TIED, UNTIED = Chosen("qwen3", True, LAYERS), Chosen("llama", False, LAYERS)


def loss_by(chosen):
    def loss(parameters, token, target):
        return mean_loss(from_state_dict(chosen.config, flat(parameters))(token), target)

    return loss


def declared(chosen):
    """Each of the four rows is a micro-batch, replicated on all ranks. A rank has its stages' part of the gradient."""
    tree = typed(specs(chosen, ("pp",)))
    return {
        "reference": loss_by(chosen),
        "mesh": {"pp": (1, 2)},
        "inputs": {"parameters": tree, "token": "b s", "target": "b s"},
        "outputs": "pp=P",
        "draw": {
            **{f"parameters.{path}": values("normal") for path in flat(tree)},
            "token": token_below("v"),
            "target": ids("v", ignore=-100),
        },
        "dims": {**dims(chosen), "b": (4,), "s": (5,)},
        "dtypes": ("float64", "float32"),
        "reduction": ("s", "d"),
        "rank_options": {"schedule": tuple(RULES), "has_seq_len": (True, False)},
        "roundings": 40,
    }


def typed(tree):
    return {name: leaf.replace("pp=I", "pp=R") if isinstance(leaf, str) else typed(leaf) for name, leaf in tree.items()}


@scheme(**declared(TIED))
def tied_model_in_stages(mesh, parameters, token, target, schedule, has_seq_len):
    return staged_loss(mesh, TIED, parameters, token, target, schedule, has_seq_len)


@scheme(**declared(UNTIED))
def model_in_stages(mesh, parameters, token, target, schedule, has_seq_len):
    return staged_loss(mesh, UNTIED, parameters, token, target, schedule, has_seq_len)


@pytest.mark.parametrize("tested", [tied_model_in_stages, model_in_stages], ids=lambda tested: tested.name)
def test_parity(tested):
    @settings(max_examples=few(4))
    @given(every_case(tested))
    def checked(case):
        check(case)

    checked()


def copies(mesh, case):
    """Both copies' gradients after each step, on whichever rank has them."""
    stages, _ = split_model_into_stages(
        model_of(TIED, torch.float32), mesh.device_mesh, "pp", case.name, torch.device("cpu")
    )
    schedule = build_pipeline_schedule(None, case.name, ROWS, 4 * ROWS, stages, loss_of)
    (tie,) = stages[0].tied_copies
    local_stages, gradients = {stage.stage_index: stage for stage in stages}, []
    ids_of, targets = tokens(TIED, 4)
    for _ in range(2):
        schedule.step(
            *([ids_of] if 0 in local_stages else []),
            **({"target": targets} if stages[0].num_stages - 1 in local_stages else {}),
        )
        local = [local_stages[stage].submod.get_parameter(name) for stage, name in tie if stage in local_stages]
        gradients.append([parameter.grad.numpy().tobytes() for parameter in local])
        for parameter in local:
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
    return gradients, [parameter.detach().numpy().tobytes() for parameter in local], tie


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("name", ["GPipe", "ZBVZeroBubble"])
def test_both_copies_have_the_same_bits(name):
    ranks = run(copies, CaseSpec("ties", {"pp": 2}, options={"name": name}))
    last = 1 if name == "GPipe" else 3
    for rank_copies in ranks.results:
        assert tuple(rank_copies[2]) == ((0, "model.embed_tokens.weight"), (last, "lm_head.weight"))
    for step in range(2):
        assert len({bits for rank_copies in ranks.results for bits in rank_copies[0][step]}) == 1
    assert len({bits for rank_copies in ranks.results for bits in rank_copies[1]}) == 1


def test_copies_on_one_rank_have_their_own_memory():
    """An optimizer steps both: in shared memory it would step one weight twice."""

    def body(mesh, case):
        device = torch.device("cpu")
        stages, _ = split_model_into_stages(model_of(TIED), mesh.device_mesh, "pp", "ZBVZeroBubble", device)
        local_stages = {stage.stage_index: stage.submod for stage in stages}
        (tie,) = stages[0].tied_copies
        local = [local_stages[stage].get_parameter(name) for stage, name in tie if stage in local_stages]
        return len(local), len({parameter.data_ptr() for parameter in local})

    assert run(body, CaseSpec("ties", {"pp": 2})).results == ((2, 2), (0, 0))


def test_a_step_without_backward_sums_nothing():
    def body(mesh, case):
        stages, _ = split_model_into_stages(
            model_of(TIED, torch.float32), mesh.device_mesh, "pp", "GPipe", torch.device("cpu")
        )
        schedule = build_pipeline_schedule(None, "GPipe", ROWS, ROWS, stages, loss_of)
        ids_of, targets = tokens(TIED, 1)
        schedule.eval(*([ids_of] if mesh.rank("pp") == 0 else []), target=targets)
        return [name for stage in stages for name, p in stage.submod.named_parameters() if p.grad is not None]

    assert run(body, CaseSpec("ties", {"pp": 2})).results == ([], [])
