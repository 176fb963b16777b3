"""Trace the first step of a run on its ranks and on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jax_ref import layouts
from shardproof.declare.case import CaseSpec
from shardproof.draw.inputs import coordinates
from shardproof.engines.engines import run as on_ranks
from shardproof.tracing.comparison import Found, Line, lines
from shardproof.tracing.events import IN, Event
from shardproof.tracing.flax_side import ReferenceTrace, traced
from shardproof.training.body import trace as body
from shardproof.training.corpus import global_batch
from shardproof.training.initial import initial_weights
from shardproof.training.run import Run

# The inputs of a mixer's norm differ: flax's norm takes y and z and gates y by z, PyTorch's takes the gated y.
UNLIKE = ("mixer.norm", IN)


def trace_reference(run: Run) -> ReferenceTrace:
    """The reference's trace of the first step. Each module is called once for each stream."""
    from jax_ref.models import Config, next_ids, normalised, token_losses
    from shardproof.training.by_name import flax_model

    batch, config = global_batch(run, 0), Config(**run.config)

    def loss(model: Any) -> Any:
        import jax.numpy as jnp

        losses, counted, router_losses = [], [], []
        for stream in batch:
            ids, padded, real = (jnp.asarray(x) for x in (stream.ids, stream.padded, stream.real))
            targets, is_valid = next_ids(ids, padded, real)
            logits, router_loss = model.logits_and_router_loss(ids[None], padded, real)
            losses.append(token_losses(logits[0], targets, is_valid))
            counted.append(is_valid)
            router_losses.append(router_loss)
        return normalised(losses, counted) + jnp.stack(router_losses).mean()

    reference_trace = traced(
        lambda weights: flax_model(config, weights), loss, initial_weights(run.config, run.seed), run.dtype
    )
    module, end = UNLIKE
    alike = {
        event: x
        for event, x in reference_trace.values.items()
        if not (event.module.endswith(module) and event.end == end)
    }
    return replace(reference_trace, values=alike)


def trace(run: Run, reference_trace: ReferenceTrace, engine: str = "gloo") -> list[Line]:
    """Trace the run's first step, and compare it with the reference: one line for each tensor, in order of execution.

    Errors: RankFailure, one subclass per cause.
    """
    recordings, gradients, numbers = zip(*on_ranks(body, case_of(run, engine), engine).results, strict=True)
    none = {name: np.zeros_like(array) for name, array in reference_trace.of_weights.items()}
    record = Found(recordings, none | gradients[0], numbers)
    batch, places = global_batch(run, 0), coordinates(run.full_mesh)

    def positions(rank: int, event: Event, shape: tuple[int, ...], local: tuple[int, ...]) -> list[np.ndarray] | None:
        return dim_positions(shape, local, batch[event.call].padded, places[rank], run)

    return lines(
        reference_trace, record, positions, run.dtype, {axis: size for axis, size in run.mesh.items() if size > 1}
    )


def case_of(run: Run, engine: str) -> CaseSpec:
    """The case that is sent to the ranks of a trace."""
    return CaseSpec(scheme="trace", mesh=run.full_mesh, dtype=run.dtype, options=run.options(), engine=engine)


def dim_positions(
    shape: tuple[int, ...], local: tuple[int, ...], padded: np.ndarray, at: dict[str, int], run: Run
) -> list[np.ndarray] | None:
    """A shard's positions along each dim of [1, tokens, ..., d]: tokens are sharded over cp, d over tp if at all."""
    if len(shape) != len(local):
        return None
    parts = [np.arange(size) for size in shape]
    parts[1] = np.asarray(layouts.packed(shape[1], run.size("cp"), padded)[at["cp"]])
    if local[-1] != shape[-1]:
        parts[-1] = np.asarray(layouts.contiguous(shape[-1], run.size("tp"))[at["tp"]])
    return parts if tuple(map(len, parts)) == local else None
