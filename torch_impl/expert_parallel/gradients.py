"""Sum gradients over the ranks that have other tokens for the same parameter.

These ranks depend on the parameter. The gradient of an expert's weight already includes the tokens of all ep ranks, so
it is summed over edp only, the ranks that replicate the expert. The gradient of a router or a shared expert includes
this rank's tokens only, so it is summed over all ranks with other tokens: dp x cp x ep, and also tp if tokens are
sharded over tp and the weight is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives.plain import sum_in_place
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

        routed   "e/ep ... edp=R"        ->   edp=I      already summed over the tokens of all ep ranks
        shared   "... edp=R ep=R"        ->   edp=I ep=I      sharded over tp, as in `shared_experts` with tp_group
        router   "... edp=R ep=R tp=R"   ->   edp=I ep=I tp=I

    `routed` are the weights of experts sharded over `ep_group` and replicated over `edp_group`; together these are all
    ranks with other tokens, dp x cp x ep. `shared` are weights sharded over tp, and `router` are all weights that are
    not, norms included: pass `tp_group` if tokens are sharded over tp as well. Nothing is divided: the global loss is
    the sum of the ranks' losses. Call it once, after the last micro-batch.

    Cost:   `sum_gradients` over [edp], [edp, ep] and [edp, ep, tp].
    Errors: as `sum_gradients`.
    """
    everywhere = [edp_group, ep_group] if tp_group is None else [edp_group, ep_group, tp_group]
    sum_gradients(routed, [edp_group])
    sum_gradients(shared, [edp_group, ep_group])
    sum_gradients(router, everywhere)


@contract
def sum_gradients(parameters: Parameters, groups: Groups) -> None:
    """Sum the gradients of `parameters` in place over each of `groups` in turn, and so over their product.

    One group of all these ranks takes one all_reduce instead of several. A parameter without a gradient adds zeros, so
    that all ranks send the same sizes; a parameter passed twice counts once. Every rank must pass the same parameters
    in the same order.

    Cost:   for each dtype 1 all_reduce of all gradients over each group, in float32 or wider, and a copy of them.
    Errors: TypeError if parameters is not a list of tensors or groups is not a list of process groups.
    """
    gradients: list[Tensor] = []
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad.detach())
    sum_in_place(gradients, groups)
