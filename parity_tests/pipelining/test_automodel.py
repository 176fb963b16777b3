"""Automodel's AutoPipeline: gradients of a model of transformers, another length, and calls before `build`."""

import pytest
import torch

from parity_tests.pipelining.unsplit_models import LENGTH, ROWS, accumulated, chosen, loss_of, tokens
from parity_tests.rejections import rejected
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.pipelining.adapters.automodel import AutoPipeline

families = pytest.importorskip("parity_tests.parallelizer.families", reason="needs transformers")

OF, N = chosen("llama", False, 4), 4


def pipeline_of(mesh, **options):
    sizes = {"pp_microbatch_size": ROWS, "pp_batch_size": N * ROWS, "dtype": torch.float64}
    return AutoPipeline(mesh.device_mesh, dp_axis_names=(), device=torch.device("cpu"), **sizes, **options)


def stepped(mesh, case):
    """The gradients of one step in bits, the losses, and the parameters of this rank's parts, counted."""
    pipeline = pipeline_of(mesh, **case.options).build(families.model_of(OF, torch.float64), loss_fn=loss_of)
    if case.options.get("pp_seq_len", LENGTH) != LENGTH:
        pipeline.update_seq_len(LENGTH)
    ids, targets = tokens(OF, N)
    losses = []
    pipeline.step(ids, **({"target": targets, "losses": losses} if pipeline.info.has_last_stage else {}))
    named = {name: parameter for part in pipeline.parts for name, parameter in part.named_parameters()}
    assert pipeline.get_total_param_count() == sum(parameter.numel() for parameter in named.values())
    assert all("model" in names for names in pipeline.list_stage_modules())
    return {name: parameter.grad.numpy().tobytes() for name, parameter in named.items()}, len(losses)


@pytest.mark.fast_values(2)
@pytest.mark.parametrize(
    "options",
    [
        {"pp_schedule": "interleaved1f1b"},
        {"pp_schedule": "interleaved1f1b", "pp_seq_len": 2 * LENGTH},
        {"pp_schedule": "1f1b", "layers_per_stage": 3, "round_virtual_stages_to_pp_multiple": "up"},
        {"pp_schedule": "gpipe", "layers_per_stage": 2, "pp_seq_len": LENGTH},
    ],
)
def test_gradients_match_the_full_model(options):
    ranks = run(stepped, CaseSpec("automodel", {"pp": 2}, options=options))
    gradients = {name: bits for of_rank, _ in ranks.results for name, bits in of_rank.items()}
    assert gradients == accumulated(OF, N, "float64", range(N))[1]
    assert [losses for _, losses in ranks.results] == [0, N]


test_rejection = rejected(
    {"pp": 1},
    [
        (
            "a step before build",
            lambda mesh: pipeline_of(mesh).step(torch.zeros(1, 1)),
            "AutoPipeline: there is no pipeline yet; call build(model, loss_fn=...) first",
        ),
        (
            "a length before build",
            lambda mesh: pipeline_of(mesh).update_seq_len(3),
            "AutoPipeline: there is no pipeline yet; call build(model, loss_fn=...) first",
        ),
        (
            "parts before build",
            lambda mesh: pipeline_of(mesh).parts,
            "AutoPipeline: there is no pipeline yet; call build(model, loss_fn=...) first",
        ),
    ],
)
