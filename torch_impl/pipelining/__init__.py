"""Pipelines: stages, schedules and their simulation.

What this package exports loads no torch; `functional` has the functions that split models and run schedules.

Arguments that have this meaning unless a function says otherwise:

    pp_size, pp_rank                  ranks of the pipeline, and one of them
    num_stages, stages_per_rank       stages in all, and of one rank
    stage_to_rank                     the rank of each stage
    style                             how stages are placed: "loop" in one order, "v" reversed after each pass
    name, pp_schedule, pipeline_parallel_schedule   a schedule by its name, as in the table of the manual
    pipeline_parallel_schedule_csv    the path of a file with the actions of each rank
    is_single_stage_schedule          whether the schedule has one stage on each rank
    n_microbatches                    micro-batches of a step
    microbatch_size, local_batch_size rows of one of them, and of all on a rank
    seq_len, tensor_dtype             length and dtype of what a stage sees
    num_layers, layers_per_stage      layers in all, and in each stage
    round_to_pp_multiple              "up" or "down": to a number of stages that the ranks can share
    embed_cost, head_cost             what embedding and head take, in layers
    module_names_per_stage, module_fqns_per_model_part   the modules of each stage by name; None: divided evenly
    include_embeddings, include_lm_head, include_rotary_emb, include_multimodal_encoders   whether a stage gets them
    extra_module_fqns, fqn_prefix, lm_head_fqn   further names for the first stage; how layers and head are called
    model_config                      the model's configuration, with its sizes
    patch_inner_model, patch_causal_lm_model     whether a stage runs its family's forward around its modules
    device                            where a stage computes
    loss_fn                           (output, target) -> loss on the last stage; None: forward alone
    scale_grads                       divide gradients by the number of micro-batches
    world_mesh, pp_mesh, moe_mesh     the mesh of all axes, one that has pp, one for experts, which is passed on
    pp_axis_name, dp_axis_names, cp_axis_name, tp_axis_name   which axes of the mesh are what
    ep_axis_name, ep_shard_axis_names passed on to `parallelize_fn`
    times                             what a forward and both halves of a backward take
    path, title                       of a file; of a picture
"""

from torch_impl.pipelining.csv_schedule import read_csv as read_csv
from torch_impl.pipelining.csv_schedule import write_csv as write_csv
from torch_impl.pipelining.named_schedules import schedule_order as schedule_order
from torch_impl.pipelining.order import Action as Action
from torch_impl.pipelining.partition import stage_to_rank as stage_to_rank
from torch_impl.pipelining.simulation import Timeline as Timeline
from torch_impl.pipelining.simulation import Times as Times
from torch_impl.pipelining.simulation import draw as draw
from torch_impl.pipelining.simulation import simulate as simulate
