"""The gradients of one step of a model of transformers: in one process, and with sequences sharded over cp."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from parity_tests.parallelizer.families import IGNORED, Chosen, batch, model_of
from parity_tests.parallelizer.training import full_arrays, parallelized, summed_loss
from torch_impl.collectives.mesh import MeshView
from torch_impl.context_parallel import make_cp_batch_and_ctx
from torch_impl.parallelizer.mesh_axes import mesh_axes

ROWS, LENGTH = 4, 8  # 2 cp and tp divide the length


@cache
def alone(chosen: Chosen) -> dict[str, np.ndarray]:
    """The gradients of the unsharded model."""
    ids, targets = (torch.from_numpy(x) for x in batch(chosen, ROWS, LENGTH))
    model = model_of(chosen)
    (summed_loss(model(input_ids=ids).logits, targets) / int((targets != IGNORED).sum())).backward()
    return full_arrays(model, gradients=True)


def over_cp(view: MeshView, chosen: Chosen, adapt: Callable[[Any], object]) -> dict[str, np.ndarray]:
    """The same on this rank. `adapt(model)` gives the model, in place, layers that take `cp_group` and `layout`."""
    axes = mesh_axes(view.device_mesh)
    ids, targets = (torch.from_numpy(x) for x in batch(chosen, ROWS, LENGTH))
    first, step = 0, 1  # ranks of dp_shard and of ep have other rows
    for axis in ("dp_shard", "ep"):
        if axis not in (view.device_mesh.mesh_dim_names or ()):
            continue
        first, step = first + step * view.rank(axis), step * view.size(axis)
    rows = slice(first, None, step)
    model = model_of(chosen)
    adapt(model)
    model = parallelized()(model, view.device_mesh)
    factory, sharded = make_cp_batch_and_ctx(view.device_mesh, {"input_ids": ids[rows], "labels": targets[rows]})
    with factory():
        labels = sharded.pop("labels")
        layout = factory.layout  # pyright: ignore[reportFunctionMemberAccess]
        logits = model(**sharded, use_cache=False, cp_group=view["cp"], layout=layout).logits
        loss = summed_loss(logits, labels) / int((targets != IGNORED).sum())
        (axes.data_size * loss).backward()
    return full_arrays(model, gradients=True)
