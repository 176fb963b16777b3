"""Reduce the gradients of replicated parameters over the ranks with copies, once before each optimizer step.

    sum    g <- sum_r g_r            the ranks had other tokens: a router, or a norm under sequence parallelism
    mean   g <- sum_r g_r / ranks    the ranks had the same tokens: rounding must not drive the copies apart

A gradient is linear in the micro-batches, so it is reduced once, after the last one. A reduction after each micro-batch
would sum the gradient of the first again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_impl.collectives.plain import sum_in_place
from torch_impl.contract import Groups, Instance, Module, OneOf, Rejected, TypeProblem, contract
from torch_impl.optimizers.dtensor_shards import local_tensor

Rule = Literal["sum", "mean", "none"]
RULES = OneOf(("sum", "mean", "none"))


class _Rules:
    """A dict from names of modules to rules."""

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            return TypeProblem(f"={value!r}; pass a dict of rules by name of a module")
        problems = ((name, RULES.problem(rule)) for name, rule in value.items())
        return next((f"[{name!r}]{problem}" for name, problem in problems if problem), None)


Rules = Annotated[Mapping[str, Rule], _Rules()]
Optimizer = Annotated[
    torch.optim.Optimizer, Instance(torch.optim.Optimizer, "pass a torch.optim.Optimizer", shows_value=False)
]


class ReplicaGradients:
    """Reduces the gradients of a model's replicated parameters over `groups`, once per step of `optimizer`.

        replicas = ReplicaGradients(model, [tp_group], {"": "mean", "layers.0.router": "sum"}, optimizer)
        for batch in batches:
            loss(model(batch)).backward()
        replicas.reduce()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    `rules` maps module names to rules. The innermost listed module that contains a parameter decides; "" is the full
    model. A parameter with the rule "none" is left alone: it is sharded over these ranks, or its gradient is
    reduced elsewhere. A parameter that two modules share is reduced once. Gradients in 16 bits are summed in float32.
    All ranks of the groups pass the same rules.

    Errors: TypeError for a wrong type; ValueError for no groups, two groups that have another rank than this one in
            common, a name that is no module, a parameter without a rule, two rules for a shared parameter, and a
            DTensor that is sharded over the ranks of a group.
    """

    @contract
    def __init__(self, model: Module, groups: Groups, rules: Rules, optimizer: Optimizer) -> None:
        if not groups:
            raise Rejected("groups is empty; pass the groups of ranks with copies")
        self.groups, self.is_reduced = [group for group in groups if group.size() > 1], False
        self.parameters = _parameters_by_rule(model, rules)
        for name, parameter in (each for of_rule in self.parameters.values() for each in of_rule):
            _check_replicated(name, parameter, self.groups)
        optimizer.register_step_post_hook(lambda *_: self.skip_step())

    def skip_step(self) -> None:
        """Allow another `reduce` before the optimizer's next step: the last gradients were dropped."""
        self.is_reduced = False

    @contract("ReplicaGradients.reduce")
    def reduce(self) -> None:
        """Reduce all gradients in place. A gradient that no rank has stays None.

        Under "sum" a rank without a gradient adds zeros; under "mean" all ranks must have one.

        Cost:   over each group of several ranks 1 all_reduce of one int32 for each parameter, which the host reads, and
                for each rule and dtype 1 all_reduce of all gradients, in float32 or wider.
        Errors: ValueError for a second call before the optimizer's step, a gradient under "mean" that some ranks lack,
                and a gradient that is sparse or a partial sum.
        """
        if self.is_reduced:
            raise Rejected(
                "gradients are reduced already, and were not used by a step; call it once, after the last micro-batch"
            )
        named = [each for of_rule in self.parameters.values() for each in of_rule]
        for name, parameter in named:
            _check_gradient(name, parameter.grad)
        present = dict(zip((name for name, _ in named), self._ranks_with_gradients(named), strict=True))
        ranks = math.prod(group.size() for group in self.groups)
        for name, _ in self.parameters["mean"]:
            if present[name] not in (0, ranks):
                raise Rejected(
                    f"{present[name]} of {ranks} ranks have a gradient of {name}; its rule must be sum or none"
                )
        for rule, of_rule in self.parameters.items():
            self._reduce([parameter for name, parameter in of_rule if present[name]], 1 if rule == "sum" else ranks)
        self.is_reduced = True

    def _ranks_with_gradients(self, named: list[tuple[str, nn.Parameter]]) -> list[int]:
        """The number of ranks that have a gradient, for each parameter."""
        if not named:
            return []
        device = local_tensor(named[0][1]).device
        counts = torch.tensor([parameter.grad is not None for _, parameter in named], dtype=torch.int32, device=device)
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        return counts.tolist()

    def _reduce(self, parameters: list[nn.Parameter], divisor: int) -> None:
        """Sum the gradients over all groups and divide them; a missing gradient counts as zeros."""
        gradients: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(local_tensor(parameter.grad.detach()))
        sum_in_place(gradients, self.groups, divisor)


def _parameters_by_rule(model: nn.Module, rules: Mapping[str, Rule]) -> dict[Rule, list[tuple[str, nn.Parameter]]]:
    """(name, parameter) pairs under "sum" and under "mean". A shared parameter stands once, with its first name.

    Parameters without requires_grad are left out.
    """
    modules = {name for name, _ in model.named_modules()}
    if unknown := [name for name in rules if name not in modules]:
        raise Rejected(f"rules has {unknown[0]!r}, which is no module of {type(model).__name__}")
    name_and_rule: dict[nn.Parameter, tuple[str, Rule]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        owners = [owner for owner in rules if not owner or name.startswith(f"{owner}.")]
        if not owners:
            raise Rejected(f"rules has no rule for {name}; add one for its module, or for the model under ''")
        rule = rules[max(owners, key=len)]
        first, first_rule = name_and_rule.setdefault(parameter, (name, rule))
        if first_rule != rule:
            raise Rejected(
                f"{first} and {name} are one parameter, with the rules {first_rule} and {rule}; use one rule"
            )
    return {
        kind: [(name, parameter) for parameter, (name, rule) in name_and_rule.items() if rule == kind]
        for kind in ("sum", "mean")
    }


def _check_replicated(name: str, parameter: nn.Parameter, groups: Groups) -> None:
    """Rejected for a DTensor that is sharded over two or more ranks of a group."""
    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        ranks = set(dist.get_process_group_ranks(mesh.get_group(dim)))
        shared = [group for group in groups if len(ranks & set(dist.get_process_group_ranks(group))) > 1]
        if shared and not placement.is_replicate():
            raise Rejected(f"{name} is sharded over a group of its copies ({placement}); give it the rule 'none'")


def _check_gradient(name: str, gradient: Tensor | None) -> None:
    if gradient is not None and gradient.is_sparse:
        raise Rejected(f"the gradient of {name} is sparse; build its module with sparse=False")
    if isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements):
        raise Rejected(f"the gradient of {name} is a partial sum; redistribute it first")
