"""A layer with a router, routed and shared experts and their losses, trained for a step. No JAX: ranks run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_impl.expert_parallel import (
    global_balance_loss,
    routed_experts,
    sequence_balance_loss,
    shared_experts,
    softmax_top_k,
    sum_layer_gradients,
    with_loss,
    z_loss,
)

BALANCE, Z = 0.5, 0.25  # large, so that a wrong gradient of either shows


class ExpertLayer(nn.Module):
    """Parameters by the names of the scheme: `router`, and gate_up and down of `routed` and `shared`."""

    def __init__(self, parameters: dict[str, dict[str, Tensor]]) -> None:
        super().__init__()
        self.router = _parameters(parameters["router"])
        self.routed = _parameters(parameters["routed"])
        self.shared = _parameters(parameters["shared"])

    def loss(self, x: Tensor, k: int, tokens: int, groups: dict[str, Any], exchange: str) -> Tensor:
        """This rank's addend: squares of the outputs over all elements of all ranks, and both auxiliary losses."""
        ep, tp, data = groups["ep"], groups["tp"], groups["data"]
        logits = x @ self.router["weight"]
        gates, experts, probabilities = softmax_top_k(logits, k, norm_topk_prob=True)
        of_routed = self.routed["gate_up"].flatten(2), self.routed["down"]
        y = routed_experts(x, gates, experts, *of_routed, ep, tp, exchange=exchange)
        y = y + shared_experts(x, self.shared["gate_up"].flatten(1), self.shared["down"], tp)
        task = y.square().sum() / (tokens * x.shape[1])
        return task + BALANCE * global_balance_loss(probabilities, experts, data) + Z * z_loss(logits, tokens)

    def sum_gradients(self, groups: dict[str, Any]) -> None:
        """Sum experts' gradients over edp alone, other gradients over all ranks with other tokens."""
        sum_layer_gradients(
            routed=list(self.routed.values()),
            shared=list(self.shared.values()),
            router=list(self.router.values()),
            edp_group=groups["edp"],
            ep_group=groups["ep"],
            tp_group=groups["tp"],
        )


def _parameters(tensors: dict[str, Tensor]) -> nn.ParameterDict:
    return nn.ParameterDict({name: nn.Parameter(x.detach().clone()) for name, x in tensors.items()})


def over_all(mesh, axes):
    """The group of all ranks of these axes."""
    larger = [axis for axis in axes if mesh.size(axis) > 1]
    if len(larger) < 2:
        return mesh[larger[0] if larger else axes[0]]
    return mesh.device_mesh[tuple(larger)]._flatten("_".join(larger)).get_group()


def trained(mesh, x, parameters, k, exchange):
    """(the loss that the ranks' losses add up to, the layer with its summed gradients) of two micro-batches."""
    layer = ExpertLayer(parameters)
    groups = {axis: mesh[axis] for axis in ("edp", "ep", "tp")} | {"data": over_all(mesh, ("edp", "ep", "tp"))}
    loss = torch.zeros((), dtype=x.dtype)
    for batch in x:
        addend = layer.loss(batch, k, mesh.total("t"), groups, exchange)
        addend.backward()
        loss = loss + addend.detach()
    layer.sum_gradients(groups)
    return loss, layer


class SequenceLayer(ExpertLayer):
    """The layer without shared experts, of sequences that cp and tp shard; its router's losses are inside of it."""

    def loss_of_sequences(
        self, x: Tensor, k: int, sequences: int, length: int, groups: dict[str, Any], exchange: str
    ) -> tuple[Tensor, Tensor]:
        """(the loss to run backward from, this rank's addend of the total loss); `sequences` counts all ranks'."""
        logits = x @ self.router["weight"]
        gates, experts, probabilities = softmax_top_k(logits, k, norm_topk_prob=True)
        balance = sequence_balance_loss(probabilities, experts, groups["sequence"]).sum() / sequences
        of_router = BALANCE * balance + Z * z_loss(logits.flatten(0, 1), sequences * length)
        rows = with_loss(x, of_router).flatten(0, 1), gates.flatten(0, 1), experts.flatten(0, 1)
        of_routed = self.routed["gate_up"].flatten(2), self.routed["down"]
        y = routed_experts(*rows, *of_routed, groups["ep"], groups["tp"], exchange=exchange)
        task = y.square().sum() / (sequences * length * x.shape[2])
        return task, (task + of_router).detach()


def trained_on_sequences(mesh, x, parameters, k, exchange):
    """(the loss that the ranks' addends add up to, the layer with its summed gradients) of two micro-batches."""
    layer = SequenceLayer({**parameters, "shared": {}})
    groups = {"ep": mesh["ep"], "tp": mesh["tp"], "edp": over_all(mesh, ("dp", "cp"))}
    groups["sequence"] = over_all(mesh, ("cp", "tp"))
    total = torch.zeros((), dtype=x.dtype)
    for batch in x:
        loss, addend = layer.loss_of_sequences(batch, k, mesh.total("b"), mesh.total("s"), groups, exchange)
        loss.backward()
        total = total + addend
    layer.sum_gradients(groups)
    return total, layer
