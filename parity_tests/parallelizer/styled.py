"""Modules under a style, on the ranks: made from full arrays, sharded by a plan, run backward up to three times."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from torch_impl.parallelizer import to_cpu, translate_to_torch_parallel_style
from torch_impl.parallelizer.tp_plan import apply_plan, check_plan
from torch_impl.parallelizer.tp_styles import Experts

EPS = 1e-5
TIMES = {1: (slice(0, 3),), 2: (slice(0, 2), slice(2, 3)), 3: (slice(0, 1), slice(1, 2), slice(2, 3))}


def ceil_rule(size: int, world: int) -> list[list[int]]:
    """Positions of each rank where a dim is sharded as DTensor shards it: all parts but the last are equally long."""
    step = -(-size // world)
    return [list(range(min(size, step * rank), min(size, step * (rank + 1)))) for rank in range(world)]


def linear_layer(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with these values."""
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None, dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(weight.clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer


class Norm(nn.Module):
    """A root-mean-square norm as transformers writes it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


class Gated(nn.Module):
    """A gated MLP, gate and up in one layer or in two."""

    def __init__(self, gate: Tensor, up: Tensor, down: nn.Linear, is_packed: bool) -> None:
        super().__init__()
        if is_packed:
            self.gate_up = linear_layer(torch.cat([gate, up]))
        else:
            self.gate, self.up = linear_layer(gate), linear_layer(up)
        self.down, self.is_packed = down, is_packed

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1) if self.is_packed else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Stacks(nn.Module):
    """All experts in two stacks, as transformers writes them."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(len(self.down_proj)):
            token, choice = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            each = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out = out.index_add(0, token, each * top_k_weights[token, choice, None])
        return out


def styled(
    mesh: Any, module: nn.Module, plan: Mapping[str, Any], frozen: str | None = None, by_torch: bool = False
) -> nn.Module:
    """The module under a plan of names or styles, one parameter frozen. A stack's entry is written `module:parameter`.

    `by_torch` applies the styles by torch's own function, as a caller may.
    """
    if frozen:
        module.get_parameter(frozen).requires_grad_(False)
    styles = {}
    for key, name in plan.items():
        path, _, parameter = key.partition(":")
        if not parameter:
            styles[path] = translate_to_torch_parallel_style(name) if isinstance(name, str) else name
    for key, name in plan.items():
        path, _, parameter = key.partition(":")
        if parameter:
            assert isinstance(styles[path], Experts)
            styles[path].stacks[parameter] = name
    # Give other ranks other initial weights, as if each rank had drawn its own: the first rank's must be used. torch's
    # SequenceParallel keeps each rank's weights, since norms start with ones.
    if mesh.rank("tp") and "sequence_parallel" not in plan.values():
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1.0)
    check_plan(module, styles, mesh.device_mesh)
    if by_torch:
        return parallelize_module(module, mesh.device_mesh, styles)
    apply_plan(module, styles, mesh.device_mesh)
    return module


def accumulated(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    cotangent: Tensor,
    weights: Tensor,
    times: int,
    fails: bool = False,
    names: Sequence[str] = (),
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The output, the inputs' gradients, and the parameters' full gradients, accumulated over `times` backwards.

    Integer inputs have no gradient, and a frozen parameter's is 0. The last inputs are passed by `names`. With `fails`,
    forwards that fail come last. Parameters are read as a user reads them, `module.weight`.
    """
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    first: Any = None
    count = len(leaves) - len(names)
    for part in TIMES[times]:
        y = module(*leaves[:count], **dict(zip(names, leaves[count:], strict=True)))
        y = y.to_local() if isinstance(y, DTensor) else y
        first = y.detach() if first is None else first
        assert torch.equal(y, first)  # no backward changes the next forward
        y.backward(cotangent * weights[part].sum())
    if fails:
        fail_inside(module, leaves)
    named = {name: attrgetter(name)(module) for name, _ in module.named_parameters(remove_duplicate=False)}
    assert all(parameter.grad is None for parameter in named.values() if not parameter.requires_grad)
    gradients = {
        name: to_cpu(parameter.grad) if parameter.requires_grad else torch.zeros(parameter.shape)
        for name, parameter in named.items()
    }
    assert all(type(gradient) is Tensor for gradient in gradients.values())
    return first, [x.grad for x in leaves if x.requires_grad], gradients


class Failure(Exception):
    """A forward has failed."""


def fail_inside(module: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Call the module with a layer that fails, for each layer that has parameters."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise Failure

    for layer in module.modules():
        if layer._parameters:
            forward = vars(layer).get("forward")
            layer.forward = fail
            with contextlib.suppress(Failure):
                module(*inputs)
            del layer.forward
            if forward is not None:
                layer.forward = forward
