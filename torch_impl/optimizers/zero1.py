"""ZeRO-1: parameters are replicated and the optimizer's state is sharded. Each rank steps one share of the parameters.

    1. reduce_gradients   reduce_scatter: each rank gets its share of the summed gradients
    2. step               the optimizer steps the shares elementwise; all_gather of the new weights

A group's parameters are concatenated into a flat tensor. Rank r has its r-th part, split as a DTensor is: parts of
n / world elements rounded up, the last ones shorter or empty. The optimizer's state is therefore made of DTensors of
the flat tensor's size: torch.distributed.checkpoint saves them on one number of ranks and loads them on another, and
`clip_grad_norm_` counts each element once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torch_impl.collectives.plain import all_gather_concat, reduce_scatter_sum
from torch_impl.contract import Dtype, Function, Mesh, Rejected, contract, type_name
from torch_impl.optimizers.dtensor_shards import chunk_lengths, local_tensor
from torch_impl.optimizers.parameters import Parameters


class Zero1:
    """Shard an optimizer's state over the ranks that replicate the parameters.

        zero = Zero1(model.parameters(), lambda shares: torch.optim.AdamW(shares, lr=3e-4), device_mesh["dp"])
        loss.backward()
        zero.reduce_gradients()
        clip_grad_norm_(zero.shares, 1.0)
        zero.step()

    `params` are tensors or parameter groups, as for torch's optimizers, equal on all ranks of `mesh`, which has one
    axis; parameters that require no gradient are left alone. `optimizer` is a function that takes groups of shares and
    returns an elementwise torch optimizer (AdamW or SGD, not Muon). There is one share for each group, dtype and
    device; a group of shares keeps the options of its parameter group. With `dtype`, shares, gradients, state and the
    step have that dtype: float32 for the master weights of bfloat16 parameters.

    Save and load `shares`, an `nn.ParameterList`, and `optimizer`, with
    `torch.distributed.checkpoint.state_dict.get_state_dict(zero.shares, zero.optimizer)`; pass `optimizer` to a
    learning-rate scheduler. The step is bitwise equal to the unsharded one if the summed gradients are.

    Cost:   for each share of n elements: `reduce_gradients` 1 reduce_scatter of world * ceil(n / world) elements, in
            float32 or wider; `step` 1 all_gather of ceil(n / world) elements in the parameters' dtype. State: n / world
            on each rank.
    Errors: TypeError for an argument that is not a mesh, function or tensor; ValueError for a mesh of several axes, no
            parameters, or parameters that are sharded, not floating or passed twice.
    """

    @contract
    def __init__(self, params: Parameters, optimizer: Function, mesh: Mesh, *, dtype: Dtype | None = None) -> None:
        if mesh.ndim != 1:
            raise Rejected(f"mesh has {mesh.ndim} axes; pass one of them, such as mesh['dp']")
        groups = _as_groups(params)
        self.mesh = mesh
        self._buckets = [_buckets(each["params"], mesh, dtype) for each in groups]
        self.shares = nn.ParameterList([bucket.share for buckets in self._buckets for bucket in buckets])
        self.optimizer: torch.optim.Optimizer = optimizer(
            [
                {**each, "params": [bucket.share for bucket in buckets]}
                for each, buckets in zip(groups, self._buckets, strict=True)
            ]
        )

    def reduce_gradients(self) -> None:
        """Sum the gradients over the ranks into the shares' gradients. A parameter without a gradient adds zeros.

        Call it once for each step, after the last micro-batch. The result is a sum: for a mean over ranks, divide the
        loss by the number of ranks.

        Cost:   1 reduce_scatter for each share, of world * ceil(n / world) elements in float32 or wider.
        """
        for bucket in self._all_buckets():
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.parameters]
            total = reduce_scatter_sum(_flat(gradients, bucket.share.dtype), self.mesh.get_group(), 0, bucket.lengths)
            bucket.share.grad = bucket.placed(total, self.mesh)

    def step(self) -> None:
        """Step the shares, drop their gradients, and gather the new weights into the parameters.

        Cost:   1 all_gather for each share, of ceil(n / world) elements in the parameters' dtype.
        """
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.gather_weights()

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Copy the shares into the parameters of every rank, for example after loading a checkpoint.

        Cost:   1 all_gather for each share, of ceil(n / world) elements in the parameters' dtype.
        """
        for bucket in self._all_buckets():
            share = local_tensor(bucket.share).to(bucket.parameters[0].dtype)
            flat = all_gather_concat(share, self.mesh.get_group(), 0, bucket.lengths)
            for p, new in zip(bucket.parameters, flat.split([p.numel() for p in bucket.parameters]), strict=True):
                p.copy_(new.view_as(p))

    def _all_buckets(self) -> Iterator[_Bucket]:
        return (bucket for buckets in self._buckets for bucket in buckets)


@dataclass(frozen=True)
class _Bucket:
    """Parameters of one dtype, concatenated. Rank r's share has `lengths[r]` of their elements."""

    parameters: Sequence[Tensor]
    lengths: Sequence[int]
    share: nn.Parameter

    def placed(self, part: Tensor, mesh: DeviceMesh) -> DTensor:
        """Wrap this rank's part of a flat tensor as a DTensor."""
        return _placed(part, mesh, sum(self.lengths))


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """Parameter groups, each with a list of tensors that require a gradient. Errors: TypeError, ValueError."""
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    groups = [{**each, "params": list(each["params"])} for each in groups]
    labelled = [(f"group {i} of params", each) for i, group in enumerate(groups) for each in group["params"]]
    for label, each in labelled:
        if not isinstance(each, Tensor):
            raise Rejected(f"{label} has {type_name(each)}; pass tensors", TypeError)
        if isinstance(each, DTensor):
            raise Rejected(
                f"{label} has a DTensor; its state is sharded as it is, so step it with torch.optim "
                "itself, and pass parameters that every rank has in full"
            )
        if not each.dtype.is_floating_point:
            raise Rejected(f"{label} has a parameter of {each.dtype}; pass floating ones")
    if len({id(each) for _, each in labelled}) < len(labelled):
        raise Rejected("a parameter is passed twice; pass each once, as model.parameters() gives")
    groups = [{**group, "params": [each for each in group["params"] if each.requires_grad]} for group in groups]
    if not any(group["params"] for group in groups):
        raise Rejected("params has no parameter to step; pass the parameters of a model")
    return groups


def _buckets(parameters: Sequence[Tensor], mesh: DeviceMesh, dtype: torch.dtype | None) -> list[_Bucket]:
    """One bucket for each dtype and device, in the order of their first parameters."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for each in parameters:
        alike[each.dtype, each.device].append(each)
    buckets = []
    for members in alike.values():
        lengths = chunk_lengths(sum(each.numel() for each in members), mesh.size())
        part = _part(members, lengths, mesh, dtype or members[0].dtype)
        buckets.append(_Bucket(members, lengths, nn.Parameter(_placed(part, mesh, sum(lengths)))))
    return buckets


def _part(parameters: Sequence[Tensor], lengths: Sequence[int], mesh: DeviceMesh, dtype: torch.dtype) -> Tensor:
    """This rank's part of the concatenated parameters, a copy."""
    rank = mesh.get_local_rank()
    flat = _flat([each.detach() for each in parameters], dtype)
    return flat.narrow(0, sum(lengths[:rank]), lengths[rank]).clone()


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([each.reshape(-1).to(dtype) for each in tensors])


def _placed(part: Tensor, mesh: DeviceMesh, size: int) -> DTensor:
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=torch.Size([size]), stride=(1,))
