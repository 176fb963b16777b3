"""Activation checkpointing within a memory budget: the compiler decides which results of a block backward recomputes.

Torch's partitioner cuts a compiled block into a forward and a backward. A budget is the share of the activations that
it may save: 0 saves a block's inputs only, and 1 saves what the fastest run needs. In between it recomputes the
cheapest operations. A recomputed dropout would draw other random numbers, so a graph that draws any is compiled without
a budget.
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

# Other backends have no partitioner: they save all that autograd saves.
PARTITIONERS = ("inductor", "aot_eager", "aot_eager_decomp_partition")

ATTENTION, DROPOUT = "scaled_dot_product_attention", 4  # its name, and the position of its argument dropout_p

DEFAULT = 0.5


def budget_in_force(budget: float | None, is_chosen: bool, enable_compile: bool, backend: str) -> float | None:
    """The budget of compiled blocks; None in another mode of checkpointing.

    Errors: ValueError for a budget in another mode, for blocks that are not compiled, and for a backend without a
            partitioner.
    """
    if not is_chosen:
        if budget is not None:
            raise Rejected(
                f"memory_budget={budget} needs activation_checkpointing='memory_budget'; pass both, or leave it out"
            )
        return None
    if not enable_compile:
        raise Rejected(
            "activation_checkpointing='memory_budget' needs a compiler; pass enable_compile=True, or "
            "activation_checkpointing='selective'"
        )
    if backend not in PARTITIONERS:
        raise Rejected(
            f"compile_backend={backend!r} has no partitioner, which 'memory_budget' needs; pass one of "
            f"{', '.join(map(repr, PARTITIONERS))}"
        )
    return DEFAULT if budget is None else budget


@functools.cache  # the compiler knows a backend by its identity
def budgeted(backend: str, budget: float) -> Callable[..., Any]:
    """A backend of torch.compile that saves this share of the activations of each graph.

    Cost: no collective; but with `budget=0` backward runs the graph's own collectives again.
    """
    compiled = lookup_backend(backend)

    def within(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if (operation := _random_operation(graph)) is not None:
            warnings.warn(
                f"activation_checkpointing='memory_budget': {operation} draws random numbers, and a recomputation "
                "would draw others; this block saves its activations; set dropout to 0, or pass 'selective'",
                UserWarning,
                stacklevel=2,
            )
            return compiled(graph, inputs, **options)
        with within_budget(budget):
            return compiled(graph, inputs, **options)

    return within


def _random_operation(graph: torch.fx.GraphModule) -> str | None:
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
