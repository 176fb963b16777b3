"""Routing replay under activation recompute: the backward's recompute sends each token to the forward's experts.

A recompute may compute other numbers than the forward did, by another kernel or another order of a sum. Of two scores
that are almost equal it may then choose the other expert, and the recomputed activations belong to another function
than the loss. So the experts are remembered, k ids of each token, and the scores alone are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from torch import Tensor

from torch_impl.contract import Function, contract

P = ParamSpec("P")
Routing = tuple[Tensor, Tensor, Tensor]


@dataclass
class _Pass:
    """A forward of a checkpointed block, or the recompute of one: the experts of each router, in order of the calls."""

    experts: list[Tensor]
    is_recompute: bool
    calls: int = field(default=0)


class RoutingReplay:
    """Remember the experts that routers choose inside a checkpoint, and take them again when it is recomputed.

    Give its `contexts` to `torch.utils.checkpoint` and call the routers through `route`:

        replay = RoutingReplay()
        checkpoint(block, x, use_reentrant=False, context_fn=replay.contexts)
        gates, experts, probabilities = replay.route(softmax_top_k, logits, k)     # in the block

    Each checkpoint remembers for itself, so that blocks and micro-batches may share an object, in any order of their
    backwards, and a graph may be backpropagated twice. Outside a checkpoint `route` calls the router alone. Blocks with
    checkpoints inside them share an object too: the inner one remembers for its own routers.

    Cost:   no collective. Remembers 8 k bytes for each token of a router, until the graph is freed.
    """

    def __init__(self) -> None:
        self._passes: list[_Pass] = []

    @contract("RoutingReplay.route")
    def route(self, router: Function, *args: Any, **options: Any) -> Routing:
        """Call `router(*args, **options)`; in a recompute with the forward's `experts`.

        Cost:   as the router.
        Errors: as the router; RuntimeError for a recompute that calls more routers than its forward did.
        """
        current = self._passes[-1] if self._passes else None
        if current is None:
            return router(*args, **options)
        if current.is_recompute:
            if current.calls == len(current.experts):
                raise RuntimeError(
                    f"RoutingReplay.route: the recompute calls a router more often than the forward, which did "
                    f"{current.calls} times; checkpoint a block whose forward depends on its arguments alone"
                )
            options["experts"] = current.experts[current.calls].clone()
        routing = router(*args, **options)
        if not current.is_recompute:
            # Copies, since the block may change its ids in place, such as to -1 beyond an expert's capacity.
            current.experts.append(routing[1].detach().clone())
        current.calls += 1
        return routing

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of a checkpoint's forward and of its recompute, for its `context_fn`."""
        experts: list[Tensor] = []
        return self._running(experts, False), _Repeatable(lambda: self._running(experts, True))

    @contextmanager
    def _running(self, experts: list[Tensor], is_recompute: bool) -> Iterator[None]:
        self._passes.append(_Pass(experts, is_recompute))
        try:
            yield
        finally:
            self._passes.pop()


class _Repeatable(AbstractContextManager[None]):
    """A context that can be entered again: each backward of a graph enters the recompute's."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
