"""Every name of the page is there, with its parameters in their order and their defaults."""

import inspect
import logging

import pytest

from torch_impl.pipelining import functional

PAGE = {
    "scale_grads_by_divisor": "stages, divisor",
    "stage_ids_this_rank": "pp_rank, pp_size, num_stages, style='loop'",
    "generate_hf_model_fqn_per_model_part": "num_stages, num_layers, include_embeddings=True, include_lm_head=True, "
    "include_rotary_emb=True, include_multimodal_encoders=True, extra_module_fqns=None, fqn_prefix='model.', "
    "lm_head_fqn='lm_head'",
    "calculate_virtual_stages": "num_layers, layers_per_stage, pp_size, is_single_stage_schedule, "
    "round_to_pp_multiple=None",
    "_get_hidden_and_vocab_size": "config",
    "_precompute_stage_shapes": "stages, model_config, microbatch_size, seq_len",
    "reset_pp_stage_shapes": "schedule, stages, model_config, microbatch_size, seq_len",
    "split_model_into_stages": "model, pp_mesh, pp_axis_name, pp_schedule, device, module_names_per_stage=None, "
    "layers_per_stage=None, patch_inner_model=True, patch_causal_lm_model=True, round_to_pp_multiple=None",
    "build_pipeline_schedule": "pipeline_parallel_schedule_csv, pipeline_parallel_schedule, microbatch_size, "
    "local_batch_size, stages, loss_fn, scale_grads=False",
}


def written(parameter):
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
    return f"{parameter.name}{default}"


@pytest.mark.parametrize("name", list(PAGE))
def test_a_function_matches_the_page(name):
    parameters = inspect.signature(getattr(functional, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ", ".join(map(written, positional)) == PAGE[name]
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


def test_pipeline_model_matches_the_page():
    parameters = list(inspect.signature(functional.pipeline_model).parameters.values())
    assert [p.name for p in parameters[:3]] == ["model", "world_mesh", "moe_mesh"]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[3:])
    assert ", ".join(map(written, parameters[3:-2])) == (
        "pp_axis_name, dp_axis_names, cp_axis_name=None, tp_axis_name=None, ep_axis_name=None, "
        "ep_shard_axis_names=None, layers_per_stage, pipeline_parallel_schedule_csv, pipeline_parallel_schedule, "
        "microbatch_size, local_batch_size, device, loss_fn=None, parallelize_fn=None, "
        "module_fqns_per_model_part=None, patch_inner_model=True, patch_causal_lm_model=True, scale_grads=False, "
        "round_to_pp_multiple=None, patch_stage_backward_maybe_with_nosync=False, seq_len=None"
    )


def test_a_function_that_shards_is_required():
    assert isinstance(lambda model, world_mesh, moe_mesh, **axes: None, functional.ParallelizeFnProtocol)
    assert isinstance(functional.logger, logging.Logger)
