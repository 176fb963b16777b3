"""The functions that split models and run pipelines, in one place."""

import logging

from torch_impl.pipelining.partition import calculate_virtual_stages as calculate_virtual_stages
from torch_impl.pipelining.partition import (
    generate_hf_model_fqn_per_model_part as generate_hf_model_fqn_per_model_part,
)
from torch_impl.pipelining.partition import stage_ids_this_rank as stage_ids_this_rank
from torch_impl.pipelining.pipeline import ParallelizeFnProtocol as ParallelizeFnProtocol
from torch_impl.pipelining.pipeline import pipeline_model as pipeline_model
from torch_impl.pipelining.schedule import build_pipeline_schedule as build_pipeline_schedule
from torch_impl.pipelining.schedule import scale_grads_by_divisor as scale_grads_by_divisor
from torch_impl.pipelining.shapes import _get_hidden_and_vocab_size as _get_hidden_and_vocab_size
from torch_impl.pipelining.shapes import _precompute_stage_shapes as _precompute_stage_shapes
from torch_impl.pipelining.shapes import reset_pp_stage_shapes as reset_pp_stage_shapes
from torch_impl.pipelining.split import split_model_into_stages as split_model_into_stages

logger = logging.getLogger(__name__)
