"""Pipelines: stages, schedules and their simulation.

This package's exports do not load torch; `functional` has the functions that split models and run schedules.

Arguments have this meaning unless a function says otherwise:

    pp_size, pp_rank                  number of pipeline ranks, and the index of one
    num_stages, stages_per_rank       number of stages in all, and on one rank
    stage_to_rank                     the rank of each stage
    style                             placement of stages: "loop" in one order, "v" reversed after each pass
    name, pp_schedule, pipeline_parallel_schedule   a schedule by its name, as in the manual's table
    pipeline_parallel_schedule_csv    the path of a file with each rank's actions
    is_single_stage_schedule          whether the schedule has one stage on each rank
    n_microbatches                    number of micro-batches in a step
    microbatch_size, local_batch_size rows of a micro-batch, and of a rank's whole batch
    seq_len, tensor_dtype             length and dtype of a stage's inputs
    num_layers, layers_per_stage      number of layers in all, and in each stage
    round_to_pp_multiple              "up" or "down": round the number of stages to a multiple of pp_size
    embed_cost, head_cost             cost of the embedding and of the head, in layers
    module_names_per_stage, module_fqns_per_model_part   names of each stage's modules; None divides them evenly
    include_embeddings, include_lm_head, include_rotary_emb, include_multimodal_encoders   whether names include these
    extra_module_fqns, fqn_prefix, lm_head_fqn   more names for the first stage; the layers' prefix; the head's name
    model_config                      the model's configuration, with its sizes
    patch_inner_model, patch_causal_lm_model     whether a stage runs its family's forward around its modules
    device                            the device on which a stage computes
    loss_fn                           (output, target) -> loss on the last stage; None runs forwards only
    scale_grads                       divide gradients by the number of micro-batches
    world_mesh, pp_mesh, moe_mesh     the mesh of all axes, a mesh with pp, a mesh for experts (passed on)
    pp_axis_name, dp_axis_names, cp_axis_name, tp_axis_name   the names of the mesh's axes
    ep_axis_name, ep_shard_axis_names passed on to `parallelize_fn`
    times                             durations of a forward and of each half of a backward
    path, title                       the path of a file; the title of a picture
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
