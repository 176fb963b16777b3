"""Name the lines that lack a sum over a mesh axis in their backward, if there is no collective to blame.

After a product with a sharded weight each rank has a part of its input's gradient, and the parts must be summed. If the
sum is missing, there is no collective for `repaired_lines` to repair. So the case runs again with a sum at one edge of
the autograd graph at a time, or at all edges into one tensor. The report names the lines where the sum makes the wrong
gradients right.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from shardproof.declare.declared import Declared
from shardproof.engines.ledger import base, innermost, is_plumbing
from shardproof.engines.program import Program
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

MAX_RUNS = 24
DTENSOR_OPERATIONS = {"_FromTorchTensor": "DTensor.from_local", "_ToTorchTensor": "DTensor.to_local"}
FRAME = re.compile(r'File "([^"]+)", line (\d+)')  # one frame of the stack that torch's anomaly mode stores for a node


@dataclass(frozen=True)
class Edge:
    """The gradient of an operation's input number `place`; the operation is `mm`, say, or a torch.autograd.Function.

    `number` counts the operations of this name on this line.
    """

    operation: str
    source: str
    place: int
    is_handwritten: bool
    number: int = 0


Graph = list[tuple[Edge, Any, Any]]  # each edge with its two nodes, nearest to the outputs first


def places_of_missing_sums(scheme: Declared, report: Report, labels: Sequence[str], axis: str) -> dict[str, str]:
    """For each gradient, the line where a sum over `axis` makes it right and makes no right tensor wrong.

    Cost: at most 1 + MAX_RUNS runs of the case.
    """
    right_before = {tensor.label for tensor in report.tensors if tensor.ok}
    places: dict[str, str] = {}
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        # 1. The edges of rank 0's graph, and groups of edges into one tensor.
        graph: Graph = []
        verify_case(scheme, report.case, wrap_program=with_graph(lambda mesh, own: _keep_rank_0(graph, own)))
        # 2. Run the case with the sum at each candidate in turn.
        for edges in list(_candidates(graph))[:MAX_RUNS]:
            repaired = verify_case(scheme, report.case, wrap_program=_with_sum(edges, axis))
            right = {tensor.label for tensor in repaired.tensors if tensor.ok}
            if repaired.failure is None and right_before <= right:
                places = {**dict.fromkeys(right.intersection(labels), _place(edges)), **places}
            if len(places) == len(labels):
                break
    return places


def _keep_rank_0(graph: Graph, own: Graph) -> None:
    if dist.get_rank() == 0:
        graph[:] = own


def _candidates(graph: Graph) -> Iterator[tuple[Edge, ...]]:
    """Edges to try together: all of a line, hand-written backwards first; each alone; then all into one tensor."""
    edges = sorted(dict.fromkeys(edge for edge, _, _ in graph), key=lambda edge: not edge.is_handwritten)
    lines = dict.fromkeys(replace(edge, number=0) for edge in edges)
    of_lines = [tuple(edge for edge in edges if replace(edge, number=0) == line) for line in lines]
    yield from of_lines
    yield from ((edge,) for of_line in of_lines if len(of_line) > 1 for edge in of_line)
    targets = dict.fromkeys(target for _, _, target in graph)
    into = (tuple(dict.fromkeys(edge for edge, _, other in graph if other is target)) for target in targets)
    yield from (edges for edges in into if len(edges) > 1)


def with_graph(use: Callable[[Any, Graph], None]) -> Callable[[Program], Program]:
    """A wrapper for `verify_case` that passes each rank's mesh and autograd graph to `use`."""

    def wrap(program: Program) -> Program:
        def fn(mesh: Any, **arguments: Any) -> Any:
            returned = program.fn(mesh, **arguments)
            use(mesh, _graph_of(returned))
            return returned

        return replace(program, fn=fn)

    return wrap


def _with_sum(edges: Sequence[Edge], axis: str) -> Callable[[Program], Program]:
    """A wrapper that sums the gradients at these edges over an axis."""

    def add_hooks(mesh: Any, graph: Graph) -> None:
        for edge, node, _ in graph:
            if edge in edges:
                node.register_hook(lambda gradients, _, place=edge.place: _summed(gradients, place, mesh[axis]))

    return with_graph(add_hooks)


def _summed(gradients: Sequence[Any], place: int, group: Any) -> tuple[Any, ...]:
    total = gradients[place]
    if type(total) is torch.Tensor:
        total = total.contiguous().clone()
        dist.all_reduce(total, group=group)
    return (*gradients[:place], total, *gradients[place + 1 :])


def _graph_of(returned: Any) -> Graph:
    """The edges of the graph below a function's results."""
    outputs = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
    nodes = dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None)
    graph: Graph = []
    queue = list(nodes)
    for node in queue:  # the list grows while it is read: breadth first
        for place, (target, _) in enumerate(node.next_functions):
            if target is not None:
                graph.append((_edge(node, place), node, target))
                if target not in nodes:
                    nodes[target] = None
                    queue.append(target)
    return [each for each in _numbered(graph) if each[0].source]


def _numbered(graph: Graph) -> Graph:
    nodes: dict[Edge, list[Any]] = {}
    for edge, node, _ in graph:
        nodes.setdefault(edge, []).append(node)
    return [(replace(edge, number=nodes[edge].index(node)), node, target) for edge, node, target in graph]


def _edge(node: Any, place: int) -> Edge:
    """The edge with the user's line that called the operation, or with the line of a hand-written backward."""
    source = place_of_backward(getattr(type(node), "_forward_cls", None))
    if source is not None:
        return Edge(type(node)._forward_cls.__name__, source, place, True)
    stack = FRAME.findall("".join(node.metadata.get("traceback_", ())))
    source = innermost([(file, int(line)) for file, line in stack])
    operation = re.sub(r"Backward\d*$", "", node.name())
    return Edge(DTENSOR_OPERATIONS.get(operation) or operation.lower(), source or "", place, False)


def place_of_backward(function: Any) -> str | None:
    """file:line of the backward of a user's torch.autograd.Function, None for anything else."""
    backward = getattr(function, "backward", None)
    code = None if backward is None else getattr(inspect.unwrap(backward), "__code__", None)
    return None if code is None or is_plumbing(code.co_filename) else _place_of_def(code)


def _place_of_def(code: CodeType) -> str:
    """file:line of the `def`; the code of a staticmethod starts at its decorator."""
    first = code.co_firstlineno
    lines = linecache.getlines(code.co_filename)[first - 1 :]
    offset = next((number for number, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
    return f"{base(code.co_filename)}:{first + offset}"


def _place(edges: Sequence[Edge]) -> str:
    """`the backward of mm at layer.py:7`."""
    places = " and ".join(dict.fromkeys(f"{edge.operation} at {edge.source}" for edge in edges))
    return f"the backward of {places}"
