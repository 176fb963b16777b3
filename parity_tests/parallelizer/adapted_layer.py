"""A layer with low-rank adapters of given values, for the ranks too, which load no JAX."""

import torch
from torch import nn

from parity_tests.parallelizer.styled import linear_layer
from torch_impl.parallelizer import LoRALinear

ALPHA = 3.0


def adapted_layer(weight, bias, a, b, magnitude, is_bias_trained=False):
    """A layer with these values; without a magnitude it is no DoRA. A caller may train its bias too."""
    with torch.random.fork_rng(devices=[]):
        layer = LoRALinear(linear_layer(weight, bias), len(a), ALPHA, dora=magnitude is not None)
    layer.requires_grad_(False)
    if bias is not None:
        layer.bias.requires_grad_(is_bias_trained)
    given = {"lora_A": (layer.lora_A, "weight", a), "lora_B": (layer.lora_B, "weight", b)}
    if magnitude is not None:
        given["lora_magnitude"] = (layer, "lora_magnitude", magnitude)
    for owner, name, value in given.values():
        owner.register_parameter(name, nn.Parameter(value.clone()))
    return layer
