"""A trace of a user's own pair of modules."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from parity_tests.tracing import Pair, first, trace_pair


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x)), twice with the same weights; a mistake can be planted in it."""

    def __init__(self, mistake=None):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False), nn.Linear(6, 4)
        self.mistake = mistake

    def forward(self, x):
        for _ in range(2):
            gate, up = self.gate(x), self.up(x)
            if self.mistake == "value":
                gate = gate * 2
            if self.mistake == "gradient":
                up = (up + up.detach()) / 2
            x = x + self.down(nn.functional.silu(gate) * up)
        return x


class Net(nn.Module):
    def __init__(self, mistake=None, dtype=torch.float64):
        super().__init__()
        self.embed, self.block = nn.Linear(3, 4), Gated(mistake)
        self.to(dtype)
        with torch.no_grad():
            for k, parameter in enumerate(self.parameters(), 2):
                parameter.copy_(torch.linspace(-1, k, parameter.numel()).sin().view(parameter.shape))

    def forward(self, x):
        return self.block(self.embed(x))


class FlaxGated(nnx.Module):
    def __init__(self, rngs):
        self.w_gate, self.w_up = (nnx.Linear(4, 6, use_bias=False, rngs=rngs) for _ in range(2))
        self.w_down = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        for _ in range(2):
            x = x + self.w_down(jax.nn.silu(self.w_gate(x)) * self.w_up(x))
        return x


class FlaxNet(nnx.Module):
    def __init__(self, rngs):
        self.proj, self.ffn = nnx.Linear(3, 4, rngs=rngs), FlaxGated(rngs)

    def __call__(self, x):
        return self.ffn(self.proj(x))


NAMES = {"embed": "proj", "block": "ffn", "block.gate": "ffn.w_gate", "block.up": "ffn.w_up"}
NAMES |= {"block.down": "ffn.w_down"}


def make_flax(weights):
    model = FlaxNet(nnx.Rngs(0))
    for name, module in (("embed", model.proj), ("block.gate", model.ffn.w_gate), ("block.up", model.ffn.w_up)):
        module.kernel = nnx.Param(jnp.asarray(weights[f"{name}.weight"]).T)
    model.ffn.w_down.kernel = nnx.Param(jnp.asarray(weights["block.down.weight"]).T)
    model.proj.bias, model.ffn.w_down.bias = (nnx.Param(weights[f"{n}.bias"]) for n in ("embed", "block.down"))
    return model


X = np.linspace(-1, 2, 15).reshape(5, 3)


def pair(**changed):
    given = {"torch_module": Net(), "make_flax": make_flax, "inputs": (X,), "names": NAMES, **changed}
    return Pair(**given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_modules_have_no_first_difference(dtype):
    found = trace_pair(pair(torch_module=Net(dtype=dtype)))
    assert first(found) is None
    named = [line.name for line in found]
    assert named[:2] == ["input of proj", "output of proj"] and "output of ffn.w_down, call 1" in named
    assert sum(line.phase == "weight" for line in found) == 6
    assert 0 < max(line.ratio for line in found) < 1


def test_a_value_is_found_where_it_first_differs():
    line = first(trace_pair(pair(torch_module=Net("value"))))
    assert (line.name, line.phase, line.home) == ("input of ffn.w_down", "forward", "ffn")


def test_a_gradient_is_found_where_it_first_differs():
    line = first(trace_pair(pair(torch_module=Net("gradient"))))
    assert (line.name, line.phase) == ("gradient of the output of ffn.w_up, call 1", "backward") and line.home == "ffn"
    assert any("factor 0.5" in note for note in line.notes)


def test_other_weights_are_found_where_they_are_used():
    other = {name: p.detach().double().numpy() for name, p in Net().named_parameters()}
    other["block.up.weight"] = other["block.up.weight"] + 1e-9
    line = first(trace_pair(pair(make_flax=lambda weights: make_flax(other))))
    assert (line.name, line.home) == ("output of ffn.w_up", "ffn.w_up")


def test_names_that_either_side_lacks_are_refused():
    with pytest.raises(ValueError, match=re.escape("names has 'bloc', which is no module of the PyTorch side")):
        trace_pair(pair(names={**NAMES, "bloc": "ffn"}))
    with pytest.raises(ValueError, match=re.escape("names has 'fnn', which the flax side never calls")):
        trace_pair(pair(names={**NAMES, "block": "fnn"}))


def test_the_hooks_are_gone_afterwards():
    module = Net()
    trace_pair(pair(torch_module=module))
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
