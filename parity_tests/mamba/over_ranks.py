"""Run a mixer over cp ranks with either strategy, and check which outputs a token may change. It loads no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.func import functional_call

from jax_ref.layouts import BUILTIN as DENSE_LAYOUTS
from jax_ref.layouts import packed as packed_layout
from parity_tests.mamba.mixers import PROJECTED, T
from parity_tests.mamba.parameters import settings_of, sizes_of
from shardproof import CaseSpec
from shardproof.declare.declared import flat
from shardproof.engines.engines import RunResult, run
from torch_impl.layouts import TokenLayout
from torch_impl.mamba import Mamba2Mixer

OF_STRATEGY = {"conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D"}
# How a strategy gets its ranks, its tokens and its parameters.
WAYS = ("by name", "by name and fill", "by layout", "by layout and offsets", "by mesh", "copied", "of DTensors")


def parallel(
    kind: Callable[..., Any],
    mesh,
    u,
    parameters,
    groups,
    cu=None,
    way="by name",
    limits=(0.0, inf),
    conv_bias=True,
    **chosen,
) -> Tensor:
    """The mixer over cp with that strategy, in chunks of four tokens."""
    with_fill = None if cu is None else torch.cat([cu, cu.new_full((2,), -1)])
    if way.startswith("by layout"):
        chosen["layout"] = layout_of(mesh, chosen.get("layout", "dual_chunk_swap"), u.shape[1] * mesh.size("cp"), cu)
        cu = with_fill if way == "by layout and offsets" else None
    cu = with_fill if way == "by name and fill" else cu
    ranks = mesh.device_mesh["cp"] if way == "by mesh" else mesh["cp"]

    def strategy(mixer):
        return kind(ranks, **sizes_of(parameters, groups), mixer=mixer, **chosen)

    module = Mamba2Mixer(
        **settings_of(parameters, groups),
        chunk_size=4,
        conv_bias=conv_bias,
        dt_limit=limits,
        context_parallel=strategy,
        device="meta",
        dtype=u.dtype,
    )
    by_name = {name: x for name, x in flat(parameters).items() if conv_bias or name != "conv1d.bias"}
    if way == "of DTensors":
        for name in by_name.keys() & OF_STRATEGY:
            by_name[name] = DTensor.from_local(by_name[name], mesh.device_mesh["cp"], [Replicate()], run_check=False)
    return functional_call(deepcopy(module) if way == "copied" else module, by_name, (u, cu), strict=True)


def layout_of(mesh: Any, order: str, total: int, cu: Tensor | None) -> TokenLayout:
    """The layout that an order of tokens names."""
    ranks = {"cp_size": mesh.size("cp"), "cp_rank": mesh.rank("cp")}
    if cu is None:
        return TokenLayout.dense(order, total, **ranks)
    return TokenLayout.packed(cu, kind="packed" if order == "dual_chunk_swap" else order, **ranks)


def rank_positions(cp: int, layout: str, cu: Sequence[int] | None, t: int = T) -> Any:
    """Positions of each rank."""
    return packed_layout(t, cp, cu) if cu and layout == "dual_chunk_swap" else DENSE_LAYOUTS[layout](t, cp)


def offsets_of(cu: Sequence[int] | None) -> Tensor | None:
    return None if cu is None else torch.tensor(cu)


def on_ranks(body: Callable[..., Any], cp: int = 2) -> RunResult:
    return run(body, CaseSpec(scheme="mamba", mesh={"cp": cp}))


def check_what_a_token_changes(strategy_of: Callable[..., Any], cp: int, layout: str, cu: Sequence[int] | None) -> None:
    """A token changes the later tokens of its own sequence, on whichever rank, and nothing else."""
    cuts = [0, T] if cu is None else cu
    sequence = torch.searchsorted(torch.tensor(cuts[1:]), torch.arange(T), right=True)

    def body(mesh, case):
        held_positions = torch.tensor(rank_positions(cp, layout, cu)[mesh.rank("cp")])
        strategy, moved = strategy_of(mesh, layout=layout), []
        y = strategy.mix(PROJECTED[:1, held_positions], offsets_of(cu))
        for t in range(T):
            edited = PROJECTED[:1].clone()
            edited[:, t, 8:] += 0.5
            moved.append((strategy.mix(edited[:, held_positions], offsets_of(cu)) != y)[0].any(-1).tolist())
        return moved

    for rank, moved in enumerate(on_ranks(body, cp).results):
        positions = rank_positions(cp, layout, cu)[rank]
        assert moved == [[u >= t and bool(sequence[u] == sequence[t]) for u in positions] for t in range(T)]
