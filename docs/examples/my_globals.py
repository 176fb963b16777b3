"""A layer that takes its process group from a module global, as Megatron's do, and how each rank is set up for it."""

import torch

from shardproof import scheme
from torch_impl.collectives import all_reduce

_TENSOR_PARALLEL_GROUP = None


def initialize_model_parallel(mesh):
    global _TENSOR_PARALLEL_GROUP
    assert _TENSOR_PARALLEL_GROUP is None, "model parallel is already initialized"
    _TENSOR_PARALLEL_GROUP = mesh["tp"]


def row_parallel_linear(x, weight):
    return all_reduce(x @ weight.T, _TENSOR_PARALLEL_GROUP)


@scheme(
    reference=lambda x, weight, bias: x @ weight.T + bias,
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "b i/tp", "weight": "o i/tp", "bias": "o tp=I"},
    outputs="b o tp=I",
    reduction=("i",),
    setup=initialize_model_parallel,
    around=lambda mesh: torch.autograd.graph.save_on_cpu(),
)
def row_parallel(mesh, x, weight, bias):
    return row_parallel_linear(x, weight) + bias
