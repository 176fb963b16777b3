"""Sharded models to trace: a small Llama of transformers over tp, right and with one wrong layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardproof.tracing.buggy_model import Shared
from torch_impl.collectives import all_reduce

ROWS, LENGTH, VOCAB = 2, 5, 32
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
SUMS = ("self_attn.o_proj", "mlp.down_proj")


def llama() -> Any:
    """Two layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def llama_inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids}


def llama_over_tp(mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in SUMS}
    plan |= {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(llama(), mesh["tp"], plan)


def llama_over_dp_and_tp(mesh: DeviceMesh) -> nn.Module:
    model: Any = llama_over_tp(mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


def wrong_forward(mesh: DeviceMesh) -> nn.Module:
    """The second layer's feed-forward output is a thousandth too large."""
    model: Any = llama_over_tp(mesh)
    model.model.layers[1].mlp.register_forward_hook(lambda module, arguments, out: out * 1.001)
    return model


def wrong_backward(mesh: DeviceMesh) -> nn.Module:
    """The gradient into the first layer's output projection is halved."""
    model: Any = llama_over_tp(mesh)
    projection = model.model.layers[0].self_attn.o_proj
    forward = projection.forward
    projection.forward = lambda x: _Halved.apply(forward(x))
    return model


def wrong_weight_gradient(mesh: DeviceMesh) -> nn.Module:
    """Only the gradient of one norm's weight is halved."""
    model: Any = llama_over_tp(mesh)
    model.model.layers[0].input_layernorm.weight.register_hook(lambda gradient: gradient / 2)
    return model


def other_weights(mesh: DeviceMesh) -> nn.Module:
    model: Any = llama_over_tp(mesh)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.mul_(2)
    return model


def raises(mesh: DeviceMesh) -> nn.Module:
    raise ZeroDivisionError("of the user")


def no_module(mesh: DeviceMesh) -> int:
    return 3


class Written(nn.Module):
    """Two hand-written projections in Megatron's style: plain tensors, a sum in the parent's forward."""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        if mesh is not None:
            rank = mesh.get_local_rank("tp")
            self.up.weight = nn.Parameter(self.up.weight.detach().chunk(2, 0)[rank].clone())
            self.down.weight = nn.Parameter(self.down.weight.detach().chunk(2, 1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.mesh is None:
            return self.down(self.up(x).relu())
        group = self.mesh.get_group("tp")
        return all_reduce(self.down(self.up(Shared.apply(x, group)).relu()), group, out="I")


def written() -> nn.Module:
    return Written()


def written_over_tp(mesh: DeviceMesh) -> nn.Module:
    return Written(mesh)


class WithoutOutput(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:0]


def without_output() -> nn.Module:
    return WithoutOutput()


def empty_inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(0, 6),)


def written_inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(3, 6),)


class Routed(nn.Module):
    """Experts of one weight each: over tp each rank has some and their tokens alone, so `act` has other rows."""

    def __init__(self, mesh: Any = None, scale: float = 1.0, lacks_a_sum: bool = False) -> None:
        super().__init__()
        self.mesh, self.scale, self.lacks_a_sum = mesh, scale, lacks_a_sum
        self.act = nn.SiLU()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 36).view(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(len(x)) % 4
        mine = tokens >= 0 if self.mesh is None else (tokens == 0) == (self.mesh.get_local_rank("tp") == 0)
        group = None if self.mesh is None else self.mesh.get_group("tp")
        x = x if group is None else Shared.apply(x, group)
        weight = self.weight if group is None or self.lacks_a_sum else Shared.apply(self.weight, group)
        rows = self.act(x[mine] @ weight) * self.scale
        out = torch.zeros_like(x).index_put((mine.nonzero()[:, 0],), rows)
        return out if group is None else all_reduce(out, group, out="I")


class Layer(nn.Module):
    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.up, self.experts, self.down = nn.Linear(6, 6), Routed(*arguments), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.experts(self.up(x)))


def routed() -> nn.Module:
    return Layer()


def routed_over_tp(mesh: DeviceMesh) -> nn.Module:
    return Layer(mesh)


def routed_with_a_wrong_scale(mesh: DeviceMesh) -> nn.Module:
    return Layer(mesh, 2.0)


def routed_without_a_sum(mesh: DeviceMesh) -> nn.Module:
    return Layer(mesh, 1.0, True)


def routed_inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(7, 6),)


class Residual(nn.Module):
    """A layer beside its input, on every rank alike; `times` is how often the layer's output is added."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner, self.times = nn.Linear(6, 6), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.times * self.inner(x)


def residual() -> nn.Module:
    return Residual(1)


def residual_added_twice(mesh: DeviceMesh) -> nn.Module:
    return Residual(2)


def no_inputs() -> int:
    return 3
