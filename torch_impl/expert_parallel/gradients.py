"""The sum of gradients over the ranks that have other tokens for the same parameter.

Which ranks these are differs by parameter. Of an expert's weight a rank has summed the rows of all ranks of ep already,
so its gradient is summed over edp alone, the ranks that replicate it. A router's and a shared expert's gradient is of
this rank's own tokens, and is summed over every rank that has others: dp x cp x ep, and tp where tokens are sharded
over it and the weight is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator
from torch_impl.contract import Group, Instance, ListOf, contract

Groups = Annotated[
    Sequence[ProcessGroup], ListOf(Instance(ProcessGroup, "pass a ProcessGroup", shows_value=False), "process groups")
]


Parameters = Annotated[
    Sequence[Tensor], ListOf(Instance(Tensor, "pass list(module.parameters())", shows_value=False), "parameters")
]


@contract
def sum_layer_gradients(
    *,
    routed: Parameters = (),
    shared: Parameters = (),
    router: Parameters = (),
    edp_group: Group[ProcessGroup, "edp"],
    ep_group: Group[ProcessGroup, "ep"],
    tp_group: Group[ProcessGroup, "tp"] | None = None,
) -> None:
    """Sum the gradients of a layer's parameters in place, each over the ranks that have other tokens for it.

        routed   "e/ep ... edp=R"        ->   edp=I      their rows have come from all ranks of ep
        shared   "... edp=R ep=R"        ->   edp=I ep=I      sharded over tp, as in `shared_experts` with tp_group
        router   "... edp=R ep=R tp=R"   ->   edp=I ep=I tp=I

    `routed` are the weights of the experts of `ep_group`, replicated over `edp_group`; the ranks of both together are
    all that have other tokens, dp x cp x ep. `shared` are sharded over tp, and `router` is all that is not, norms
    included: with `tp_group` tokens are sharded over tp as well. Nothing is divided: the ranks' losses are addends of
    one sum. Call it once, after the last micro-batch.

    Cost:   those of `sum_gradients` over [edp], [edp, ep] and [edp, ep, tp].
    Errors: those of `sum_gradients`.
    """
    everywhere = [edp_group, ep_group] if tp_group is None else [edp_group, ep_group, tp_group]
    sum_gradients(routed, [edp_group])
    sum_gradients(shared, [edp_group, ep_group])
    sum_gradients(router, everywhere)


@contract
def sum_gradients(parameters: Parameters, groups: Groups) -> None:
    """Sum the gradients of `parameters` over each of `groups` in turn, in place; the sum is over their product.

    One group of all these ranks takes one all_reduce in place of several. A parameter without a gradient counts as
    zeros, since the ranks of a group send alike; one that is passed twice counts once. Every rank passes the same
    parameters in the same order.

    Cost:   for each dtype 1 all_reduce of all gradients over each group, in float32 or wider, and a copy of them.
    Errors: TypeError for what is no list of tensors or of process groups.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
    for dtype, gradients in by_dtype.items():
        # One buffer, in the dtype that sums run in: an addend is rounded once, at the end.
        total = torch.cat([gradient.detach().flatten() for gradient in gradients]).to(accumulator(dtype))
        for group in groups:
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        for gradient, summed in zip(gradients, total.split([x.numel() for x in gradients]), strict=True):
            gradient.detach().copy_(summed.view(gradient.shape))
