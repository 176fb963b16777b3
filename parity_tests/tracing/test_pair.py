"""A trace of a user's own pair of modules."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from shardproof.engines.failure import Raised
from shardproof.judge.reference import ReferenceFailure
from shardproof.tracing import Pair, first, trace_pair
from shardproof.tracing.pair import traced_pair


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x)), twice with the same weights; a bug can be injected into it."""

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
            if self.mistake == "no gradient":
                up = up.detach()
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
    arguments = {"torch_module": Net(), "make_flax": make_flax, "inputs": (X,), "names": NAMES, **changed}
    return Pair(**arguments)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_modules_have_no_first_difference(dtype):
    compared = trace_pair(pair(torch_module=Net(dtype=dtype)))
    assert first(compared) is None
    named = [line.name for line in compared]
    assert named[:3] == ["input of the model", "input of proj", "output of proj"]
    assert "output of ffn.w_down, call 1" in named and "output of the model" in named
    assert sum(line.phase == "weight" for line in compared) == 6
    assert 0 < max(line.ratio for line in compared) < 1


def test_a_value_is_located_where_it_first_differs():
    line = first(trace_pair(pair(torch_module=Net("value"))))
    assert (line.name, line.phase, line.home) == ("input of ffn.w_down", "forward", "ffn")


def test_a_gradient_is_located_where_it_first_differs():
    line = first(trace_pair(pair(torch_module=Net("gradient"))))
    assert (line.name, line.phase) == ("gradient of the output of ffn.w_up, call 1", "backward") and line.home == "ffn"
    assert any("factor 0.5" in note for note in line.notes)


def test_a_module_that_backward_never_reaches_is_located_where_it_ends():
    line = first(trace_pair(pair(torch_module=Net("no gradient"))))
    assert (line.name, line.home) == ("gradient of the output of ffn.w_up, call 1", "ffn")
    assert line.notes == ("gradient is zero: backward does not reach this input",)


class ConstantBias(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias.detach())


def test_a_weight_without_a_gradient_is_reported_unless_it_requires_none():
    module = Net()
    module.embed.__class__ = ConstantBias
    line = first(trace_pair(pair(torch_module=module)))
    assert (line.name, line.home) == ("gradient of embed.bias", "embed")
    module.embed.bias.requires_grad_(False)
    compared = trace_pair(pair(torch_module=module))
    assert first(compared) is None and "gradient of embed.bias" not in [line.name for line in compared]


def test_different_weights_are_located_where_they_are_used():
    other = {name: p.detach().double().numpy() for name, p in Net().named_parameters()}
    other["block.up.weight"] = other["block.up.weight"] + 1e-9
    line = first(trace_pair(pair(make_flax=lambda weights: make_flax(other))))
    assert (line.name, line.home) == ("output of ffn.w_up", "ffn.w_up")


def test_names_that_either_side_lacks_are_rejected():
    with pytest.raises(ValueError, match=re.escape("names has 'bloc', which is not a module of the PyTorch side")):
        trace_pair(pair(names={**NAMES, "bloc": "ffn"}))
    with pytest.raises(ValueError, match=re.escape("names has 'fnn', which the flax side never calls")):
        trace_pair(pair(names={**NAMES, "block": "fnn"}))


class Shifted(Net):
    def forward(self, x):
        return super().forward(x) + 1


def test_the_models_own_work_is_compared_too():
    line = first(trace_pair(pair(torch_module=Shifted())))
    assert (line.name, line.home) == ("output of the model", "")


def test_modules_of_one_side_alone_are_reported():
    traced = traced_pair(pair(names={name: to for name, to in NAMES.items() if name != "block.gate"}))
    assert traced.torch_only == ("block.gate",) and traced.flax_only == ("ffn.w_gate",) and first(traced.lines) is None


@pytest.mark.slow
def test_a_copy_in_another_dtype_is_traced():
    original = pair()
    assert traced_pair(original, "bfloat16").dtype == "bfloat16" and original.dtype == "float64"


class Returning(Net):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


def flax_without_a_weight(weights):
    return make_flax({name: x for name, x in weights.items() if name != "block.up.weight"})


UNTRACEABLE = [
    ({"torch_module": 3}, TypeError, "Pair: torch_module is a int; pass a torch.nn.Module"),
    ({"make_flax": 3}, TypeError, "Pair: make_flax is a int; pass a function from weights to a flax module"),
    ({"inputs": X}, TypeError, "Pair: inputs is a ndarray; pass a tuple of arrays, such as (x,)"),
    ({"inputs": (X, [1])}, TypeError, "Pair: inputs[1] is a list; pass NumPy arrays"),
    (
        {"inputs": (X[:0],)},
        ValueError,
        "Pair: the inputs have no element, and nothing could differ; pass a token or more",
    ),
    (
        {"torch_module": Returning(lambda y: y[:0])},
        ValueError,
        "Pair: the PyTorch module's output has no element, and nothing could differ",
    ),
    ({"names": ["embed"]}, TypeError, "Pair: names is a list; pass a dict, such as {'fc1': 'dense_in'}"),
    (
        {"torch_module": Net(dtype=torch.float8_e5m2)},
        ValueError,
        "Pair: torch_module has parameters of float8_e5m2, not one of float64, float32, bfloat16, float16",
    ),
    (
        {"torch_module": Returning(lambda y: (y, y))},
        ValueError,
        "Pair: the PyTorch module returns a tuple; wrap it to return one floating tensor",
    ),
    (
        {"torch_module": Returning(lambda y: y > 0)},
        ValueError,
        "Pair: the PyTorch module returns a Tensor of torch.bool; wrap it to return one floating tensor",
    ),
    (
        {"torch_module": Returning(torch.Tensor.detach)},
        ValueError,
        "Pair: the PyTorch module's output has no gradient; give it parameters that require one",
    ),
    (
        {"torch_module": Returning(lambda y: y[:, :1])},
        ValueError,
        "Pair: the PyTorch module returns (5, 1), the flax module (5, 4); make both return the same shape",
    ),
    (
        {"make_flax": lambda weights: lambda x: (x, x)},
        ValueError,
        "Pair: the flax module returns a tuple; wrap it to return one array",
    ),
    (
        {"make_flax": flax_without_a_weight},
        ReferenceFailure,
        "the flax module raised KeyError: 'block.up.weight' at test_pair.py:",
    ),
]


@pytest.mark.parametrize(("changed", "error", "message"), UNTRACEABLE)
def test_untraceable_modules_are_rejected(changed, error, message):
    with pytest.raises(error) as caught:
        trace_pair(pair(**changed))
    assert str(caught.value).startswith(message)


def test_a_module_that_raises_is_named_with_its_line():
    with pytest.raises(Raised, match=r"the PyTorch module raised ZeroDivisionError: .* at test_pair\.py:\d+"):
        trace_pair(pair(torch_module=Returning(lambda y: y * (1 // 0))))


def test_the_hooks_are_gone_afterwards():
    module = Net()
    trace_pair(pair(torch_module=module))
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
