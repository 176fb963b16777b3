"""ColumnParallelLinear with a trained bias, its weight trained and frozen."""

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear

dist.init_process_group("gloo")
torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron allocates on the named device
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
for is_trained in (True, False):
    layer = ColumnParallelLinear(
        4, 4, config=config, init_method=torch.nn.init.ones_, bias=True, skip_bias_add=False, gather_output=False
    )
    layer.weight.requires_grad_(is_trained)
    x = torch.ones(3, 1, 4, requires_grad=True)
    layer(x)[0].sum().backward()
    gradient = None if layer.bias.grad is None else layer.bias.grad.tolist()
    if dist.get_rank() == 0:
        print(f"weight {'trained' if is_trained else 'frozen '}: gradient of the bias {gradient}")
dist.destroy_process_group()
