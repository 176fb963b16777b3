"""Tensor-parallel plans, fully sharded data parallelism, activation checkpointing, and a dry run of all three.

Arguments have this meaning unless a function says otherwise:

    model                      the model, which is parallelized in place; its parameters keep their names
    device_mesh                a mesh whose axes are identified by their names
    tp_shard_plan              module names, with * for any, and a style for each; None: no plan, or the model's own
    activation_checkpointing   recompute each block in backward instead of storing its activations
"""

from torch_impl.parallelizer.adapters.megatron_fsdp import (
    megatron_fsdp_strategy_parallelize as megatron_fsdp_strategy_parallelize,
)
from torch_impl.parallelizer.adapters.nvfsdp import HAVE_NVFSDP as HAVE_NVFSDP
from torch_impl.parallelizer.adapters.nvfsdp import nvfsdp_strategy_parallelize as nvfsdp_strategy_parallelize
from torch_impl.parallelizer.adapters.process_group import _destroy_dist_connection as _destroy_dist_connection
from torch_impl.parallelizer.adapters.to_cpu import to_cpu as to_cpu
from torch_impl.parallelizer.adapters.unit_modules import import_classes_from_paths as import_classes_from_paths
from torch_impl.parallelizer.adapters.unshard import unshard as unshard
from torch_impl.parallelizer.adapters.unshard import unshard_fsdp2_model as unshard_fsdp2_model
from torch_impl.parallelizer.async_linear import all_gather_linear as all_gather_linear
from torch_impl.parallelizer.async_linear import linear_reduce_scatter as linear_reduce_scatter
from torch_impl.parallelizer.dry_run import DryRun as DryRun
from torch_impl.parallelizer.dry_run import dry_run as dry_run
from torch_impl.parallelizer.fsdp2 import fsdp2_strategy_parallelize as fsdp2_strategy_parallelize
from torch_impl.parallelizer.fsdp2 import get_parallelization_strategy as get_parallelization_strategy
from torch_impl.parallelizer.hf_plan import get_hf_tp_shard_plan as get_hf_tp_shard_plan
from torch_impl.parallelizer.hf_plan import register_tp_plan as register_tp_plan
from torch_impl.parallelizer.hf_plan import translate_to_torch_parallel_style as translate_to_torch_parallel_style
from torch_impl.parallelizer.lora import LoRALinear as LoRALinear
from torch_impl.parallelizer.lora import add_lora as add_lora
from torch_impl.parallelizer.lora import merge_lora as merge_lora
from torch_impl.parallelizer.lora import unmerge_lora as unmerge_lora
from torch_impl.parallelizer.registry import register_parallel_strategy as register_parallel_strategy
