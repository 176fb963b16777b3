"""A layer of megatron-core, judged as it is: its groups are made in setup, its parameters come from the scheme."""

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import RowParallelLinear
from torch.func import functional_call

from shardproof import scheme, values


def initialize_model_parallel(mesh):
    torch.cuda.current_device = lambda: torch.device("cpu")  # without CUDA: where Megatron allocates
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=mesh.size("tp"))


@scheme(
    reference=lambda x, weight: x @ weight.T,
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "s b i/tp", "weight": "o i/tp"},
    outputs="s/tp b o",
    draw={"x": values("normal"), "weight": values("normal")},
    dtypes=("float32",),
    setup=initialize_model_parallel,
    isolate=("megatron.core",),
)
def row_parallel(mesh, x, weight):
    outs, ins = weight.shape[0], weight.shape[1] * mesh.size("tp")
    config = ModelParallelConfig(
        tensor_model_parallel_size=mesh.size("tp"),
        sequence_parallel=mesh.size("tp") > 1,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    layer = RowParallelLinear(
        ins,
        outs,
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=False,
    )
    return functional_call(layer, {"weight": weight}, (x,))[0]
