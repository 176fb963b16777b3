"""Activation checkpointing within a memory budget: the compiler decides which results of a block backward recomputes.

Torch's partitioner cuts a compiled block into a forward and a backward. A budget says which share of the activations it
may save, between a block's inputs alone (0) and the results that it would save for the shortest run (1); within it it
recomputes the operations that cost least. It would draw the numbers of a recomputed dropout anew, so that a graph that
draws numbers is compiled without a budget.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_impl.contract import Rejected
from torch_impl.parallelizer._torch_compat import lookup_backend, within_budget

# Other backends do not partition a block: they save all that autograd saves.
PARTITIONING = ("inductor", "aot_eager", "aot_eager_decomp_partition")

ATTENTION, DROPOUT = "scaled_dot_product_attention", 4  # its name, and the place of its dropout


DEFAULT = 0.5


def budget_in_force(budget: float | None, is_chosen: bool, enable_compile: bool, backend: str) -> float | None:
    """The budget of compiled blocks; None unless the mode with a budget is chosen.

    Errors: ValueError for a budget without its mode, for blocks that are not compiled, and for a backend that does not
            decide what is saved.
    """
    if not is_chosen:
        if budget is not None:
            raise Rejected(
                f"memory_budget={budget} needs activation_checkpointing='memory_budget'; pass both, or leave it out"
            )
        return None
    if not enable_compile:
        raise Rejected(
            "activation_checkpointing='memory_budget' is decided by the compiler; pass enable_compile=True, or "
            "'selective'"
        )
    if backend not in PARTITIONING:
        raise Rejected(
            f"compile_backend={backend!r} does not decide what is saved, as 'memory_budget' needs; pass one of "
            f"{', '.join(map(repr, PARTITIONING))}"
        )
    return DEFAULT if budget is None else budget


@functools.cache  # the compiler knows a backend by its identity
def budgeted(backend: str, budget: float) -> Callable[..., Any]:
    """A backend of torch.compile that saves this share of the activations of each graph.

    Cost: forward and backward no collective, but with `budget=0` those of the graph again.
    """
    compiled = lookup_backend(backend)

    def within(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if (drawing := _drawing_operation(graph)) is not None:
            warnings.warn(
                f"activation_checkpointing='memory_budget': {drawing} draws numbers, which backward would draw anew; "
                "this block saves its activations; set dropout to 0, or pass 'selective'",
                UserWarning,
                stacklevel=2,
            )
            return compiled(graph, inputs, **options)
        with within_budget(budget):
            return compiled(graph, inputs, **options)

    return within


def _drawing_operation(graph: torch.fx.GraphModule) -> str | None:
    """The name of an operation of the graph, or of one inside it, that draws random numbers, or None."""
    graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    return next((_name(node) for each in graphs for node in each.nodes if _draws(node)), None)


def _draws(node: torch.fx.Node) -> bool:
    name = _name(node)
    if name == ATTENTION:
        return bool(node.kwargs.get("dropout_p", node.args[DROPOUT] if len(node.args) > DROPOUT else 0.0))
    if "dropout" in name and inspect.isfunction(node.target):
        call = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        call.apply_defaults()
        return bool(call.arguments["p"] and call.arguments["training"])
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _name(node: torch.fx.Node) -> str:
    if node.op not in ("call_function", "call_method"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
